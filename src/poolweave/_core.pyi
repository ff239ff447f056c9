"""
Native core of poolweave: arenas, blocks, the radix tree, copies and streams.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray

class FfnStack:
    """FFN layers of one model, natively; one thread at a time."""

    def __init__(self, hidden: int, kernels: str = "auto") -> None: ...
    def add_dense(self, weights: dict[str, object]) -> None: ...
    def add_moe(self, weights: dict[str, object], sizes: dict[str, object]) -> None: ...
    def forward(
        self,
        layer: int,
        x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def active_bytes(self, layer: int) -> int: ...
    @property
    def num_layers(self) -> int: ...

class KvView:
    """
    A pool's view of [slots, layers, parts, block_tokens, heads, dim], kept alive.
    """

    def __init__(self, array: numpy.typing.NDArray[Any]) -> None: ...

class AttentionStack:
    """The KV side of one model, natively; one thread at a time."""

    def __init__(
        self,
        ends: dict[str, object],
        inv_freq: Sequence[float],
        rope_scale: float,
        rope_form: int,
        kernels: str = "auto",
    ) -> None: ...
    def add_grouped(self, weights: dict[str, object], sizes: dict[str, object]) -> None: ...
    def add_latent(self, weights: dict[str, object], sizes: dict[str, object]) -> None: ...
    def embed(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def attend(
        self,
        layer: int,
        kv: KvView,
        positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        delta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None,
        residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        normed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def logits(
        self,
        delta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None,
        residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    @property
    def num_layers(self) -> int: ...

def kernel_names() -> list[str]:
    """Kernel tables that run on this machine."""
