"""Which sequences run in the next step, and the blocks they grow into. Knows no model and no torch.

    arrival order:  | running: hold KV, at most max_sequences ... | waiting: perhaps hold a matched prefix ... |

Every running sequence is older than every waiting one. Under memory pressure an older sequence may take the blocks of
the youngest, never the other way round: so the oldest always gets on, and nothing starves. Only who waits for the
quota of its own tenant lets others pass, and takes blocks of that tenant alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from poolweave.errors import NotResident, OutOfBlocks, PoolweaveError, QuotaExceeded
from poolweave.mempool import Blocks, MemPool
from poolweave.serving.engine.config import EngineConfig
from poolweave.serving.engine.sequence import Sequence
from poolweave.types import Tier


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` of a sequence to compute in this step, from its `num_computed` on."""

    sequence: Sequence
    num_tokens: int
    first: bool  # since the sequence was admitted


@dataclass(slots=True)
class Plan:
    """One step: what runs, and what can never run."""

    chunks: dict[str, Chunk] = field(default_factory=dict)
    failed: list[tuple[Sequence, PoolweaveError]] = field(default_factory=list)
    over_quota: set[bytes | int | None] = field(default_factory=set)  # who has no room of their own: see _payer
    budget: int = 0


class Batcher:
    """Continuous batching: decode tokens first, then prefill chunks in arrival order, within a token budget."""

    def __init__(self, pool: MemPool, config: EngineConfig) -> None:
        self._pool = pool
        self._layout = pool.layout
        self._config = config
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preempted = 0

    def add(self, sequence: Sequence) -> None:
        """Queue behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended; its blocks stay its owner's."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def check(self) -> None:
        """Assert all invariants; for tests."""
        queued = [*self.running, *self.waiting]
        assert len(set(queued)) == len(queued)
        assert len(self.running) <= self._config.max_sequences
        for sequence in queued:
            held = len(sequence.blocks) * self._layout.block_tokens
            assert not sequence.finished
            assert 0 <= sequence.num_computed < len(sequence.tokens)
            assert sequence.num_computed <= held

    def plan(self) -> Plan:
        """Choose the next step's chunks and allocate the blocks they write; may preempt. Empty when memory is short."""
        plan = Plan(budget=self._config.step_tokens)
        for sequence in [s for s in self.running if s.num_pending == 1]:
            self._schedule(plan, sequence, first=False)
        for sequence in [s for s in self.running if s.num_pending > 1]:
            self._schedule(plan, sequence, first=False)
        at = 0
        while at < len(self.waiting) and plan.budget > 0 and len(self.running) < self._config.max_sequences:
            payer = self._payer(self.waiting[at])
            if payer not in plan.over_quota and self._admit(plan, at):
                continue
            if payer not in plan.over_quota:
                break
            at += 1
        return plan

    def _schedule(self, plan: Plan, sequence: Sequence, *, first: bool) -> bool:
        """Put a running sequence into the plan, if the budget and the pool allow."""
        preempted = sequence not in self.running  # by an older one, earlier in this step
        if preempted or plan.budget == 0 or not self._grow(plan, sequence):
            return False
        num_tokens = min(sequence.num_pending, plan.budget)
        plan.chunks[sequence.request_id] = Chunk(sequence, num_tokens, first)
        plan.budget -= num_tokens
        return True

    def _admit(self, plan: Plan, at: int) -> bool:
        """Move a waiting sequence to the running ones with blocks for all its tokens, or leave it waiting."""
        sequence = self.waiting.pop(at)
        self.running.append(sequence)
        if self._schedule(plan, sequence, first=True):
            return True
        self.waiting.insert(at, self.running.pop())
        return False

    def _grow(self, plan: Plan, sequence: Sequence) -> bool:
        """Blocks for all tokens of `sequence`, all of them in HBM; preempts younger sequences when there are none."""
        needed = self._layout.num_blocks(len(sequence.tokens))
        while True:
            try:
                self._make_resident(sequence)
                if needed > len(sequence.blocks):
                    sequence.blocks = sequence.blocks + self._pool.alloc(needed - len(sequence.blocks), ns=sequence.ns)
                return True
            except OutOfBlocks as error:
                quota = error.limit if isinstance(error, QuotaExceeded) else None
                if needed > (self.capacity if quota is None else quota):
                    plan.failed.append((sequence, error))
                    return False
                victim = self._youngest_holder(than=sequence, of_its_tenant=quota is not None)
                if victim is None:
                    if quota is not None:
                        plan.over_quota.add(self._payer(sequence))
                    return False
                self._preempt(victim)

    def _make_resident(self, sequence: Sequence) -> None:
        """Bring a prefix that was matched or received in DRAM into HBM; blocks in use never leave it."""
        if not len(sequence.blocks):
            return
        try:
            self._pool.slots(sequence.blocks)
        except NotResident:
            self._pool.swap_in(sequence.blocks)

    def _youngest_holder(self, than: Sequence, *, of_its_tenant: bool) -> Sequence | None:
        """The last to arrive that holds blocks and arrived after `than`."""
        for sequence in reversed([*self.running, *self.waiting]):
            if sequence is than:
                return None
            if len(sequence.blocks) and (not of_its_tenant or self._payer(sequence) == self._payer(than)):
                return sequence
        return None

    def _payer(self, sequence: Sequence) -> bytes | int | None:
        """Whose quota pays for it; a namespace of which nobody told whose it is pays for itself."""
        return self._pool.tenant(sequence.ns) or sequence.ns

    def _preempt(self, victim: Sequence) -> None:
        """Give back a sequence's blocks; it is computed again, answer so far included, when its turn comes.

        It is not in the plan yet: the older ones, which alone may take its blocks, are planned before it.
        """
        self._pool.free(victim.blocks)
        victim.blocks = Blocks.empty()
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preempted += 1
        if victim in self.running:
            self.running.remove(victim)
            self.waiting.insert(0, victim)

    @property
    def capacity(self) -> int:
        """Blocks that one sequence could have if it were alone."""
        return self._pool.stats().tiers[Tier.HBM].total
