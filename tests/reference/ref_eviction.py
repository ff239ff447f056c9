"""The oracle of the eviction policies: runs in plain lists, every choice made by looking at all of them.

A run is what was inserted together and not split since; it enters, is used and ends as a whole, as in the index.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

Prefix = tuple[int, ...]  # one int a block here
SHORT_RUN = 64
SMALL, MAIN = ONCE, AGAIN = 0, 1


def name_of(prefix: Prefix) -> Prefix:
    """What a missing block is remembered by: its depth, itself and the block before it."""
    return (len(prefix), *prefix[-2:])


@dataclass(eq=False)
class Run:
    blocks: list[int]
    payloads: list[int]
    parent: Run | None
    children: list[Run] = field(default_factory=list)
    priority: int = 0
    uses: int = 0
    stamp: int = 0
    band: int = 0
    base: float = 0.0

    @property
    def above(self) -> Prefix:
        return () if self.parent is None else self.parent.path

    @property
    def path(self) -> Prefix:
        return (*self.above, *self.blocks)


class EvictionOracle:
    """`cost(context)` in seconds per byte, for "cost-aware"."""

    def __init__(
        self, policy: str, per_token: float = 1.0, per_context_token: float = 0.0, block_tokens: int = 1
    ) -> None:
        self.policy = policy
        self.cost = lambda end: per_token + per_context_token * (end - 1) * block_tokens
        self.root = Run([], [], None)
        self.clock = 0
        self.floor = 0.0
        self.ghosts: tuple[list[Prefix], list[Prefix]] = ([], [])
        self.target = 0.0
        self.taken: list[Run] = []

    # --- what happens to runs -------------------------------------------------------------------------------

    def insert(self, prompt: Prefix, payloads: list[int], priority: int = 0) -> None:
        run, offset, found = self._walk(prompt)
        if found < len(prompt):
            if 0 < offset < len(run.blocks):
                run = self._split(run, offset)
            fresh = Run(list(prompt[found:]), payloads[found:], run)
            self._enter(fresh, prompt)
            run.children.append(fresh)
            run = fresh
        self._use(run, priority)
        self._merge(run)

    def match(self, prompt: Prefix) -> int:
        run, _, found = self._walk(prompt)
        self._use(run, 0)
        return found

    def _walk(self, prompt: Prefix) -> tuple[Run, int, int]:
        run, offset, found = self.root, 0, 0
        while found < len(prompt) and offset == len(run.blocks):
            following = [child for child in run.children if child.blocks[0] == prompt[found]]
            if not following:
                break
            run, offset = following[0], 0
            while offset < len(run.blocks) and found < len(prompt) and run.blocks[offset] == prompt[found]:
                offset, found = offset + 1, found + 1
        return run, offset, found

    def _split(self, run: Run, at: int) -> Run:
        assert run.parent is not None
        upper = replace(run, blocks=run.blocks[:at], payloads=run.payloads[:at], children=[run])
        run.parent.children[run.parent.children.index(run)] = upper
        run.blocks, run.payloads, run.parent = run.blocks[at:], run.payloads[at:], upper
        return upper

    def _merge(self, run: Run) -> None:
        while (upper := run.parent) is not None and upper.parent is not None:
            same = (upper.priority, upper.band, upper.stamp, upper.uses, upper.base) == (
                run.priority, run.band, run.stamp, run.uses, run.base,
            )  # fmt: skip
            if len(upper.children) > 1 or not same or len(upper.blocks) + len(run.blocks) > SHORT_RUN:
                return
            run.blocks, run.payloads = upper.blocks + run.blocks, upper.payloads + run.payloads
            upper.parent.children[upper.parent.children.index(upper)] = run
            run.parent = upper.parent

    def _enter(self, run: Run, prompt: Prefix) -> None:
        for place in range(len(run.blocks)):
            name = name_of(prompt[: len(prompt) - len(run.blocks) + place + 1])
            once, again = (float(len(ghosts)) for ghosts in self.ghosts)
            known = [band for band in (ONCE, AGAIN) if name in self.ghosts[band]][:1]
            if known == [ONCE] and self.policy == "arc":
                self.target = min(self.target + max(1.0, again / once), float(self.num_blocks))
            elif known == [AGAIN]:
                self.target = max(self.target - max(1.0, once / again), 0.0)
            for band in known:
                self.ghosts[band].remove(name)
            if known and place == 0:
                run.band = 1

    def _use(self, run: Run, priority: int) -> None:
        self.clock += 1
        step: Run | None = run
        while step is not None and step.parent is not None:
            step.priority = max(step.priority, priority)
            step.uses += 1
            if self.policy == "cost-aware":
                step.base = self.floor
            if step.uses == 1 or self.policy not in ("fifo", "s3fifo"):
                step.stamp = self.clock
            most = {"fifo": 1, "arc": 2, "s3fifo": 4}.get(self.policy, step.uses)
            step.uses = min(step.uses, most)
            if self.policy == "arc" and step.uses == 2:
                step.band = AGAIN
            step = step.parent

    # --- victims --------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < count and (run := self._next()) is not None:
            self.taken.append(run)
            kept = max(0, len(run.blocks) - (count - len(gone)))
            for place in range(kept, len(run.blocks)):
                self._give_up(run, name_of(run.path[: len(run.above) + place + 1]))
            gone += reversed(run.payloads[kept:])
            del run.blocks[kept:], run.payloads[kept:]
            if not kept and run.parent is not None:
                run.parent.children.remove(run)
        self.taken.clear()
        return gone

    @property
    def runs(self) -> list[Run]:
        found, left = [], list(self.root.children)
        while left:
            found.append(left.pop())
            left += found[-1].children
        return found

    @property
    def num_blocks(self) -> int:
        return sum(len(run.blocks) for run in self.runs)

    def _in_band(self, band: int) -> int:
        return sum(len(run.blocks) for run in self.runs if run.band == band and run not in self.taken)

    def _rank(self, run: Run) -> float:
        if self.policy == "lfu":
            return run.uses
        return run.base + run.uses * self.cost(len(run.path)) if self.policy == "cost-aware" else 0.0

    def _next(self) -> Run | None:
        while True:
            leaves = [run for run in self.runs if not run.children and run not in self.taken]
            if not leaves:
                return None
            least = min(run.priority for run in leaves)
            leaves = [run for run in leaves if run.priority == least]
            if len({run.band for run in leaves}) == 2:
                band = self._choose()
                leaves = [run for run in leaves if run.band == band]
            run = min(leaves, key=lambda run: (self._rank(run), run.stamp))
            if self.policy != "s3fifo" or run.uses - 1 < (2 if run.band == SMALL else 1):
                return run
            self.clock += 1
            run.uses = 1 if run.band == SMALL else run.uses - 1
            run.band, run.stamp = MAIN, self.clock

    def _choose(self) -> int:
        first, second = self._in_band(0), self._in_band(1)
        if self.policy == "arc":
            return ONCE if first > self.target else AGAIN
        return SMALL if first * 10 >= first + second else MAIN

    def _give_up(self, run: Run, name: Prefix) -> None:
        if self.policy == "cost-aware":
            self.floor = max(self.floor, self._rank(run))
        if self.policy == "arc" or (self.policy == "s3fifo" and run.band == SMALL):
            most = self.num_blocks - (self.num_blocks // 10 if self.policy == "s3fifo" else 0)
            ghosts = self.ghosts[run.band]
            if name in ghosts:
                ghosts.remove(name)
            del ghosts[: max(0, len(ghosts) + 1 - most)]
            ghosts.append(name)
