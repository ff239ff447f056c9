"""The layer-wise pipeline: batches of unlike models take turns in attention and FFN, a few in flight at a time.

A pure state machine: no clock, no threads, no I/O; whoever drives it starts a stage, runs it and reports its end.
Two in flight is the paper's pipeline; with transfers as stages of their own (attention, A-to-F, FFN, F-to-A), which
the paper leaves open, four keep every stage busy. Source: CrossPool layer-wise pipeline.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from poolweave.errors import ConfigError


class Turn(enum.IntEnum):
    """Whose turn a batch has. A batch whose layer is its model's number of layers has its sampling turn."""

    ATTENTION = 1
    TO_FFN = 2
    FFN = 3
    TO_ATTENTION = 4


_WITH_TRANSFERS = {
    Turn.ATTENTION: Turn.TO_FFN,
    Turn.TO_FFN: Turn.FFN,
    Turn.FFN: Turn.TO_ATTENTION,
    Turn.TO_ATTENTION: Turn.ATTENTION,
}
_WITHOUT_TRANSFERS = {Turn.ATTENTION: Turn.FFN, Turn.FFN: Turn.ATTENTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """One model as the pipeline sees it. `layer_s` is what a layer costs, of any unit: it only weighs fairness.

    `owners`: the FFN ranks of each layer, that work on a batch one after the other; without any there is one rank.
    """

    num_layers: int
    layer_s: float = 1.0
    owners: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.num_layers < 1 or not self.layer_s > 0:
            raise ConfigError(
                f"a model has layers and they cost time, got {self.num_layers} of {self.layer_s}",
                setting="num_layers", value=self.num_layers,
            )  # fmt: skip

    def ffn_ranks(self, layer: int) -> tuple[int, ...]:
        return self.owners[layer] if self.owners else (0,)

    @property
    def pass_s(self) -> float:
        """Cost of one token for a batch: all layers."""
        return self.num_layers * self.layer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """`in_flight` batches at once, each of at most `max_batch` requests; `transfers` makes them stages."""

    in_flight: int = 2
    max_batch: int = 4
    transfers: bool = False

    def __post_init__(self) -> None:
        for name in ("in_flight", "max_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive", setting=name, value=getattr(self, name), limit=1)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in flight. `ticket` orders batches that wait for the same stage: first come, first served.

    `part`: how many of the layer's FFN ranks were done with it before.
    """

    number: int
    model: str
    requests: tuple[str, ...]
    layer: int
    turn: Turn
    ticket: int
    part: int = 0
    running: bool = False

    @property
    def size(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Counters since the start, and what is there now."""

    passes: Mapping[str, int]
    tokens: Mapping[str, int]
    waiting: Mapping[str, int]
    in_flight: int


@dataclass(slots=True)
class _Queue:
    """One model's requests that are in no batch, and the service it had, in seconds of its own cost."""

    model: PipelineModel
    waiting: deque[str] = field(default_factory=deque)
    served_s: float = 0.0
    passes: int = 0
    tokens: int = 0
    in_flight: int = 0

    @property
    def active(self) -> bool:
        return bool(self.waiting) or self.in_flight > 0


class Pipeline:
    """Forms batches, moves them through their turns and dissolves them after each token.

    Continuous batching: after a token, unfinished requests go to the end of their model's queue and a new batch is
    formed. Fairness: the next batch is of the waiting model that had the least service time; a model that comes back
    from idleness starts level with the least served active one, so it neither catches up nor is held back.
    Not thread-safe: one driver.
    """

    def __init__(self, models: Mapping[str, PipelineModel], config: PipelineConfig | None = None) -> None:
        if not models:
            raise ConfigError("a pipeline needs a model", setting="models")
        self.config = config or PipelineConfig()
        self._queues = {name: _Queue(model) for name, model in models.items()}
        self._next = _WITH_TRANSFERS if self.config.transfers else _WITHOUT_TRANSFERS
        self._batches: dict[int, Batch] = {}
        self._owner: dict[str, str] = {}  # request -> model
        self._cancelled: set[str] = set()
        self._tickets = 0
        self._numbers = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The stages there are, in order."""
        return tuple(self._next)

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple(self._batches.values())

    @property
    def has_work(self) -> bool:
        return bool(self._owner)

    def add(self, request: str, model: str) -> None:
        """Queue a request that has at least one token to decode. Raises ConfigError for a model or name in doubt."""
        if model not in self._queues:
            raise ConfigError(f"no model {model!r} here: {sorted(self._queues)}", setting="model", value=model)
        if request in self._owner:
            raise ConfigError(f"request {request!r} is here already", setting="request", value=request)
        queue = self._queues[model]
        if not queue.active:
            level = [other.served_s for other in self._queues.values() if other.active]
            queue.served_s = max(queue.served_s, min(level, default=queue.served_s))
        self._owner[request] = model
        queue.waiting.append(request)
        self._form()

    def cancel(self, request: str) -> None:
        """Drop a request: at once while it waits, else when its batch has its token. Unknown ones are ignored."""
        model = self._owner.get(request)
        if model is None:
            return
        if request in self._queues[model].waiting:
            self._queues[model].waiting.remove(request)
            del self._owner[request]
        else:
            self._cancelled.add(request)

    def start(self, turn: Turn) -> Batch | None:
        """Take the batch that has waited longest for this stage; None when none waits or the stage is busy.

        Each FFN rank is a stage of its own: several may run at once.
        """
        here = [batch for batch in self._batches.values() if batch.turn is turn]
        busy = {self.rank_of(batch) for batch in here if batch.running}
        waiting = [batch for batch in here if not batch.running and self.rank_of(batch) not in busy]
        if not waiting:
            return None
        batch = replace(min(waiting, key=lambda each: each.ticket), running=True)
        self._batches[batch.number] = batch
        return batch

    def finish(self, number: int, finished: Collection[str] = ()) -> Batch | None:
        """A stage of a batch ended: pass it on. `finished` names the requests whose sampling turn was their last.

        -> the batch with its next turn, or None after its sampling turn, when it is dissolved. Raises ConfigError
        for a batch that is not running, or `finished` outside a sampling turn.
        """
        batch = self._batches.get(number)
        if batch is None or not batch.running:
            raise ConfigError(f"batch {number} is not running", setting="number", value=number)
        sampling = self.is_sampling(batch)
        if not set(finished) <= set(batch.requests if sampling else ()):
            raise ConfigError(
                f"requests {sorted(set(finished))} do not end in turn {batch.turn.name} of layer {batch.layer}",
                setting="finished", value=sorted(set(finished)),
            )  # fmt: skip
        if sampling:
            self._dissolve(batch, set(finished))
            return None
        part = batch.part + (batch.turn is Turn.FFN)
        if batch.turn is Turn.FFN and part < len(self._queues[batch.model].model.ffn_ranks(batch.layer)):
            self._batches[number] = replace(batch, part=part, ticket=self._ticket(), running=False)
            return self._batches[number]
        following = self._next[batch.turn]
        layer = batch.layer + (following is Turn.ATTENTION)
        moved = replace(batch, turn=following, layer=layer, part=0, ticket=self._ticket(), running=False)
        self._batches[number] = moved
        return moved

    def rank_of(self, batch: Batch) -> int:
        """The FFN rank whose turn a batch has; 0 in other turns."""
        if batch.turn is not Turn.FFN:
            return 0
        return self._queues[batch.model].model.ffn_ranks(batch.layer)[batch.part]

    def is_sampling(self, batch: Batch) -> bool:
        """True in the turn after the last layer: final norm, logits and sampling, on the KV side."""
        return batch.turn is Turn.ATTENTION and batch.layer == self._queues[batch.model].model.num_layers

    def stats(self) -> PipelineStats:
        return PipelineStats(
            passes={name: queue.passes for name, queue in self._queues.items()},
            tokens={name: queue.tokens for name, queue in self._queues.items()},
            waiting={name: len(queue.waiting) for name, queue in self._queues.items()},
            in_flight=len(self._batches),
        )

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert len(self._batches) <= self.config.in_flight
        placed = [request for batch in self._batches.values() for request in batch.requests]
        placed += [request for queue in self._queues.values() for request in queue.waiting]
        assert sorted(placed) == sorted(self._owner), "a request is lost or twice here"
        assert self._cancelled <= {request for batch in self._batches.values() for request in batch.requests}
        for batch in self._batches.values():
            assert 0 < batch.size <= self.config.max_batch
            assert all(self._owner[request] == batch.model for request in batch.requests)
            assert 0 <= batch.layer <= self._queues[batch.model].model.num_layers
        for turn in self.turns:
            running = [self.rank_of(batch) for batch in self._batches.values() if batch.running and batch.turn is turn]
            assert len(set(running)) == len(running), "a stage runs two batches"
        idle = len(self._batches) < self.config.in_flight
        assert not (idle and any(queue.waiting for queue in self._queues.values())), "room, but requests wait"

    def _dissolve(self, batch: Batch, finished: set[str]) -> None:
        del self._batches[batch.number]
        queue = self._queues[batch.model]
        queue.in_flight -= 1
        queue.tokens += batch.size
        for request in batch.requests:
            if request in finished or request in self._cancelled:
                del self._owner[request]
                self._cancelled.discard(request)
            else:
                queue.waiting.append(request)
        self._form()

    def _form(self) -> None:
        """Fill the flight: the least served model with waiting requests first, names breaking ties."""
        while len(self._batches) < self.config.in_flight:
            names = [name for name, queue in self._queues.items() if queue.waiting]
            if not names:
                return
            name = min(names, key=lambda each: (self._queues[each].served_s, each))
            queue = self._queues[name]
            size = min(len(queue.waiting), self.config.max_batch)
            requests = tuple(queue.waiting.popleft() for _ in range(size))
            queue.served_s += queue.model.pass_s
            queue.passes += 1
            queue.in_flight += 1
            self._numbers += 1
            self._batches[self._numbers] = Batch(
                self._numbers, name, requests, layer=0, turn=Turn.ATTENTION, ticket=self._ticket()
            )

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets
