"""Engines and this package understand each other's events: their bytes, and their publishers where at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from ref_engine_events import classes_of, declared

from poolweave.index.events import EventIndex, FeedState, KVEventPublisher, KVEventSubscriber
from poolweave.index.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch

PROMPT = list(range(100, 164))
ENGINES = ("vllm", "sglang")
STORED: dict[str, Any] = {
    "block_hashes": [7, 2**64 - 1], "parent_block_hash": None, "token_ids": PROMPT[:32], "block_size": 16,
    "lora_id": None, "medium": "GPU", "lora_name": None,
}  # fmt: skip


def until(subscriber: KVEventSubscriber, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        subscriber.poll(0.05)
        assert time.monotonic() < deadline, "it did not come to pass"


def batch(classes: Any, events: list[Any]) -> bytes:
    return msgspec.msgpack.encode(classes.KVEventBatch(12.5, events, 3))


def ours() -> bytes:
    events = [BlockStored(**STORED), BlockRemoved(block_hashes=[7], medium="GPU"), AllBlocksCleared()]
    return encode_batch(12.5, events, 3)


@pytest.mark.parametrize("source", [declared, classes_of])
def test_events_without_salt_are_vllms_byte_for_byte(source: Callable[[str], Any]) -> None:
    theirs = source("vllm")
    events = [theirs.BlockStored(**STORED), theirs.BlockRemoved(block_hashes=[7], medium="GPU")]
    assert ours() == batch(theirs, [*events, theirs.AllBlocksCleared()])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", [declared, classes_of])
def test_their_decoders_read_ours(engine: str, source: Callable[[str], Any]) -> None:
    theirs = source(engine)
    salted = encode_batch(12.5, [BlockStored(**STORED, cache_salt="digest")], 3)
    for payload in (ours(), salted):
        read = msgspec.msgpack.decode(payload, type=theirs.KVEventBatch)
        assert (read.ts, read.events[0].block_hashes, read.events[0].token_ids) == (12.5, [7, 2**64 - 1], PROMPT[:32])
    if engine == "sglang":
        assert read.events[0].cache_salt == "digest"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", [declared, classes_of])
def test_ours_reads_their_events(engine: str, source: Callable[[str], Any]) -> None:
    theirs = source(engine)
    far = "CPU" if engine == "vllm" else "CPU_PINNED"
    follows = {**STORED, "block_hashes": [9], "parent_block_hash": 2**64 - 1, "token_ids": PROMPT[32:48], "medium": far}
    index = EventIndex()
    feed = index.add_source(engine, can_replay=False)
    feed.receive(0, batch(theirs, [theirs.BlockStored(**STORED), theirs.BlockStored(**follows, session_id="s")]))
    assert index.match(PROMPT) == {engine: 48}
    feed.receive(1, batch(theirs, [theirs.BlockRemoved(block_hashes=[9], medium=far)]))
    assert index.match(PROMPT) == {engine: 32}
    feed.receive(2, batch(theirs, [theirs.AllBlocksCleared()]))
    assert index.match(PROMPT) == {}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_live_publisher_of_an_engine(engine: str, tmp_path: Path) -> None:
    """Its own class and threads: events told before anyone listened come by replay, later ones as they happen."""
    theirs = classes_of(engine)
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("pub", "replay")]
    publisher = theirs.ZmqEventPublisher(0, endpoints[0], endpoints[1], topic="kv")
    try:
        publisher.publish(theirs.KVEventBatch(1.0, [theirs.BlockStored(**STORED)]))
        with KVEventSubscriber(EventIndex()) as subscriber:
            index = subscriber._index
            subscriber.connect(engine, *endpoints, topic="kv", counts_copies=engine == "vllm")
            until(subscriber, lambda: index.match(PROMPT) == {engine: 32})
            publisher.publish(theirs.KVEventBatch(2.0, [theirs.BlockRemoved(block_hashes=[2**64 - 1], medium="GPU")]))
            until(subscriber, lambda: index.match(PROMPT) == {engine: 16})
            publisher.publish(theirs.KVEventBatch(3.0, [theirs.AllBlocksCleared()]))
            until(subscriber, lambda: index.match(PROMPT) == {})
            assert index.status()[engine].state is FeedState.LIVE
    finally:
        publisher.shutdown()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_we_publish_is_replayed_as_engines_do(engine: str) -> None:
    """A consumer written for `engine`: asks for a replay, decodes with its structs, stops at the end mark."""
    theirs = declared(engine)
    with KVEventPublisher() as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        publisher.publish([BlockStored(**STORED)])
        publisher.publish([BlockRemoved(block_hashes=[7], medium="GPU")])
        dealer.connect(publisher.replay_endpoint or "")
        dealer.send_multipart((b"", (1).to_bytes(8, "big")))
        _, _, sequence, payload = dealer.recv_multipart()
        assert int.from_bytes(sequence, "big") == 1
        assert msgspec.msgpack.decode(payload, type=theirs.KVEventBatch).events[0].block_hashes == [7]
        assert dealer.recv_multipart()[2] == (-1).to_bytes(8, "big", signed=True)
