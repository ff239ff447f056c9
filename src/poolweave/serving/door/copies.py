"""Carries out what a route asks for beside its prompt: KV that is fetched for it, and hot prefixes that are copied.

Source: MemServe §6.2 (move KV only where that is faster than computing it); C29 (copies before there is a hot spot).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from poolweave.errors import PoolweaveError
from poolweave.scheduler.cost_model import CostModel
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.routes import Route
from poolweave.serving.control.messages import Copied, Copy, pack_tokens
from poolweave.serving.door.links import Links
from poolweave.serving.tenant_quota import Owner
from poolweave.types import UInt64Array

logger = logging.getLogger(__name__)

_COPY_S = 30.0  # nobody waits for a copy of a hot prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prompt whose beginning is copied: its tokens, whose KV it is, and its block keys in the prompt trees."""

    tokens: list[int]
    owner: Owner
    keys: UInt64Array


class Copies:
    """Used from one event loop. What fails is computed instead: no request fails of it."""

    def __init__(self, scheduler: GlobalScheduler, links: Links, model: CostModel) -> None:
        self._scheduler = scheduler
        self._links = links
        self._model = model
        self._running: set[asyncio.Task[int]] = set()
        self.copied_tokens = 0

    async def fetch(self, route: Route, prefix: Prefix) -> None:
        """The prefill instance has what the route wants of another when this returns, or it was no use to wait longer:
        all of the prompt would have been computed."""
        if route.fetch is not None:
            patience_s = self._model.prefill_s(len(prefix.tokens), 0)
            await self._copy(route.fetch.source, route.prefill, prefix, route.fetch.tokens, patience_s)

    def replicate(self, route: Route, prefix: Prefix) -> None:
        """Begin the copy that the route asks for; it goes on by itself."""
        asked = route.replicate
        if asked is not None:
            copy = self._copy(asked.source, asked.target, prefix, asked.tokens, _COPY_S)
            task = asyncio.get_running_loop().create_task(copy)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Wait for no copy any more. Idempotent."""
        for task in self._running:
            task.cancel()

    async def _copy(self, source: str, target: str, prefix: Prefix, num_tokens: int, timeout_s: float) -> int:
        """-> tokens that the target has now. What it has, the prompt trees know."""
        try:
            receiver = self._links.get(target)
            addresses = list(receiver.welcome.addresses.values())
            request = Copy(
                tokens=pack_tokens(prefix.tokens[:num_tokens]), peer=target, addresses=addresses, owner=prefix.owner
            )
            copied = await self._links.get(source).link.call(request, Copied, timeout_s)
            blocks = copied.num_tokens // self._scheduler.config.block_tokens
            if self._links.get(target) is not receiver:  # its next life, which has nothing
                return 0
            self._scheduler.holdings.learned(target, prefix.keys[:blocks])
        except PoolweaveError as error:
            logger.info("%s has no copy of a prefix of %s: %s", target, source, error)
            return 0
        self.copied_tokens += copied.num_tokens
        return int(copied.num_tokens)
