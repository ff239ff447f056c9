"""Layouts: the sizes the papers give, strides that agree with views, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.transfer import KVLayout, Part


def test_llama_2_13b_has_the_papers_sizes() -> None:
    """facts.md §1: small block 160 KiB, aggregated 12.5 MiB; 2,048 tokens are 10,240 small or 128 aggregated blocks."""
    layout = KVLayout(num_layers=40, kv_heads=40, head_dim=128)
    assert layout.plane_bytes == 160 << 10
    assert layout.block_bytes == 12.5 * (1 << 20)
    assert layout.num_blocks(2048) == 128
    assert layout.num_blocks(2048) * layout.num_planes == 10240


@pytest.mark.parametrize(
    ("layout", "bytes_per_token"),
    [
        (KVLayout(num_layers=48, kv_heads=4, head_dim=128, dtype="bfloat16"), 98_304),
        (KVLayout.mla(num_layers=47, rank=512, rope=64), 54_144),
        (KVLayout.mla(num_layers=27, rank=512, rope=64), 31_104),
        (KVLayout(num_layers=40, kv_heads=40, head_dim=128), 819_200),
    ],
)
def test_bytes_a_token_of_the_models(layout: KVLayout, bytes_per_token: int) -> None:
    assert layout.bytes_per_token == bytes_per_token


@pytest.mark.parametrize("order", ["aggregated", "layered", "token_major"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_strides_are_those_of_the_view(order: Any, dtype: str) -> None:
    layout = KVLayout(num_layers=3, kv_heads=2, head_dim=5, block_tokens=4, dtype=dtype, order=order)
    view = layout.view(np.zeros(7 * layout.block_bytes, np.uint8), 7)
    assert view.shape == (7, 3, 2, 4, 2, 5)
    slot, plane, row = layout.strides(7)
    assert view.strides == (slot, 2 * plane, plane, row, 5 * layout.dtype_bytes, layout.dtype_bytes)
    view[...] = np.arange(view.size, dtype=np.uint32).reshape(view.shape) % 251  # every element has its own place
    assert np.array_equal(view, np.arange(view.size, dtype=np.uint32).reshape(view.shape) % 251)


def test_the_fingerprint_names_all_but_the_order() -> None:
    base: dict[str, Any] = {"num_layers": 2, "kv_heads": 2, "head_dim": 8}
    same = {KVLayout(**base, order=order).fingerprint() for order in ("aggregated", "layered", "token_major")}
    assert len(same) == 1
    others = [base | change for change in ({"num_layers": 3}, {"kv_heads": 4}, {"head_dim": 4}, {"block_tokens": 8},
                                           {"dtype": "float32"})]  # fmt: skip
    latent = KVLayout.mla(num_layers=2, rank=12, rope=4, dtype="float16")
    assert len({*same, latent.fingerprint(), *(KVLayout(**other).fingerprint() for other in others)}) == 7


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 0}, {"kv_heads": -1}, {"head_dim": True}, {"block_tokens": 1.5}, {"dtype": "int8"}, {"order": "x"},
     {"parts": (Part("k", 3, 8, "split"),)}],
)  # fmt: skip
def test_impossible_layouts_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KVLayout(**({"num_layers": 2, "kv_heads": 2, "head_dim": 8} | change))
