"""How the time to first token falls with what is cached. Source: MemServe Fig. 13."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

from poolweave.errors import ConfigError
from poolweave.serving.engine.config import EngineConfig
from poolweave.types import Tier

TIERS = {"hbm": Tier.HBM, "dram": Tier.DRAM}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStudyConfig:
    """Every prompt length at every cached ratio, batch and block size, its cached blocks in each tier.

    A batch's prompts arrive together and share nothing. `repeats`: of each, and the median counts. Raises ConfigError
    for values out of range.
    """

    model: str = "smollm2"
    dtype: str = "float32"
    num_threads: int = 1
    tokens: tuple[int, ...] = (96, 224)
    ratios: tuple[float, ...] = (0.0, 0.5, 0.875)
    batches: tuple[int, ...] = (1, 2)
    block_tokens: tuple[int, ...] = (16, 32)
    tiers: tuple[str, ...] = ("hbm", "dram")
    repeats: int = 1
    seed: int = 0

    @classmethod
    def full(cls) -> CacheStudyConfig:
        """Long prompts and all ratios: hours on a CPU, minutes on a GPU."""
        return cls(
            tokens=(256, 1024, 2048), ratios=(0.0, 0.25, 0.5, 0.75, 0.9375), batches=(1, 4, 8),
            block_tokens=(8, 16, 32), repeats=3,
        )  # fmt: skip

    def __post_init__(self) -> None:
        for setting, least, below in (
            ("tokens", 2, 1 << 20), ("ratios", 0, 1), ("batches", 1, 1 << 10), ("block_tokens", 1, 1 << 10),
        ):  # fmt: skip
            values = getattr(self, setting)
            if not values or not all(least <= value < below for value in values):
                raise ConfigError(
                    f"{setting}={values} must name at least one value, each in [{least}, {below})",
                    setting=setting, value=str(values), limit=below,
                )  # fmt: skip
        for tier in self.tiers or ("",):
            if tier not in TIERS:
                raise ConfigError(f"tiers: {tier!r} is not one of {', '.join(TIERS)}", setting="tiers", value=tier)
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} must be at least 1", setting="repeats", value=self.repeats)

    @property
    def num_points(self) -> int:
        """How often the study says that it got on, at most: short prompts have fewer ratios."""
        sizes = len(self.tokens) * len(self.ratios) * len(self.batches) * len(self.block_tokens)
        return sizes * len(self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePoint:
    """Times to first token of a batch: the median run's mean over its prompts, and its last."""

    tokens: int
    cached_tokens: int
    batch: int
    block_tokens: int
    tier: str
    mean_s: float
    last_s: float

    @property
    def curve(self) -> tuple[int, int, int, str]:
        """Points of one curve differ in their cached tokens alone."""
        return self.block_tokens, self.batch, self.tokens, self.tier


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStudy:
    """All points of one run, curve by curve."""

    config: CacheStudyConfig
    points: tuple[CachePoint, ...]

    @property
    def curves(self) -> dict[tuple[int, int, int, str], list[CachePoint]]:
        """By block size, batch, prompt length and tier; each by rising cached tokens."""
        curves: dict[tuple[int, int, int, str], list[CachePoint]] = {}
        for point in self.points:
            curves.setdefault(point.curve, []).append(point)
        return {curve: sorted(points, key=lambda point: point.cached_tokens) for curve, points in curves.items()}

    @property
    def surprises(self) -> list[str]:
        """Where more cached tokens did not make the first token come sooner."""
        return [
            f"{more.batch} x {more.tokens} tokens, blocks of {more.block_tokens} in {more.tier}: {more.cached_tokens} "
            f"cached took {more.mean_s * 1e3:.1f} ms, {less.cached_tokens} took {less.mean_s * 1e3:.1f} ms"
            for points in self.curves.values()
            for less, more in pairwise(points)
            if more.mean_s >= less.mean_s
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "config": asdict(self.config),
            "points": [asdict(point) for point in self.points],
            "surprises": self.surprises,
        }


def run(config: CacheStudyConfig, advance: Callable[[str], None] = lambda _: None) -> CacheStudy:
    """Measure everything on engines of its own. Raises what loading the model raises, and ConfigError for prompts that
    the model has no positions for."""
    from poolweave.serving.engine import load_model
    from poolweave.serving.engine.probe import EngineProbe, ProbePoint, ProbeRoom, with_block_tokens

    model = load_model(config.model, config.dtype)
    room = ProbeRoom(max_tokens=max(config.tokens), batch=max(config.batches), dram="dram" in config.tiers)
    points: list[CachePoint] = []
    for block_tokens in config.block_tokens:
        engine = EngineConfig(num_threads=config.num_threads)
        with EngineProbe(with_block_tokens(model, block_tokens), room, engine, seed=config.seed) as probe:
            probe.first_tokens_s(ProbePoint(prompt_tokens=max(config.tokens)))  # touches memory, chooses kernels
            for tokens, cached, batch, tier in _asked(config, block_tokens):
                asked = ProbePoint(prompt_tokens=tokens, cached_tokens=cached, batch=batch, tier=TIERS[tier])
                runs = [probe.first_tokens_s(asked) for _ in range(config.repeats)]
                taken = sorted(runs, key=statistics.mean)[len(runs) // 2]
                point = CachePoint(
                    tokens=tokens, cached_tokens=cached, batch=batch, block_tokens=block_tokens, tier=tier,
                    mean_s=statistics.mean(taken), last_s=max(taken),
                )  # fmt: skip
                points.append(point)
                advance(f"{batch} x {tokens} tokens, {cached} cached in {tier}")
    return CacheStudy(config=config, points=tuple(points))


def _asked(config: CacheStudyConfig, block_tokens: int) -> Iterator[tuple[int, int, int, str]]:
    """Prompt length, cached tokens as whole blocks, batch, tier; each once."""
    from poolweave.serving.engine.probe import ProbePoint

    sizes = product(config.tokens, config.batches, config.tiers)
    for tokens, batch, tier in sizes:
        cached = (ProbePoint.at_ratio(tokens, ratio, block_tokens).cached_tokens for ratio in sorted(config.ratios))
        yield from ((tokens, one, batch, tier) for one in dict.fromkeys(cached))
