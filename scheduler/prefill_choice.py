"""Which instance computes a prompt, and whether KV is moved to it, or copied for those that follow.

Source: MemServe §6.2: p* = argmin_p ( sum of queued exec(x_r, y_rp) + exec(x, y_p) ), and move-KV-or-recompute.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from poolweave.scheduler._native import CandidateTable
from poolweave.scheduler.cost_model import CostModel, MoveOrRecompute
from poolweave.scheduler.fleet import Fleet, Floats
from poolweave.scheduler.hot_prefixes import HotPrefixes
from poolweave.scheduler.policies import Candidates, RoutingPolicy
from poolweave.scheduler.routes import Fetch, Prompt, Replication, SchedulerConfig
from poolweave.scheduler.slots import SlotArray

_FEW = 8  # one length takes 0.3 us alone, any number about 3 us as an array


class Chosen(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prefill instance, with what was predicted for it."""

    slot: int
    cached_tokens: int
    queued_s: float
    own_s: float
    fetch: Fetch | None
    replicate: Replication | None


class _Source(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Who holds most of a prompt, and for whom it is faster to pull it than to compute it."""

    at: int
    tokens: int
    faster: npt.NDArray[np.bool_]


class PrefillChoice:
    """Predicts each candidate's time, lets the policy choose, and looks after hot prefixes."""

    def __init__(self, model: CostModel, config: SchedulerConfig, policy: RoutingPolicy, fleet: Fleet) -> None:
        self._model = model
        self._config = config
        self._policy = policy
        self._fleet = fleet
        self._hot = HotPrefixes()
        self._move = None
        if config.kv_link is not None:
            self._move = MoveOrRecompute(model=model, kv_link=config.kv_link, block_tokens=config.block_tokens)

    def choose(self, prompt: Prompt, slots: SlotArray, table: CandidateTable, now: float) -> Chosen:
        """`table`: what each of `slots` is believed to hold of what may be reused, and has to do."""
        self._price(prompt.num_tokens, table)
        source = None if self._move is None else self._fetch_where_faster(prompt.num_tokens, table, self._move)
        candidates = Candidates(
            slots=slots, names=self._fleet.slots, table=table, num_tokens=prompt.num_tokens, session=prompt.session
        )
        at = self._policy.choose(candidates)
        slot, held, queued_s, own_s = table.at(at)
        fetch = None
        if source is not None and source.faster[at]:
            fetch = Fetch(source=self._fleet.slots.name(slots.item(source.at)), tokens=source.tokens)
        return Chosen(
            slot=slot,
            cached_tokens=held if fetch is None else fetch.tokens,
            queued_s=queued_s,
            own_s=own_s,
            fetch=fetch,
            replicate=self._replicate(prompt, candidates, at, now) if held else None,
        )

    def _price(self, num_tokens: int, table: CandidateTable) -> None:
        """Enter the predicted times. Few lengths differ, and one is told faster than an array of many."""
        model, lengths = self._model, table.distinct()
        uncached_s = 0.0 if self._fleet.uniform else model.prefill_s(num_tokens, 0)
        if len(lengths) <= _FEW:
            table.price([model.prefill_s(num_tokens, held) for held in lengths], uncached_s)
        else:
            table.price(model.prefill_s(num_tokens, np.array(lengths, np.int32)).tolist(), uncached_s)

    def _fetch_where_faster(self, num_tokens: int, table: CandidateTable, move: MoveOrRecompute) -> _Source | None:
        """Where pulling what the longest holder has is faster than computing it, that is the candidate's time."""
        most = table.longest
        if not most:
            return None
        held, own_s = table.held_tokens, table.own_s
        rest_s: Floats | float = self._model.prefill_s(num_tokens, most)
        if not self._fleet.uniform:
            rest_s = rest_s * (table.uncached_s / self._model.prefill_s(num_tokens, 0))
        fetched_s = move.transfer_s(most - held) + rest_s
        faster = (held < most) & (fetched_s <= own_s)
        np.copyto(own_s, fetched_s, where=faster)
        return _Source(at=int(held.argmax()), tokens=most, faster=faster)

    def _replicate(self, prompt: Prompt, candidates: Candidates, at: int, now: float) -> Replication | None:
        """A copy of the prefix that was hit, once its prompts keep its holders busier than they should be."""
        hot_load = self._config.hot_load
        if hot_load is None:
            return None
        _, held, _, own_s = candidates.table.at(at)
        key = prompt.keys.item(held // self._config.block_tokens - 1)
        heat = self._hot.observe(key, own_s, now)
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
