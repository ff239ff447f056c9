"""The eviction policies by name, and what recomputing a block costs. The orders themselves are native.

Knows no tiers: what may go is said by a filter, in which order by the policy.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from poolweave.errors import ConfigError
from poolweave.index import _native

EVICTION_POLICIES: tuple[str, ...] = tuple(_native.eviction_policies())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCost:
    """What prefill takes for a token, and more for each token of context before it. Given as a policy it means
    "cost-aware": what is cheapest to recompute by byte, use and age goes first. Only ratios matter to the order.

    The default ratio is that of a dense model of 13 billion parameters: 4 * layers * hidden / (2 * parameters).
    Raises ConfigError for figures that are not positive and finite.
    """

    seconds_per_token: float = 1.0
    seconds_per_context_token: float = 2.0**-15
    bytes_per_token: float = 1.0

    def __post_init__(self) -> None:
        least = {"seconds_per_token": 1e-30, "seconds_per_context_token": 0.0, "bytes_per_token": 1e-30}
        for setting, limit in least.items():
            value = getattr(self, setting)
            if not math.isfinite(value) or value < limit:
                raise ConfigError(
                    f"{setting}={value} is not finite and at least {limit}", setting=setting, value=value, limit=limit
                )


def policy_name(eviction: str | RecomputeCost) -> str:
    """Raises ConfigError for a name that is none, with the nearest one."""
    name = "cost-aware" if isinstance(eviction, RecomputeCost) else eviction
    if name in EVICTION_POLICIES:
        return name
    near = difflib.get_close_matches(str(name), EVICTION_POLICIES, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"eviction={name!r} is no policy: there are {', '.join(EVICTION_POLICIES)}{hint}",
        setting="eviction", value=name,
    )  # fmt: skip


def native_cost(eviction: str | RecomputeCost) -> _native.RecomputeCost:
    cost = eviction if isinstance(eviction, RecomputeCost) else RecomputeCost()
    return _native.RecomputeCost(cost.seconds_per_token, cost.seconds_per_context_token, cost.bytes_per_token)
