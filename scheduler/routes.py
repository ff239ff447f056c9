"""What a scheduler is asked and what it answers: values only.

Those made for each request are msgspec structs: a frozen dataclass takes 2-3 us to make, ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import KVLink
from poolweave.scheduler.policies import POLICIES
from poolweave.types import UInt64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`kv_link` lets KV be moved to the chosen instance instead of computed, where that is faster.

    `returns_answers`: decode instances send their KV back to the prefill instance (PD-Caching-3).
    `degraded_credit`: share of a match believed of an instance whose events were lost. `hot_load`: prompts of one
    prefix that keep each of its holders busy for this share of the time are reason to replicate it; None: never.
    """

    block_tokens: int = 16
    policy: str = "prompt_tree"
    tree_ttl_s: float = 300.0  # what responses tell
    event_ttl_s: float = 3600.0  # what instances tell themselves, and take back themselves
    tree_max_bytes: int | None = None
    kv_link: KVLink | None = None
    returns_answers: bool = False
    expected_output_tokens: int = 256
    degraded_credit: float = 0.5
    hot_load: float | None = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"policy={self.policy!r} is none of {', '.join(sorted(POLICIES))}", setting="policy", value=self.policy
            )
        if not 0 <= self.degraded_credit <= 1:
            raise ConfigError(
                f"degraded_credit must be between 0 and 1, got {self.degraded_credit}",
                setting="degraded_credit",
                value=self.degraded_credit,
            )
        if self.hot_load is not None and self.hot_load <= 0:
            raise ConfigError(
                f"hot_load must be positive, got {self.hot_load}", setting="hot_load", value=self.hot_load
            )


class Prompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt to be placed: chained keys of its whole blocks, and its length."""

    keys: UInt64Array
    num_tokens: int
    session: str | None = None
    request_id: str | None = None
    output_tokens: int | None = None  # expected; None: the configuration's


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Before it computes, the prefill instance pulls the KV up to `tokens` from `source`: faster than computing it."""

    source: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Copy the first `tokens` of this prompt from `source` to `target`: its holders are about to be overrun."""

    source: str
    target: str
    tokens: int


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt goes. `decode` is None where the prefill instance decodes too."""

    request_id: str
    prefill: str
    decode: str | None
    cached_tokens: int  # believed to be held by the prefill instance, or fetched by it
    decode_cached_tokens: int
    queued_s: float  # work before it
    own_s: float  # predicted prefill time, a fetch included
    fetch: Fetch | None = None
    replicate: Replication | None = None

    @property
    def predicted_s(self) -> float:
        """Predicted time to first token."""
        return self.queued_s + self.own_s
