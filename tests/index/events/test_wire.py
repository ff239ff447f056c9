"""Publisher and subscriber over real sockets: what one holds the other credits, whatever happens between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zmq

from poolweave.errors import AddressInUse, ConfigError, InstanceClosed
from poolweave.index import Identity, RadixIndex
from poolweave.index.events import (
    EventIndex,
    FeedState,
    KVEventPublisher,
    KVEventSubscriber,
    PublisherConfig,
    RecordedIndex,
)
from poolweave.index.events.wire import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch

PROMPT = list(range(64))


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    with KVEventPublisher() as publisher:
        yield publisher


@pytest.fixture
def subscriber() -> Iterator[KVEventSubscriber]:
    with KVEventSubscriber(EventIndex()) as subscriber:
        yield subscriber


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=16,
        lora_id=None,
        lora_name=None,
        medium="GPU",
        **more,
    )


def until(subscriber: KVEventSubscriber, done: Callable[[], object], limit_s: float = 90.0) -> None:
    """Pump until `done`; the limit only ends a test that would hang."""
    deadline = time.monotonic() + limit_s
    while not done():
        subscriber.poll(0.05)
        assert time.monotonic() < deadline, "it did not come to pass"


def link(subscriber: KVEventSubscriber, publisher: KVEventPublisher, name: str = "a", **more: Any) -> EventIndex:
    subscriber.connect(name, publisher.endpoint, publisher.replay_endpoint, **more)
    index = subscriber._index
    until(subscriber, lambda: index.status()[name].state is not FeedState.DEGRADED)
    return index


def test_what_one_stores_the_other_credits(publisher: KVEventPublisher, subscriber: KVEventSubscriber) -> None:
    publisher.publish([stored([1, 2], PROMPT[:32])])  # before anyone listens: replayed
    index = link(subscriber, publisher)
    until(subscriber, lambda: index.match(PROMPT) == {"a": 32})
    publisher.publish([stored([3], PROMPT[32:48], parent=2)])
    until(subscriber, lambda: index.match(PROMPT) == {"a": 48})
    publisher.publish([BlockRemoved(block_hashes=[2], medium="GPU")])
    until(subscriber, lambda: index.match(PROMPT) == {"a": 16})
    publisher.publish([AllBlocksCleared()])
    until(subscriber, lambda: index.match(PROMPT) == {})
    assert index.status()["a"].state is FeedState.LIVE
    index.check()


def test_a_source_with_nothing_to_tell_is_believed_once_it_said_so(
    publisher: KVEventPublisher, subscriber: KVEventSubscriber
) -> None:
    assert subscriber.state("a") is None
    index = link(subscriber, publisher)
    assert subscriber.state("a") in (FeedState.WAITING, FeedState.LIVE)
    until(subscriber, lambda: subscriber.state("a") is FeedState.LIVE)
    assert index.status()["a"].batches == 0


def test_two_sources_one_prefix(publisher: KVEventPublisher, subscriber: KVEventSubscriber) -> None:
    with KVEventPublisher() as other:
        index = link(subscriber, publisher, "a")
        link(subscriber, other, "b")
        publisher.publish([stored([1, 2, 3, 4], PROMPT)])
        other.publish([stored([91, 92], PROMPT[:32])])  # its own names for the same blocks
        until(subscriber, lambda: index.match(PROMPT) == {"a": 64, "b": 32})
        subscriber.disconnect("a")
        assert index.match(PROMPT) == {"b": 32}
        index.check()


def test_a_snapshot_stands_for_what_is_no_longer_kept(subscriber: KVEventSubscriber) -> None:
    config = PublisherConfig(kept_batches=1)
    with KVEventPublisher(config=config) as publisher:
        publisher.publish([stored([1, 2], PROMPT[:32], cache_salt="s")])
        publisher.publish([stored([3], PROMPT[32:48], parent=2, cache_salt="s")])
        publisher.publish([stored([7], PROMPT[:16])])
        publisher.publish([BlockStored(**{**msgspec.structs.asdict(stored([7], PROMPT[:16])), "medium": "CPU"})])
        index = link(subscriber, publisher)
        until(subscriber, lambda: index.match(PROMPT) == {"a": 16})
        assert index.match(PROMPT, cache_salt="s") == {"a": 48}
        assert index.match(PROMPT, cache_salt="t") == {}
        assert index.status()["a"].state is FeedState.LIVE
        publisher.publish([BlockRemoved(block_hashes=[7], medium="GPU")])
        publisher.publish([stored([4], PROMPT[48:], parent=3)])
        until(subscriber, lambda: index.match(PROMPT, cache_salt="s") == {"a": 64})
        assert index.match(PROMPT) == {"a": 16}  # still in DRAM
        publisher.publish([BlockRemoved(block_hashes=[7], medium="CPU")])
        until(subscriber, lambda: index.match(PROMPT) == {})
        assert publisher.num_held == 4


def test_a_source_that_dies_is_not_credited_and_comes_back(subscriber: KVEventSubscriber) -> None:
    first = KVEventPublisher()
    index = link(subscriber, first)
    first.publish([stored([1, 2], PROMPT[:32])])
    until(subscriber, lambda: index.match(PROMPT) == {"a": 32})
    first.close()
    until(subscriber, lambda: index.status()["a"].state is FeedState.DEGRADED)
    assert index.match(PROMPT) == {}
    config = PublisherConfig(endpoint=first.endpoint, replay_endpoint=first.replay_endpoint)
    with KVEventPublisher(config=config) as second:  # the same address, another life
        second.publish([stored([1], PROMPT[:16])])
        until(subscriber, lambda: index.match(PROMPT) == {"a": 16})
        assert index.status()["a"].state is FeedState.LIVE


def test_a_replay_that_never_answers_times_out() -> None:
    now = [0.0]
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub, context.socket(zmq.ROUTER) as router:
        pub.linger = router.linger = 0
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router)]
        with KVEventSubscriber(EventIndex(), clock=lambda: now[0]) as subscriber:
            index = subscriber._index
            subscriber.connect("a", *(f"tcp://127.0.0.1:{port}" for port in ports))
            until(subscriber, lambda: index.status()["a"].state is FeedState.DEGRADED)
            now[0] += 6.0
            until(subscriber, lambda: index.status()["a"].state is FeedState.WAITING)
            assert pub.recv() == b"\x01"  # nothing is lost once it is subscribed
            pub.send_multipart([b"", bytes(8), encode_batch(0.0, [stored([1], PROMPT[:16])], None)])
            until(subscriber, lambda: index.match(PROMPT) == {"a": 16})


def test_a_batch_lost_before_the_subscription_was_heard_is_found(
    publisher: KVEventPublisher, subscriber: KVEventSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolweave.index.events.subscriber._LOOK_S", 0.1)
    index = link(subscriber, publisher)
    for heard in range(3):  # first at the look after the first replay, then at those of a silent source
        with monkeypatch.context() as deaf:
            deaf.setattr(publisher, "_pub", Mock())
            publisher.publish([stored([heard + 1], PROMPT[heard * 16 :][:16], heard or None)])
        until(subscriber, lambda tokens=heard * 16 + 16: index.match(PROMPT) == {"a": tokens})  # type: ignore[misc]
    assert index.status()["a"].gaps == 0


def test_the_frames_are_those_of_vllm_and_sglang(publisher: KVEventPublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        events: list[Event] = [stored([2**64 - 1], PROMPT[:16]), BlockRemoved(block_hashes=[2**64 - 1], medium="GPU")]
        publisher.publish([*events, AllBlocksCleared()])
        dealer.connect(publisher.replay_endpoint or "")
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        empty, topic, sequence, payload = dealer.recv_multipart()
        assert (empty, topic, sequence) == (b"", b"", bytes(8))
        timestamp, batch, rank = msgspec.msgpack.decode(payload)
        assert isinstance(timestamp, float)
        assert rank is None
        assert batch[0] == {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1],
            "parent_block_hash": None,
            "token_ids": PROMPT[:16],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        assert batch[1] == {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU"}
        assert batch[2] == {"type": "AllBlocksCleared"}
        assert dealer.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]


def test_bad_requests_do_not_stop_replays(publisher: KVEventPublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint or "")
        for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"more"]):
            dealer.send_multipart(frames)
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.recv_multipart()[2] == END_OF_REPLAY


def test_a_taken_port_and_a_closed_publisher_are_named(publisher: KVEventPublisher) -> None:
    with pytest.raises(AddressInUse, match=r"endpoint='tcp://127.0.0.1:"):
        KVEventPublisher(config=PublisherConfig(endpoint=publisher.endpoint))
    with pytest.raises(ConfigError):
        KVEventPublisher(config=PublisherConfig(endpoint="nonsense://x"))
    with pytest.raises(ConfigError, match="kept_batches"):
        PublisherConfig(kept_batches=0)
    publisher.close()
    publisher.close()
    with pytest.raises(InstanceClosed):
        publisher.publish([AllBlocksCleared()])


def test_a_taken_name_and_a_bad_endpoint_are_refused(
    publisher: KVEventPublisher, subscriber: KVEventSubscriber
) -> None:
    link(subscriber, publisher)
    with pytest.raises(ConfigError, match="named 'a' exists"):
        subscriber.connect("a", publisher.endpoint)
    with pytest.raises(ConfigError, match="cannot subscribe"):
        subscriber.connect("b", "nonsense://x")
    assert set(subscriber._index.status()) == {"a"}


def test_a_recorded_index_tells_all_it_does(publisher: KVEventPublisher, subscriber: KVEventSubscriber) -> None:
    recorded = RecordedIndex(RadixIndex(max_bytes="512 KiB"), publisher)
    index = link(subscriber, publisher)
    identity = Identity(model="m", salt=b"secret")
    ns = recorded.namespace(identity)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 1000, 256, dtype=np.int32) for _ in range(200)]
    for i in range(600):  # the cap evicts, inserts share and extend prefixes
        prompt = np.concatenate([prompts[i % 7][: i % 15 * 16], prompts[i % 200]])
        first = i * 100
        recorded.insert(prompt, range(first, first + len(prompt) // 16), ns if i % 3 else 0)
    recorded.evict(50)
    recorded.delete(prompts[199])
    held = recorded._index.stats()
    assert publisher.num_held == held.num_blocks > 0
    until(subscriber, lambda: index.status()["a"].num_blocks == held.num_blocks)
    for prompt in prompts:
        local = [recorded.match(prompt, n, touch=False).num_tokens for n in (0, ns)]
        salts = [None, identity.digest.hex()]
        assert local == [index.match(prompt, cache_salt=salt).get("a", 0) for salt in salts]
    assert len(recorded.clear()) == held.num_blocks
    until(subscriber, lambda: index.status()["a"].num_blocks == 0)
    assert index.status()["a"].state is FeedState.LIVE
