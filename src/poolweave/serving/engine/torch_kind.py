"""Models of transformers on torch: one engine a model, which take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poolweave.mempool import MemPool
from poolweave.serving.engine.engine import TorchEngine
from poolweave.serving.engine.models import LoadedModel, load_model
from poolweave.serving.engine.time_shared import TimeShared
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.job_runner import Engine


class TorchKind:
    """Loads all models at construction. Raises as load_model."""

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config.engine
        self._shared: TimeShared | None = None
        self.models: dict[str, LoadedModel] = {
            name: load_model(place.model, place.dtype, place.device)
            for name, place in zip(config.model_names, config.stations, strict=True)
        }

    def engine(self, pools: Mapping[str, MemPool]) -> Engine:
        engines = {name: TorchEngine(model, pools[name], self._config) for name, model in self.models.items()}
        if len(engines) == 1:
            return next(iter(engines.values()))
        self._shared = TimeShared(engines)
        return self._shared

    def counters(self) -> dict[str, Any]:
        return {} if self._shared is None else {"switches": self._shared.switches}

    def close(self) -> None:
        self.models.clear()
