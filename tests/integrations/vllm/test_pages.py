"""Which engines' KV a pool can keep, and whose it is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from poolweave.errors import ModelUnsupported
from poolweave.integrations.vllm.identity import weights_identity
from poolweave.integrations.vllm.pages import PageFacts

FACTS = PageFacts(
    model="m", device="cpu", kinds=("FullAttentionSpec",), layers=2, heads=2, width=64, block_tokens=32,
    dtype="float32", page_bytes=16384, inside="LBHNC-vec",
)  # fmt: skip


def test_a_page_is_one_plane_copied_as_it_is() -> None:
    layout = FACTS.layout()
    assert (layout.plane_bytes, layout.num_planes) == (FACTS.page_bytes, 2)
    other = dataclasses.replace(FACTS, inside="LBHNC-amx").layout()
    assert layout.fingerprint() != other.fingerprint(), "another inside is another layout"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kinds": ("FullAttentionSpec", "SlidingWindowSpec")}, "hybrid KV cache groups"),
        ({"kinds": ("SlidingWindowSpec",)}, "SlidingWindowSpec"),
        ({"kinds": ("MLAAttentionSpec",)}, "MLAAttentionSpec"),
        ({"kinds": ()}, "hybrid KV cache groups"),
        ({"window": 128}, "window of 128 tokens"),
        ({"device": "cuda"}, "device 'cuda'"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"ranks": 2}, "2 ranks"),
        ({"speculative": True}, "speculative"),
        ({"encoder": True}, "encoder-decoder"),
        ({"page_bytes": 20000}, "20000 bytes where 16384"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        dataclasses.replace(FACTS, **change).layout()


def test_weights_are_known_by_their_bytes_wherever_they_lie(tmp_path: Path) -> None:
    seen = set()
    for place, weights in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        path = tmp_path / place
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (path / "model.safetensors").write_bytes(weights)
        seen.add(weights_identity(str(path), None, {"rope": 1}, "auto"))
    assert len(seen) == 2
    assert weights_identity(str(tmp_path / "a"), None, {"rope": 2}, "auto") not in seen, "an override counts"
    assert weights_identity("org/model", "r1", {}, "auto") != weights_identity("org/model", "r2", {}, "auto")
