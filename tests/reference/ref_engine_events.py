"""KV events as engines declare and publish them: the fields of their structs, and their own classes where at hand.

`declared()` has the fields as vLLM 0.32.0 and SGLang 0.5.23 declare them. `classes_of(engine)` runs the class
definitions out of the unpacked wheels (no other part of the engine, nor what it imports), found in the folder that
POOLWEAVE_PEERS names.
"""

from __future__ import annotations

import ast
import atexit
import enum
import logging
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional, Union

import msgspec
import pytest
import zmq

FOLDER = Path(os.environ.get("POOLWEAVE_PEERS") or Path.home() / ".cache" / "poolweave-peers")
SOURCES = {
    "vllm": "vllm_src/vllm/distributed/kv_events.py",
    "sglang": "sglang_src/sglang/srt/disaggregation/kv_events.py",
}
_HASH = bytes | int
_EVENT = {"tag": True, "omit_defaults": True}


def _optional(*names: str) -> list[tuple[str, Any, Any]]:
    return [(name, Any, None) for name in names]


def declared(engine: str) -> SimpleNamespace:
    """The engine's event structs, by their declarations."""
    vllm = engine == "vllm"
    stored: list[Any] = [
        ("block_hashes", list[_HASH]), ("parent_block_hash", _HASH | None), ("token_ids", list[int]),
        ("block_size", int), ("lora_id", int | None),
    ]  # fmt: skip
    removed: list[Any] = [("block_hashes", list[_HASH])]
    if vllm:
        kinds = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership")
        stored += [("medium", str | None), ("lora_name", str | None), *_optional("extra_keys", *kinds, "session_id")]
        removed += [("medium", str | None), *_optional("group_idx", "locality", "ownership")]
    else:
        stored += _optional("medium", "cache_salt", "session_id", "lora_name")
        removed += _optional("medium")
    classes = {
        "BlockStored": msgspec.defstruct("BlockStored", stored, **_EVENT),
        "BlockRemoved": msgspec.defstruct("BlockRemoved", removed, **_EVENT),
        "AllBlocksCleared": msgspec.defstruct("AllBlocksCleared", [], **_EVENT),
    }
    rank = "data_parallel_rank" if vllm else "attn_dp_rank"
    union = classes["BlockStored"] | classes["BlockRemoved"] | classes["AllBlocksCleared"]
    batch = [("ts", float), ("events", list[union]), (rank, int | None, None)]
    classes["KVEventBatch"] = msgspec.defstruct("KVEventBatch", batch, array_like=True, omit_defaults=vllm)
    return SimpleNamespace(**classes)


def classes_of(engine: str) -> ModuleType:
    """The engine's own event structs and ZmqEventPublisher. Skips the test where its source is not at hand."""
    path = FOLDER / SOURCES[engine]
    if not path.is_file():
        pytest.skip(f"{path} is not at hand: unpack the wheel of {engine} into the folder that POOLWEAVE_PEERS names")
    wanted = {
        "EventBatch", "KVCacheEvent", "StorageMedium", "BlockStored", "BlockRemoved", "AllBlocksCleared",
        "KVEventBatch", "EventPublisher", "ZmqEventPublisher",
    }  # fmt: skip
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    module = ModuleType(f"events_of_{engine}")
    module.__dict__.update(
        {
            "ABC": ABC, "abstractmethod": abstractmethod, "Any": Any, "Optional": Optional, "Queue": queue.Queue,
            "atexit": atexit, "count": count, "deque": deque, "enum": enum, "msgspec": msgspec, "os": os,
            "queue": queue, "threading": threading, "time": time, "zmq": zmq, "logger": logging.getLogger(engine),
            "ExternalBlockHash": _HASH, "KVEventsConfig": SimpleNamespace, "Union": Union,
        }
    )  # fmt: skip
    sys.modules[module.__name__] = module  # msgspec looks annotations up there
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module
