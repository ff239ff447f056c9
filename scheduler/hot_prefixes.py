"""Which shared prefixes cause so much work that their holders will become a hot spot. Knows no tree and no instance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from poolweave.errors import ConfigError


@dataclass(slots=True)
class _Heat:
    seconds: float  # work in the window, decayed to `at`
    at: float
    quiet_until: float = -math.inf


class HotPrefixes:
    """Decayed work a prefix: `heat` is in instances, 1.0 = the work of its prompts keeps one instance busy.

    Remembers at most `max_prefixes`; the coolest half goes when there are more. Time is passed in.
    """

    def __init__(self, window_s: float = 10.0, max_prefixes: int = 4096) -> None:
        if window_s <= 0 or max_prefixes < 2:
            raise ConfigError(
                f"window_s={window_s} must be positive and max_prefixes={max_prefixes} at least 2", setting="window_s"
            )
        self._window_s = window_s
        self._max = max_prefixes
        self._heats: dict[int, _Heat] = {}

    def __len__(self) -> int:
        return len(self._heats)

    def observe(self, key: int, seconds: float, now: float) -> float:
        """A prompt with this prefix causes `seconds` of work. Returns the prefix's heat."""
        heat = self._heats.get(key)
        if heat is None:
            if len(self._heats) >= self._max:
                self._cool(now)
            heat = self._heats[key] = _Heat(0.0, now)
        if now > heat.at:
            heat.seconds, heat.at = self._decayed(heat, now), now
        heat.seconds += seconds
        return heat.seconds / self._window_s

    def claim(self, key: int, now: float) -> bool:
        """Whether something may be done about this prefix now: at most once a window."""
        heat = self._heats.get(key)
        if heat is None or now < heat.quiet_until:
            return False
        heat.quiet_until = now + self._window_s
        return True

    def _decayed(self, heat: _Heat, now: float) -> float:
        return heat.seconds * math.exp(-max(now - heat.at, 0.0) / self._window_s)

    def _cool(self, now: float) -> None:
        hottest = sorted(self._heats.items(), key=lambda item: self._decayed(item[1], now), reverse=True)
        self._heats = dict(hottest[: self._max // 2])
