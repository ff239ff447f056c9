"""From measurements to a calibration: both levels of cost model, and how far each is off. Source: MemServe Fig. 14."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from poolweave.scheduler.cost_model import ArchitectureModel, DecodeStep, Link, PrefillSample, StepSample
from poolweave.scheduler.fitting import ErrorReport, cross_report, folds
from poolweave.scheduler.operators import (
    AttentionOperator,
    CollectiveOperator,
    HopOperator,
    LinearOperator,
    OperatorSample,
    Parallelism,
    WaveOperator,
)
from poolweave.serving.calibration.calibration import Calibration
from poolweave.serving.calibration.config import CalibrateConfig
from poolweave.serving.calibration.measurement import REST, MeasuredPrompt, Measurements
from poolweave.serving.calibration.operators import Operators
from poolweave.serving.engine import LoadedModel
from poolweave.serving.engine.operator_clock import FFN
from poolweave.serving.engine.probe import ProbePoint
from poolweave.serving.engine.rank_exchanges import RANKS, Exchanges

TILE_TOKENS, TILE_COLUMNS = 16, 64  # of a GEMM on a CPU: what one core computes between two looks at memory
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")  # every rank computes latents itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A prompt that no fit has seen: measured on one of `tp` ranks, and predicted by both levels."""

    tp: int
    prompt_tokens: int
    cached_tokens: int
    measured_s: float
    operators_s: float
    architecture_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A calibration, and the points that its errors were taken from."""

    calibration: Calibration
    points: tuple[HeldOut, ...]


def fit(model: LoadedModel, config: CalibrateConfig, taken: Measurements) -> Fitted:
    """Raises ConfigError when the points cannot tell the terms apart."""
    points = []
    for seen, unseen in folds(taken.prompts, config.hold_out, config.seed):
        operators, cost = _levels(model, config, taken, seen)
        for prompt in unseen:
            points.append(_held_out(operators, cost, prompt.whole, 1))
            if prompt.share is not None:
                points.append(_held_out(operators, cost, prompt.share, taken.tp))
    points.sort(key=lambda point: (point.tp, point.prompt_tokens, point.cached_tokens))
    operators, cost = _levels(model, config, taken, taken.prompts)
    calibration = Calibration(
        model=config.model, device=f"{_processor()}, threads: {config.num_threads}", dtype=config.dtype,
        num_threads=config.num_threads, block_tokens=model.layout.block_tokens,
        kv_bytes_per_token=model.layout.block_bytes // model.layout.block_tokens, cost=cost, operators=operators,
        links={name: Link.fit(samples) for name, samples in taken.transfers.items()},
        errors={**_errors(points), "decode": _decode_error(taken.steps, config.seed)},
    )  # fmt: skip
    return Fitted(calibration=calibration, points=tuple(points))


def require_points(asked: Sequence[ProbePoint], config: CalibrateConfig) -> None:
    """Before anything is measured: raises ConfigError when a fit that leaves a part of `asked` out could not tell its
    terms apart."""
    samples = [
        OperatorSample(new_tokens=one.prompt_tokens - one.cached_tokens, prompt_tokens=one.prompt_tokens, seconds=1.0)
        for one in asked
    ]
    for seen, _ in folds(samples, config.hold_out, config.seed):
        AttentionOperator.fit(seen, count=1)  # which has the most terms


def _levels(
    model: LoadedModel, config: CalibrateConfig, taken: Measurements, prompts: Sequence[MeasuredPrompt]
) -> tuple[Operators, ArchitectureModel]:
    """Both, from `prompts` alone."""
    operators = fit_operators(taken, prompts, config.num_threads, model.layout.num_layers)
    return operators, ArchitectureModel.fit([prompt.whole for prompt in prompts], DecodeStep.fit(taken.steps))


def fit_operators(
    taken: Measurements, prompts: Sequence[MeasuredPrompt], num_threads: int, num_layers: int
) -> Operators:
    """Each kind by its nature, from `prompts` alone; what no kind took is linear."""
    gemms: dict[str, WaveOperator] = {}
    attention: dict[str, AttentionOperator] = {}
    others: dict[str, LinearOperator] = {}
    cut_ffn = any(
        kind.name == "gate_proj" for kind in taken.kinds
    )  # others than gate, up and down stay whole at every rank
    for kind in taken.kinds:
        samples = _samples(prompts, kind.name, kind.count)
        if kind.nature == "gemm":
            gemms[kind.name] = WaveOperator.fit(
                samples, count=kind.count, tile_tokens=TILE_TOKENS, column_blocks=-(-kind.columns // TILE_COLUMNS),
                num_sms=num_threads, launch_s=taken.launches[kind.name], sharded=kind.name not in _WHOLE,
            )  # fmt: skip
        elif kind.nature == "attention":
            attention[kind.name] = AttentionOperator.fit(samples, count=kind.count, launch_s=taken.launches[kind.name])
        else:
            sharded = kind.name == FFN and cut_ffn
            others[kind.name] = LinearOperator.fit(samples, count=kind.count, sharded=sharded)
    others[REST] = LinearOperator.fit(_samples(prompts, REST, 1), count=1)
    found = Operators(gemms=gemms, attention=attention, others=others)
    return found if taken.exchanges is None else _with_exchanges(found, taken.exchanges, num_layers)


def _with_exchanges(found: Operators, taken: Exchanges, num_layers: int) -> Operators:
    """Ranks add their shares up after each attention and each FFN."""
    size = taken.bytes_per_token
    reduce = CollectiveOperator.fit(taken.reduced, ranks=RANKS, count=2 * num_layers, bytes_per_token=size)
    hop = HopOperator.fit(taken.sent, bytes_per_token=size)
    return replace(found, collectives={"all_reduce": reduce}, hops={"stage": hop})


def _samples(prompts: Sequence[MeasuredPrompt], name: str, count: int) -> list[OperatorSample]:
    return [
        OperatorSample(
            new_tokens=prompt.new_tokens, prompt_tokens=prompt.whole.prompt_tokens, seconds=prompt.parts[name] / count
        )
        for prompt in prompts
    ]


def _held_out(operators: Operators, cost: ArchitectureModel, sample: PrefillSample, tp: int) -> HeldOut:
    """One rank computes alone: nothing is sent. The architecture level knows only that there are more ranks."""
    lengths = sample.prompt_tokens, sample.cached_tokens
    return HeldOut(
        tp=tp, prompt_tokens=sample.prompt_tokens, cached_tokens=sample.cached_tokens, measured_s=sample.seconds,
        operators_s=operators.computed().model(Parallelism(tp=tp)).exact_s(*lengths),
        architecture_s=cost.scaled(1 / tp).prefill_s(*lengths),
    )  # fmt: skip


def _errors(points: Sequence[HeldOut]) -> dict[str, ErrorReport]:
    """By level and number of ranks."""
    errors: dict[str, ErrorReport] = {}
    for tp in dict.fromkeys(point.tp for point in points):
        these = [point for point in points if point.tp == tp]
        measured = [point.measured_s for point in these]
        errors[f"operators_tp{tp}"] = ErrorReport.of([point.operators_s for point in these], measured)
        errors[f"architecture_tp{tp}"] = ErrorReport.of([point.architecture_s for point in these], measured)
    return errors


def _decode_error(steps: Sequence[StepSample], seed: int) -> ErrorReport:
    def fitted(seen: Sequence[StepSample]) -> Callable[[StepSample], float]:
        step = DecodeStep.fit(seen)
        return lambda sample: step.seconds(sample.num_sequences, sample.kv_tokens)

    return cross_report(steps, fitted, lambda sample: sample.seconds, seed=seed)


def _processor() -> str:
    """What the operating system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
