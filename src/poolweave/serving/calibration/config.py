"""What `poolweave calibrate` measures. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Prompts of every length at every cached ratio, decode steps of every batch at every context, and transfers.

    `repeats`: rounds in which everything is computed once; the quickest counts: what else the machine does is not the
    model's time. `hold_out`: the errors are of fits that leave so much of the
    prompts out, in turn all of them. `tp`: the error after a change to so many tensor ranks is measured on one rank's
    share of the model; 0: the smallest number that divides it; 1: not at all, nor what ranks send each other.
    `transports`: between whose ends transfers are measured. Raises ConfigError for values out of range.
    """

    model: str = "smollm2"
    dtype: str = "float32"
    num_threads: int = 1
    prompt_tokens: tuple[int, ...] = (32, 64, 112, 160, 256)
    cached_ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    sequences: tuple[int, ...] = (1, 2, 4, 8)
    context_tokens: tuple[int, ...] = (64, 192)
    repeats: int = 3
    hold_out: float = 0.25
    tp: int = 0
    transports: tuple[str, ...] = ("shm", "tcp")
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("prompt_tokens", self.prompt_tokens, 2, "lengths")
        _at_least("sequences", self.sequences, 2, "batch sizes")
        _at_least("context_tokens", self.context_tokens, 2, "lengths")
        _at_least("cached_ratios", self.cached_ratios, 2, "ratios")
        if not all(0 <= ratio < 1 for ratio in self.cached_ratios):
            raise ConfigError(
                f"cached_ratios={self.cached_ratios} must lie in [0, 1): a token at least is computed",
                setting="cached_ratios",
            )
        for setting in ("prompt_tokens", "sequences", "context_tokens"):
            if min(getattr(self, setting)) < 1:
                raise ConfigError(f"{setting}={getattr(self, setting)} must be positive", setting=setting)
        if self.repeats < 1 or self.tp < 0 or not 0 < self.hold_out < 1:
            raise ConfigError(
                f"repeats={self.repeats} must be at least 1, tp={self.tp} not negative and hold_out={self.hold_out} "
                "between 0 and 1",
                setting="repeats",
            )
        for transport in self.transports:
            if transport not in ("shm", "tcp"):
                raise ConfigError(f"transport {transport!r} is neither 'shm' nor 'tcp'", setting="transports")
        if not self.transports:
            raise ConfigError("transports is empty; name shm, tcp or both", setting="transports")

    @property
    def num_points(self) -> int:
        """How often the measurement says that it got on, at most."""
        prompts = len(self.prompt_tokens) * len(self.cached_ratios)
        round_points = prompts + len(self.sequences) * len(self.context_tokens)
        return self.repeats * round_points + len(self.transports) + (self.tp != 1)


def _at_least(setting: str, values: tuple[float, ...], least: int, what: str) -> None:
    if len(set(values)) < least:
        raise ConfigError(
            f"{setting}={values} has {len(set(values))} different {what}; a fit needs at least {least}",
            setting=setting, value=len(set(values)), limit=least,
        )  # fmt: skip
