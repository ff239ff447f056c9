"""Takes the measurements of a calibration on this machine, telling how far it is.

Whole model, its operators and one rank's share take turns, round after round, and the quickest round counts: what else
the machine does is not the model's time. One thread's time is its processor's, which others cannot take from it: they
only leave it cold caches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import PrefillSample, StepSample, TransferSample
from poolweave.serving.calibration.config import CalibrateConfig
from poolweave.serving.calibration.transfers import measure_transfers
from poolweave.serving.engine import EngineConfig, LoadedModel
from poolweave.serving.engine.operator_clock import OperatorClock, OperatorKind, launch_s
from poolweave.serving.engine.probe import EngineProbe, ProbePoint, ProbeRoom
from poolweave.serving.engine.rank_exchanges import Exchanges, ExchangeSpec, measure_exchanges
from poolweave.serving.engine.tensor_parallel import shard_model
from poolweave.transfer import Cut

Advance = Callable[[str], None]  # what was just measured
_MAX_TP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrompt:
    """A prompt's time, and how much of it each kind of operator took; `rest` is what no operator took. `share`: its
    time on one of several tensor ranks, where that was measured."""

    whole: PrefillSample
    parts: dict[str, float]
    share: PrefillSample | None = None

    @property
    def new_tokens(self) -> int:
        return self.whole.prompt_tokens - self.whole.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was measured; shares are of one of `tp` ranks.

    `launches`: by kind, what a call takes that has next to nothing to do.
    """

    kinds: tuple[OperatorKind, ...]
    prompts: tuple[MeasuredPrompt, ...]
    steps: tuple[StepSample, ...]
    transfers: dict[str, tuple[TransferSample, ...]]
    launches: dict[str, float]
    tp: int = 1
    exchanges: Exchanges | None = None  # between ranks; None: of a change of parallelism nothing was asked


REST = "rest"


def measure(model: LoadedModel, config: CalibrateConfig, advance: Advance = lambda _: None) -> Measurements:
    """Raises ConfigError."""
    tp = config.tp or _smallest_tp(model)
    with _Bench(model, config, tp) as bench:
        for _ in range(config.repeats):
            bench.round(advance)
        found = bench.operators.kinds, bench.prompts(), bench.steps(), bench.launches()
    transfers = {}
    for transport in config.transports:
        transfers[transport] = measure_transfers(model.layout, transport)
        advance(f"transfers over {transport}")
    exchanges = None
    if config.tp != 1:
        hidden = model.model.config.get_text_config().hidden_size
        spec = ExchangeSpec(hidden_size=hidden, dtype=config.dtype, num_threads=config.num_threads)
        exchanges = measure_exchanges(spec)
        advance("exchanges between ranks")
    kinds, prompts, steps, launches = found
    return Measurements(
        kinds=kinds, prompts=prompts, steps=steps, transfers=transfers, launches=launches, tp=tp, exchanges=exchanges
    )  # fmt: skip


def points(model: LoadedModel, config: CalibrateConfig) -> list[ProbePoint]:
    """Each prompt that is measured, once: short ones have fewer ratios than asked for."""
    block_tokens = model.layout.block_tokens
    return list(
        dict.fromkeys(
            ProbePoint.at_ratio(length, ratio, block_tokens)
            for length in config.prompt_tokens
            for ratio in config.cached_ratios
        )
    )


@dataclass(slots=True)
class _Prompt:
    """What the rounds gave for one prompt: seconds without the operators' clock, of each operator with it, and of a
    share."""

    whole: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    share: list[float] = field(default_factory=list)

    def quickest_parts(self) -> dict[str, float]:
        return {name: min(one[name] for one in self.parts) for name in self.parts[0]}

    def quickest(self, point: ProbePoint) -> MeasuredPrompt:
        """The clock says how the time of the run without it is shared out: what its hooks cost is known for warm caches
        only."""

        def sample(seconds: list[float]) -> PrefillSample:
            lengths = {"prompt_tokens": point.prompt_tokens, "cached_tokens": point.cached_tokens}
            return PrefillSample(**lengths, seconds=min(seconds))

        parts, whole = self.quickest_parts(), sample(self.whole)
        scale = whole.seconds / sum(parts.values())
        parts = {name: seconds * scale for name, seconds in parts.items()}
        return MeasuredPrompt(whole=whole, parts=parts, share=sample(self.share) if self.share else None)


class _Bench:
    """The engines that are measured in turn: the whole model's, and with more than one rank that of a share. A context
    manager."""

    def __init__(self, model: LoadedModel, config: CalibrateConfig, tp: int) -> None:
        clock = time.thread_time if config.num_threads == 1 else time.perf_counter
        engine = EngineConfig(num_threads=config.num_threads)
        longest = max(*config.prompt_tokens, max(config.context_tokens) + 16)
        room = ProbeRoom(max_tokens=longest, batch=max(config.sequences))
        self.operators = OperatorClock(model, clock)
        self._prompts = {point: _Prompt() for point in points(model, config)}
        self._shortest = _Prompt()
        self._steps: dict[tuple[int, int], list[tuple[float, int]]] = {
            (sequences, context): [] for sequences in config.sequences for context in config.context_tokens
        }
        with ExitStack() as stack:
            self._probe = stack.enter_context(EngineProbe(model, room, engine, seed=config.seed, clock=clock))
            self._share: EngineProbe | None = None
            if tp > 1:
                cut = _share(model, tp), replace(room, batch=1), engine
                self._share = stack.enter_context(EngineProbe(*cut, seed=config.seed, clock=clock))
            for probe in filter(None, (self._probe, self._share)):  # first calls touch memory and choose kernels
                probe.first_tokens_s(ProbePoint(prompt_tokens=max(config.prompt_tokens)))
            self._probe.decode_step_s(1, min(config.context_tokens))
            self._open = stack.pop_all()

    def round(self, advance: Advance) -> None:
        """Everything once."""
        for point, found in self._prompts.items():
            found.whole.append(self._probe.first_tokens_s(point)[0])
            found.parts.append(self._watched(point))
            if self._share is not None:
                found.share.append(self._share.first_tokens_s(point)[0])
            advance(f"{point.prompt_tokens} tokens, {point.cached_tokens} cached")
        self._shortest.parts.append(self._watched(ProbePoint(prompt_tokens=1)))
        for (sequences, context), seconds in self._steps.items():
            seconds.append(self._probe.decode_step_s(sequences, context))
            advance(f"{sequences} answers at once, {context} tokens each")

    def _watched(self, point: ProbePoint) -> dict[str, float]:
        """Seconds in each kind of operator, and beside them."""
        with self.operators:
            seconds = self._probe.first_tokens_s(point)[0] - self.operators.hooks_s
        parts = self.operators.take()
        return {**parts, REST: max(seconds - sum(parts.values()), 1e-9)}

    def prompts(self) -> tuple[MeasuredPrompt, ...]:
        return tuple(found.quickest(point) for point, found in self._prompts.items())

    def launches(self) -> dict[str, float]:
        """Of each kind, a call for one token; GEMMs read all weights for it, so theirs are of the smallest there is."""
        shortest = self._shortest.quickest_parts()
        calls = {kind.name: shortest[kind.name] / kind.count for kind in self.operators.kinds}
        return {**calls, **dict.fromkeys((k.name for k in self.operators.kinds if k.nature == "gemm"), launch_s())}

    def steps(self) -> tuple[StepSample, ...]:
        return tuple(
            StepSample(num_sequences=sequences, kv_tokens=taken[0][1], seconds=min(one[0] for one in taken))
            for (sequences, _), taken in self._steps.items()
        )

    def __enter__(self) -> _Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _share(model: LoadedModel, tp: int) -> LoadedModel:
    """What one of `tp` ranks computes; sends nothing, for there are no others. The model stays as it is: what is not
    cut is shared with it."""
    weights = {id(tensor): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
    own = replace(model, model=copy.deepcopy(model.model, weights))
    return shard_model(own, Cut(layout=model.layout, tp=tp).shards[0], lambda _: None)


def _smallest_tp(model: LoadedModel) -> int:
    """Ranks that attention and FFN can be cut for; 1 when none can."""
    config = model.model.config.get_text_config()
    for tp in range(2, _MAX_TP + 1):
        if config.num_attention_heads % tp or getattr(config, "intermediate_size", tp) % tp:
            continue
        try:
            Cut(layout=model.layout, tp=tp)
        except ConfigError:
            continue
        return tp
    return 1
