"""Which instance computes a prompt, and whether KV is moved to it, or copied for those that follow.

Source: MemServe §6.2: p* = argmin_p ( sum of queued exec(x_r, y_rp) + exec(x, y_p) ), and move-KV-or-recompute.
"""

from __future__ import annotations

import msgspec
import numpy as np

from poolweave.scheduler.cost_model import CostModel, MoveOrRecompute
from poolweave.scheduler.fleet import Fleet, Floats, SlotArray, TokenCounts
from poolweave.scheduler.hot_prefixes import HotPrefixes
from poolweave.scheduler.policies import Candidates, RoutingPolicy
from poolweave.scheduler.prompt_tree import Scores
from poolweave.scheduler.routes import Fetch, Prompt, Replication, SchedulerConfig


class Chosen(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prefill instance, with what was predicted for it."""

    slot: int
    cached_tokens: int
    queued_s: float
    own_s: float
    fetch: Fetch | None
    replicate: Replication | None


class PrefillChoice:
    """Predicts each candidate's time, lets the policy choose, and looks after hot prefixes."""

    def __init__(self, model: CostModel, config: SchedulerConfig, policy: RoutingPolicy, fleet: Fleet) -> None:
        self._model = model
        self._config = config
        self._policy = policy
        self._fleet = fleet
        self._hot = HotPrefixes()
        self._move = None
        if config.link is not None:
            self._move = MoveOrRecompute(
                model=model,
                link=config.link,
                bytes_per_token=config.kv_bytes_per_token,
                block_tokens=config.block_tokens,
            )

    def choose(self, prompt: Prompt, slots: SlotArray, blocks: Scores, now: float) -> Chosen:
        """`blocks` [slots]: leading blocks that each is believed to hold, of those that may be reused."""
        cached: TokenCounts = blocks * self._config.block_tokens
        own_s: Floats = self._model.prefill_s(prompt.num_tokens, cached)
        uncached_s: Floats | float = 0.0
        slowness = None if self._fleet.uniform else self._fleet.slowness[slots]
        if slowness is not None:
            own_s, uncached_s = own_s * slowness, self._model.prefill_s(prompt.num_tokens, 0) * slowness
        fetches = None
        best = int(cached.argmax()) if self._move is not None else 0
        if self._move is not None and cached[best]:
            most = int(cached[best])
            rest_s = self._model.prefill_s(prompt.num_tokens, most) * (1.0 if slowness is None else slowness)
            fetched_s = self._move.transfer_s(most - cached) + rest_s
            fetches = (cached < most) & (fetched_s <= own_s)
            own_s = np.where(fetches, fetched_s, own_s)
        candidates = Candidates(
            slots=slots,
            names=self._fleet.slots,
            cached_tokens=cached,
            queued_s=self._fleet.queued_s(slots),
            own_s=own_s,
            uncached_s=uncached_s,
            num_tokens=prompt.num_tokens,
            session=prompt.session,
        )
        at = self._policy.choose(candidates)
        fetch = None
        if fetches is not None and fetches[at]:
            fetch = Fetch(source=self._fleet.slots.name(int(slots[best])), tokens=int(cached[best]))
        return Chosen(
            slot=int(slots[at]),
            cached_tokens=int(cached[at]) if fetch is None else fetch.tokens,
            queued_s=float(candidates.queued_s[at]),
            own_s=float(own_s[at]),
            fetch=fetch,
            replicate=self._replicate(prompt, candidates, at, now) if cached[at] else None,
        )

    def _replicate(self, prompt: Prompt, candidates: Candidates, at: int, now: float) -> Replication | None:
        """A copy of the prefix that was hit, once its prompts keep its holders busier than they should be."""
        hot_load = self._config.hot_load
        if hot_load is None:
            return None
        held = int(candidates.cached_tokens[at])
        key = int(prompt.keys[held // self._config.block_tokens - 1])
        heat = self._hot.observe(key, float(candidates.own_s[at]), now)
        if heat <= hot_load:
            return None
        holds = candidates.cached_tokens >= held
        if heat <= hot_load * int(holds.sum()) or holds.all() or not self._hot.claim(key, now):
            return None
        target = int(np.where(holds, np.inf, candidates.queued_s).argmin())
        return Replication(
            source=self._fleet.slots.name(int(candidates.slots[at])),
            target=self._fleet.slots.name(int(candidates.slots[target])),
            tokens=held,
        )
