"""The models of one engine: activated whole or not at all, out of work while a worker they need is dead."""

from __future__ import annotations

import logging

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.crew import Crew
from poolweave.crosspool_engine.kv_pool import KvPool
from poolweave.crosspool_engine.planned import planned_serving
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.crosspool_engine.replica import Replica
from poolweave.crosspool_engine.served_model import ServedModel, Serving
from poolweave.errors import ConfigError, WorkerLost

_log = logging.getLogger(__name__)


class Roster:
    """Who is served, and where. `models` is a live view. `pools`: KV by attention rank. A `plan` is enforced."""

    def __init__(self, board: Board, crew: Crew, pools: list[KvPool], plan: Plan | None) -> None:
        self._plan = plan
        self._board = board
        self._crew = crew
        self._pools = pools
        self._dead: dict[int, WorkerLost] = {}  # places whose death was noticed
        self.models: dict[str, ServedModel] = {}

    def activate(self, name: str, serving: Serving) -> None:
        """All or nothing. Raises as DecodeEngine.activate."""
        config = self._crew.config
        free = sorted(set(range(config.max_models)) - {model.index for model in self.models.values()})
        if name in self.models or not free:
            raise ConfigError(
                f"{name!r} is active already, or max_models {config.max_models} are", setting="max_models",
                value=len(self.models), limit=config.max_models,
            )  # fmt: skip
        if self._plan is not None:
            serving = planned_serving(self._plan, name, serving)
        model = ServedModel.of(name, serving, index=free[0], config=config)
        self._board.set_model(model.index, model.layer_cost, [list(ranks) for ranks in model.owners])
        self._crew.activate(model.orders())
        for rank in model.ranks:
            self._pools[rank].open(model)
        self.models[name] = model
        _log.info("activated %s from %s", name, serving.path)

    def deactivate(self, name: str) -> None:
        """No request of it may be here."""
        model = self.models.pop(name)
        self._crew.deactivate(model.index)
        for rank in model.ranks:
            self._pools[rank].close(name)
        _log.info("deactivated %s", name)

    def get(self, name: str) -> ServedModel:
        """Raises ConfigError for one that is not active."""
        if name not in self.models:
            raise ConfigError(f"no model {name!r} is active: {sorted(self.models)}", setting="model", value=name)
        return self.models[name]

    def replicas(self, name: str) -> tuple[Replica, ...]:
        """All copies of a model's attention."""
        return tuple(Replica(tuple(self._pools[rank] for rank in ranks)) for ranks in self.models[name].replicas)

    def eligible(self, name: str) -> tuple[Replica, ...]:
        """Copies that can decode a model now: those with no dead rank, none while its FFN misses one."""
        if self.models[name].ffn_places & self._dead.keys():
            return ()
        return tuple(replica for replica in self.replicas(name) if not set(replica.ranks) & self._dead.keys())

    def lost(self, name: str) -> WorkerLost | None:
        """Why a model waits for restart(), None when it does not."""
        if self.eligible(name):
            return None
        model = self.models[name]
        return next(self._dead[place] for place in (*sorted(model.ffn_places), *model.ranks) if place in self._dead)

    def notice_deaths(self) -> dict[int, WorkerLost]:
        """Workers that died since the last look, by place."""
        fresh = {place: self._crew.workers[place].lost() for place in self._crew.dead() if place not in self._dead}
        self._dead |= fresh
        return fresh

    def restart(self) -> None:
        """New workers for the dead ones, serving what those did. Raises as activate: repeat it then."""
        places = list(self._dead)
        self._crew.replace(places)
        for place in places:
            for model in self.models.values():
                if place in model.orders():
                    self._crew.workers[place].call(model.orders()[place])
        self._dead.clear()
