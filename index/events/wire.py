"""KV events on the wire: msgpack batches in frames [topic, sequence, batch]. Source: vLLM 0.32, SGLang 0.5.23.

A batch is the array [timestamp, events, rank]; an event is a map whose "type" is its class's name. The decoder is
native (csrc/core/kv_events.hpp); these classes only write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from poolweave.types import Tier

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)  # the sequence that closes a replay
MEDIA = {Tier.HBM: "GPU", Tier.DRAM: "CPU"}


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Consecutive blocks that are held now; the first follows `parent_block_hash`, or starts a prompt."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None  # vLLM's decoder wants it even when nil
    cache_salt: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Blocks that are no longer held in `medium`."""

    block_hashes: Sequence[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """Nothing is held any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(timestamp_s: float, events: Sequence[Event], rank: int | None = None) -> bytes:
    """One batch's payload."""
    return _ENCODER.encode((timestamp_s, events, rank))


def encode_extra_keys(extra_keys: Sequence[Sequence[Any] | None]) -> list[bytes]:
    """Each block's extra keys as the exact bytes by which the native index knows them; none is empty."""
    return [b"" if keys is None else _ENCODER.encode(list(keys)) for keys in extra_keys]


def encode_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def decode_sequence(frame: bytes) -> int | None:
    """The batch's number; None for the end of a replay and for what is no sequence."""
    return None if len(frame) != 8 or frame == END_OF_REPLAY else int.from_bytes(frame, "big")
