"""Everything behind the door's routes, put together: the one place that knows all parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from typing import Any

from poolweave.errors import PoolweaveError
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.control.messages import Counters, Stats
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.copies import Copies
from poolweave.serving.door.dispatch import Dispatcher
from poolweave.serving.door.gate import Gate
from poolweave.serving.door.kv_events import Listener
from poolweave.serving.door.links import Linked, Links
from poolweave.serving.door.metrics import Metrics
from poolweave.serving.door.prompter import load_prompter
from poolweave.serving.door.reception import Reception
from poolweave.serving.instance.named_model import NamedModel
from poolweave.types import Role, parse_bytes

logger = logging.getLogger(__name__)

_STATS_S = 1.0


class House:
    """One model's parts; those of several stand beside each other behind one gate. Used on one event loop.

    Raises ModelNotFound, ConfigError.
    """

    def __init__(self, config: DoorConfig, named: NamedModel | None = None, beside: House | None = None) -> None:
        """`named`: the model where there are several; `beside`: the first house."""
        routing = config.routing
        path = config.model if named is None else named.path
        self.model = config.served_name or _name_of(path) if named is None else named.name
        self.max_body_bytes = parse_bytes(config.max_body, "max_body")
        self.started_s = time.time()
        self.prompter = load_prompter(path)
        measured = routing.measured()
        moves_kv = routing.moves_kv and config.flow != "pd-basic"  # there, nothing is found that was copied
        self.scheduler = GlobalScheduler(
            measured.cost,
            SchedulerConfig(
                policy=routing.policy,
                tree_ttl_s=routing.tree_ttl_s,
                kv_link=measured.kv_link if moves_kv else None,
                hot_load=routing.hot_load if moves_kv else None,
                returns_answers=config.flow == "pd-caching-3",
                seed=routing.seed,
            ),
        )
        self.gate: Gate = Gate(config) if beside is None else beside.gate
        self.listener = Listener(self.scheduler.holdings)
        self.links = Links(self.scheduler, self.listener, "" if named is None else named.name)
        self.copies = Copies(self.scheduler, self.links, measured.cost)
        self.dispatcher = Dispatcher(config, self.scheduler, self.links, self.copies)
        self.metrics: Metrics = Metrics(self.model, None if beside is None else beside.metrics)
        self.reception = Reception(self.prompter, self.links)
        self._usage: dict[str, float] = {}

    @property
    def retry_after_s(self) -> int:
        """When a place may be free: after the shortest queue, as far as it can be told; whole seconds, at least 1."""
        loads = [load.queued_s for load in self.scheduler.stats().instances if load.role is not Role.DECODE]
        return max(1, math.ceil(min(loads, default=1.0)))

    def metrics_text(self) -> bytes:
        """All counters of all houses, and the state of this one now."""
        roles = {role.value: 0 for role in Role}
        for linked in self.links.linked:
            roles[linked.welcome.role] += 1
        running = self.dispatcher.answering
        self.metrics.load(running, self.dispatcher.asked - running, roles)
        self.metrics.usage(self._usage)
        return self.metrics.text()

    def deployment(self) -> dict[str, Any]:
        """Members, loads and totals, as plain values."""
        stats = self.scheduler.stats()
        loads = {load.name: load for load in stats.instances}
        pids = {linked.link.name: linked.welcome.pid for linked in self.links.linked}
        return {
            "model": self.model,
            "pid": os.getpid(),
            "draining": self.gate.draining,
            "in_flight": self.gate.inside,
            "routed": stats.routed,
            "retried": self.dispatcher.retried,
            "hit_ratio": stats.hit_ratio,
            "copied_tokens": self.copies.copied_tokens,
            "instances": [
                {
                    "name": member.name,
                    "role": member.role.value,
                    "state": member.state.value if member.name in pids else "unreachable",
                    "pid": pids.get(member.name),
                    "events": self.listener.state(member.name),
                    "epoch": member.epoch,
                    "queued_s": loads[member.name].queued_s if member.name in loads else 0.0,
                    "sequences": loads[member.name].num_sequences if member.name in loads else 0,
                    "kv_usage": self._usage.get(member.name, 0.0),
                }
                for member in self.links.members
            ],
        }

    async def watch_pools(self) -> None:
        """Ask the instances for their pools' figures, again and again, until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:
                logger.exception("the pools of %s could not be looked at; they are again", self.model)
            await asyncio.sleep(_STATS_S)

    async def _look(self) -> None:
        linked = self.links.linked
        figures = await asyncio.gather(*(_usage_of(one) for one in linked))
        self._usage = {one.link.name: share for one, share in zip(linked, figures, strict=True) if share is not None}
        self.scheduler.holdings.sweep()


async def _usage_of(one: Linked) -> float | None:
    """Share of an instance's blocks that running requests hold; None when it does not say."""
    with contextlib.suppress(PoolweaveError, KeyError, ZeroDivisionError):
        counters = await one.link.call(Stats(), Counters, _STATS_S * 5)
        blocks = counters.pool["hbm"]
        return float(blocks["active"] / blocks["total"])
    return None


def _name_of(model: str) -> str:
    """What a model is called in the protocol: its directory's name."""
    return model.rstrip("/").rpartition("/")[2] or model
