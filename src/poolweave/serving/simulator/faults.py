"""What goes wrong in a simulation: deaths, lost and late messages, pauses of the coordinator. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """`deaths`: (time, instance) SIGKILLs; each starts anew `restart_s` later, empty, under a new epoch.

    `message_loss` of heartbeats and eviction events are lost, the others come up to `message_delay_s` late.
    `coordinator_pauses`: (time, seconds) during which it is stopped. Raises ConfigError.
    """

    deaths: tuple[tuple[float, str], ...] = ()
    restart_s: float | None = 30.0  # None: stays dead
    message_loss: float = 0.0
    message_delay_s: float = 0.0
    coordinator_pauses: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.message_loss < 1:
            raise ConfigError(
                f"message_loss must be in [0, 1), got {self.message_loss}",
                setting="message_loss", value=self.message_loss,
            )  # fmt: skip
        times = [time for time, _ in self.deaths] + [number for pause in self.coordinator_pauses for number in pause]
        for name, seconds in (
            ("message_delay_s", [self.message_delay_s]),
            ("restart_s", [] if self.restart_s is None else [self.restart_s]),
            ("deaths and coordinator_pauses", times),
        ):
            for value in seconds:
                if not 0 <= value < math.inf:
                    raise ConfigError(f"{name}: {value} is no time, which is 0 s or later", setting=name, value=value)

    @property
    def any(self) -> bool:
        """Something is to go wrong."""
        return bool(self.deaths or self.coordinator_pauses or self.message_loss or self.message_delay_s)


def deaths_of(text: str) -> tuple[tuple[float, str], ...]:
    """The deaths of "4:prefill-1,30:decode-0": seconds and who. Raises ConfigError."""
    return tuple((_seconds(time, text, "deaths"), name) for time, name in _pairs(text, "deaths", "4:prefill-1"))


def pauses_of(text: str) -> tuple[tuple[float, float], ...]:
    """The coordinator's pauses of "10:5": from when, and for how many seconds. Raises ConfigError."""
    return tuple(
        (_seconds(time, text, "pauses"), _seconds(length, text, "pauses"))
        for time, length in _pairs(text, "pauses", "10:5")
    )


def _pairs(text: str, setting: str, example: str) -> list[tuple[str, str]]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word.count(":") != 1 or not all(word.split(":")):
            raise ConfigError(f"{setting}={text!r}: {word!r} is not of the form {example}", setting=setting, value=text)
    return [(word.split(":")[0], word.split(":")[1]) for word in words]


def _seconds(word: str, text: str, setting: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise ConfigError(
            f"{setting}={text!r}: {word!r} is no number of seconds", setting=setting, value=text
        ) from error
