"""Cold models behind one DecodeEngine: what an instance of kind "crosspool" computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poolweave.crosspool_engine import (
    DecodeEngine,
    EngineConfig,
    Serving,
    check_machine,
    planned_config,
    planned_serving,
)
from poolweave.crosspool_engine.planner import load_plan
from poolweave.mempool import MemPool
from poolweave.serving.crosspool.cold_model import ColdModel, read_cold_model
from poolweave.serving.crosspool.decoder import Decoder
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.job_runner import Engine


class CrossPoolKind:
    """Starts the workers and activates all models at construction.

    With a plan file its ranks, page budget and placements are enforced. Raises ModelNotFound, ConfigError for models
    that cannot be decoded or that the plan does not place, PlanInfeasible for a plan that this machine has no memory
    for, WorkerLost; then no process is left.
    """

    def __init__(self, config: InstanceConfig) -> None:
        asked = config.crosspool
        places = zip(config.model_names, config.stations, strict=True)
        self.models: dict[str, ColdModel] = {name: read_cold_model(place.model, place.dtype) for name, place in places}
        serving = {name: Serving(path=str(model.path), dtype=model.dtype) for name, model in self.models.items()}
        settings = {**asked.settings(), "max_hidden": max(model.shape.hidden for model in self.models.values())}
        settings["reuse"] = False  # history lies in the pools, where peers can be sent it
        plan = None if asked.plan is None else load_plan(asked.plan)
        if plan is None:
            self._engine = DecodeEngine(EngineConfig(**settings, **asked.pools(), max_models=len(self.models)))
        else:
            shapes = {name: model.shape for name, model in self.models.items()}
            check_machine(plan, shapes, away=len(asked.ffn_hosts))
            for name, one in serving.items():
                planned_serving(plan, name, one)  # refuses what the plan has no place for before workers start
            self._engine = DecodeEngine(planned_config(plan, **settings), plan=plan)
        try:
            for name, one in serving.items():
                self._engine.activate(name, one)
        except BaseException:
            self._engine.close()
            raise
        self._decoder: Decoder | None = None

    def engine(self, pools: Mapping[str, MemPool]) -> Engine:
        self._decoder = Decoder(self._engine, self.models, pools)
        return self._decoder

    def counters(self) -> dict[str, Any]:
        return {} if self._decoder is None else self._decoder.figures

    def close(self) -> None:
        self._engine.close()
