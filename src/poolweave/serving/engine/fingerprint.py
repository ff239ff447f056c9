"""What a model directory contains, as one digest: the same bytes anywhere give the same, wherever they lie."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import xxhash

_PLACE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # say nothing about the KV of given weights


def weights_digest(path: Path) -> str:
    """Hex digest over config.json and every byte of the safetensors files, in name order.

    KV computed by one revision must never be taken for another's, and two fine-tunes can differ in any tensor: so all
    is read, at memory speed where the page cache holds it, as it does after loading.
    """
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _PLACE}
    state = xxhash.xxh3_128(json.dumps(kept, sort_keys=True).encode())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            state.update(content)
    return state.hexdigest()
