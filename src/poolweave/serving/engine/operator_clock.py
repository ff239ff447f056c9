"""Where a forward's time goes: seconds in each kind of operator, taken by hooks around a model's modules.

Kinds are named after the modules: `q_proj`, `gate_proj`, ... for the GEMMs inside the layers, `attention` and `ffn` for
what their layers do beside their GEMMs, `norm`, and `head` for GEMMs outside the layers. A module's time is its own:
that of measured modules inside it is theirs, and what the hooks cost is nobody's. Operators must run in the calling
thread (device "cpu").
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Literal

import torch

from poolweave.serving.engine.models import LoadedModel

Nature = Literal["gemm", "attention", "linear"]  # how its time grows with the tokens

_NOTHING = "nothing"
ATTENTION, FFN, NORM, HEAD = "attention", "ffn", "norm", "head"


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """`count` modules of one kind in the whole model; `columns`: outputs of a GEMM."""

    name: str
    nature: Nature
    count: int
    columns: int = 0


class OperatorClock:
    """Measures while it is entered; `take` gives what was measured since the last call. One thread."""

    def __init__(self, model: LoadedModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._modules = dict(_modules(model.model))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []  # of each module that runs: when it began, time of those inside it
        self._hooks: list[Any] = []
        self._within_s, self._around_s = self._cost()  # of a module's hooks: as its own time, and as its caller's
        self.hooks_s = 0.0  # what the hooks cost in all since `take`

    @property
    def kinds(self) -> tuple[OperatorKind, ...]:
        """All kinds that are measured."""
        counts = Counter(kind for kind, _ in self._modules.values())
        columns = {kind: module.out_features for module, (kind, nature) in self._modules.items() if nature == "gemm"}
        natures = dict(self._modules.values())
        return tuple(
            OperatorKind(kind, natures[kind], count, columns.get(kind, 0)) for kind, count in sorted(counts.items())
        )

    def take(self) -> dict[str, float]:
        """Seconds in each kind, all its modules together; zeroed by this call."""
        taken = {kind.name: self._seconds[kind.name] for kind in self.kinds}
        self._seconds.clear()
        self.hooks_s = 0.0
        return taken

    def __enter__(self) -> OperatorClock:
        for module, (kind, _) in self._modules.items():
            self._watch(module, kind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open.clear()

    def _watch(self, module: Any, kind: str) -> None:
        self._hooks.append(module.register_forward_pre_hook(self._begin))
        self._hooks.append(module.register_forward_hook(self._ender(kind)))

    def _cost(self, calls: int = 500) -> tuple[float, float]:
        """Of a module that does nothing, with and without hooks: medians of many calls."""
        self._within_s = self._around_s = self.hooks_s = 0.0
        nothing, token = torch.nn.Identity(), torch.zeros(1)

        def call_s() -> float:
            began = self._clock()
            nothing(token)
            return self._clock() - began

        bare = median(call_s() for _ in range(calls))
        self._watch(nothing, _NOTHING)
        within, hooked = [], []
        for _ in range(calls):
            hooked.append(call_s())
            within.append(self._seconds.pop(_NOTHING))
        self.__exit__(None, None, None)
        own = min(max(median(within) - bare, 0.0), median(hooked))
        return own, max(median(hooked) - bare - own, 0.0)

    def _begin(self, module: Any, arguments: Any) -> None:
        self._open.append([self._clock(), 0.0])

    def _ender(self, kind: str) -> Any:
        def end(module: Any, arguments: Any, output: Any) -> None:
            began, inside = self._open.pop()
            seconds = self._clock() - began
            self._seconds[kind] += max(seconds - inside - self._within_s, 0.0)
            self.hooks_s += self._within_s + self._around_s
            if self._open:
                self._open[-1][1] += seconds + self._around_s

        return end


def launch_s(calls: int = 1000) -> float:
    """What calling a GEMM takes before it reads its weights: the quickest call of the smallest one."""
    module, token = torch.nn.Linear(1, 1, bias=False), torch.zeros(1, 1, 1)
    seconds = []
    with torch.inference_mode():
        for _ in range(calls):
            began = time.perf_counter()
            module(token)
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def _modules(model: Any) -> dict[Any, tuple[str, Nature]]:
    """Each module that is measured, with its kind."""
    found: dict[Any, tuple[str, Nature]] = {}
    layers = list(model.get_decoder().layers)
    for layer in layers:
        found[layer.self_attn] = (ATTENTION, "attention")
        found[layer.mlp] = (FFN, "linear")
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                found[module] = (name.rpartition(".")[2], "gemm")
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            found[module] = (NORM, "linear")
        elif isinstance(module, torch.nn.Linear) and module not in found:
            found[module] = (HEAD, "linear")
    return found
