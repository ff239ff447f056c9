"""Which decode instance a prefilled prompt goes to. Source: MemServe §5 (PD pairs), §6."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from poolweave.scheduler.cost_model import CostModel, KVLink
from poolweave.scheduler.fleet import Fleet, TokenCounts
from poolweave.scheduler.policies import draw_lowest
from poolweave.scheduler.slots import SlotArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeChoice:
    """argmin of sending what the instance lacks + its answer's time in the batch that then runs there.

    An instance whose KV memory cannot take prompt and answer beside what it decodes is chosen only when none can;
    then the one with most room.
    """

    model: CostModel
    lot: random.Random
    kv_link: KVLink | None = None

    def choose(
        self, num_tokens: int, output_tokens: int, cached_tokens: TokenCounts, fleet: Fleet, slots: SlotArray
    ) -> int:
        """Index into `slots`, which is not empty."""
        kv_tokens = fleet.kv_tokens[slots] + num_tokens
        room = fleet.kv_capacity[slots] - kv_tokens - output_tokens
        fits = room >= 0
        if not fits.any():
            return draw_lowest(-room.astype(np.float64), self.lot)
        step_s = self.model.decode_step_s(fleet.num_sequences[slots] + 1, kv_tokens) * fleet.slowness[slots]
        costs = step_s * output_tokens
        if self.kv_link is not None:
            token_s = self.kv_link.bytes_per_token / self.kv_link.link.bytes_per_s
            costs = costs + (num_tokens - cached_tokens) * token_s
        return draw_lowest(np.where(fits, costs, np.inf), self.lot)
