"""Several engines, one of which computes at a time: temporal multiplexing of one device over cold models.

Source: CrossPool (prefill instances switch among the cold models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from poolweave.errors import RequestRefused
from poolweave.serving.engine.sequence import Emitted, Sequence


class Engine(Protocol):
    """One model's; TorchEngine is one."""

    @property
    def has_work(self) -> bool: ...
    @property
    def stalled(self) -> bool: ...
    def add(self, sequence: Sequence) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def step(self) -> list[Emitted]: ...


class TimeShared:
    """An engine over engines, by model name. Each step is one model's: those with work take turns.

    A model that has no work keeps its KV and costs nothing. One thread adds and steps, any cancels.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        self._order = list(engines)  # whose turn is longest ago comes first
        self._last = ""
        self.switches = 0  # steps whose model was not that of the step before

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines.values())

    @property
    def stalled(self) -> bool:
        """No model that has work can go on."""
        return all(engine.stalled for engine in self._engines.values() if engine.has_work)

    def add(self, sequence: Sequence) -> None:
        """Queue a request at its model's engine. Raises RequestRefused, and what that raises."""
        engine = self._engines.get(sequence.model)
        if engine is None:
            raise RequestRefused(f"no model {sequence.model!r} is here: {', '.join(self._engines)}")
        engine.add(sequence)

    def cancel(self, request_id: str) -> bool:
        return any(engine.cancel(request_id) for engine in self._engines.values())

    def step(self) -> list[Emitted]:
        """One step of the model whose turn it is; empty when no model has work."""
        for name in self._order:
            if self._engines[name].has_work:
                self._order.remove(name)
                self._order.append(name)
                self.switches += name != self._last and bool(self._last)
                self._last = name
                return self._engines[name].step()
        return []
