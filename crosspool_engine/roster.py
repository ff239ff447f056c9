"""The models of one engine: activated whole or not at all, lost with a worker, loaded anew when it is replaced."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.crew import Crew
from poolweave.crosspool_engine.kv_pool import KvPool
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.errors import ConfigError, WorkerLost

_log = logging.getLogger(__name__)


class Roster:
    """Who is served. `models` and `lost` are live views; `lost` names those that wait for restart()."""

    def __init__(self, config: EngineConfig, board: Board, crew: Crew, pool: KvPool) -> None:
        self._config = config
        self._board = board
        self._crew = crew
        self._pool = pool
        self.models: dict[str, ServedModel] = {}
        self.lost: dict[str, WorkerLost] = {}

    def activate(self, name: str, path: str, *, dtype: str, owners: Sequence[int] | None) -> None:
        """All or nothing. Raises as DecodeEngine.activate."""
        limit = self._config.max_models
        free = sorted(set(range(limit)) - {model.index for model in self.models.values()})
        if name in self.models or not free:
            raise ConfigError(
                f"{name!r} is active already, or max_models {limit} are", setting="max_models",
                value=len(self.models), limit=limit,
            )  # fmt: skip
        model = ServedModel.of(name, path, index=free[0], dtype=dtype, config=self._config, owners=owners)
        self._board.set_model(model.index, model.layer_cost, list(model.owners))
        self._crew.activate(model.orders())
        self._pool.open(model)
        self.models[name] = model
        _log.info("activated %s from %s", name, path)

    def deactivate(self, name: str) -> None:
        """No request of it may be here."""
        self._crew.deactivate(self.models[name].index)
        self._pool.close(name)
        del self.models[name]
        self.lost.pop(name, None)
        _log.info("deactivated %s", name)

    def get(self, name: str) -> ServedModel:
        """Raises ConfigError for one that is not active."""
        if name not in self.models:
            raise ConfigError(f"no model {name!r} is active: {sorted(self.models)}", setting="model", value=name)
        return self.models[name]

    def served_at(self, place: int) -> frozenset[str]:
        """Models that need the worker at a place and were not lost before."""
        return frozenset(n for n, model in self.models.items() if place in model.orders() and n not in self.lost)

    def restart(self, places: Collection[int]) -> None:
        """New workers at these places, serving what the old ones did. Raises as activate: repeat it then."""
        self._crew.replace(places)
        for place in places:
            for model in self.models.values():
                if place in model.orders():
                    self._crew.workers[place].call(model.orders()[place])
        self.lost.clear()
