"""A cold model as a decode instance knows it: what its KV looks like and when its answers end. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolweave.crosspool_engine.kv_layout import kv_layout
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.errors import ConfigError
from poolweave.index import Identity
from poolweave.serving.engine.fingerprint import weights_digest
from poolweave.serving.engine.model_directory import model_directory
from poolweave.transfer import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdModel:
    """Identity and layout are those of a prefill instance of the same directory. `tokenizer` None: there is none."""

    path: Path
    dtype: str
    shape: ModelShape
    layout: KVLayout
    identity: Identity
    eos_token_ids: tuple[int, ...]
    tokenizer: Any

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    @property
    def vocab(self) -> int:
        return self.shape.vocab


def read_cold_model(path_or_name: str, dtype: str) -> ColdModel:
    """Reads the configuration and every byte of the weights, for their digest; loads none.

    Raises ModelNotFound, ConfigError for what CrossPool does not decode.
    """
    path = model_directory(path_or_name)
    shape = ModelShape.from_directory(path)
    layout = kv_layout(shape, dtype=dtype)
    identity = Identity(
        model=shape.architecture, revision=weights_digest(path), layout=layout.fingerprint(), dtype=dtype
    )
    return ColdModel(
        path=path, dtype=dtype, shape=shape, layout=layout, identity=identity, eos_token_ids=_eos(path),
        tokenizer=_tokenizer(path),
    )  # fmt: skip


def _eos(path: Path) -> tuple[int, ...]:
    """The tokens that end an answer: the generation config's, which knows of chat turns, before the model config's."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()


def _tokenizer(path: Path) -> Any:
    """Of stop strings."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} does not load: {error}", setting="model", value=str(path)) from error
