"""Whose prefix a request's is, from what vLLM knows of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from poolweave.index import Identity
from poolweave.serving.engine.fingerprint import weights_digest


def weights_identity(model: str, revision: str | None, config: dict[str, Any], load_format: str) -> tuple[str, str]:
    """(model, revision) of an Identity. Of a local directory all bytes of its weights count, wherever it lies.

    Of a model named by its hub: its name and revision. `config` is the model's, with all overrides.
    """
    told = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    path = Path(model)
    if path.is_dir() and any(path.glob("*.safetensors")):
        return weights_digest(path), f"{told}:{load_format}"
    return model, f"{revision}:{told}:{load_format}"


def request_identity(base: Identity, request: Any) -> Identity:
    """`base` for this vLLM Request: with its LoRA, its multimodal inputs and where they stand, and its cache_salt."""
    lora = request.lora_request
    adapter = "" if lora is None else f"{lora.lora_int_id}:{lora.lora_name}:{lora.lora_path}"
    inputs = tuple(
        f"{feature.identifier}@{feature.mm_position.offset}+{feature.mm_position.length}".encode()
        for feature in request.mm_features
    )
    salt = b"" if request.cache_salt is None else b"salt:" + request.cache_salt.encode()
    return dataclasses.replace(base, adapter=adapter, multimodal=inputs, salt=salt)
