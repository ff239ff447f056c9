"""A pool that publishes its KV events: who listens knows what it holds and in which tier, whatever gets lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from poolweave.errors import OutOfBlocks
from poolweave.index import Identity
from poolweave.index.events import EventFeed, EventIndex, FeedState, KVEventSubscriber, PublisherConfig
from poolweave.mempool import MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float16")
BLOCKS = 24  # of each tier
PROMPTS = [
    np.random.default_rng(i % 4).integers(0, 99, 16 * (2 + i), dtype=np.int32) for i in range(8)
]  # two share a head
OTHER = Identity(model="other", salt=b"tenant")


def pool(config: PublisherConfig | None = None) -> MemPool:
    size = BLOCKS * LAYOUT.block_bytes
    settings = PoolConfig(page_bytes=4096, events=config or PublisherConfig())
    return MemPool(LAYOUT, hbm=size, dram=size, config=settings)


class Fleet:
    """Listens to one pool, once for all tiers and once for HBM only."""

    def __init__(self, watched: MemPool) -> None:
        self.subscribers = []
        assert watched.events is not None
        for credited in (Tier.HBM | Tier.DRAM, Tier.HBM):
            subscriber = KVEventSubscriber(EventIndex(LAYOUT.block_tokens))
            subscriber.connect("pool", watched.events.endpoint, watched.events.replay_endpoint, credited=credited)
            self.subscribers.append(subscriber)

    def indexes(self) -> list[EventIndex]:
        return [subscriber._index for subscriber in self.subscribers]

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            for subscriber in self.subscribers:
                subscriber.poll(0.01)
            assert time.monotonic() < deadline, "it did not come to pass"

    def agree(self, watched: MemPool) -> None:
        """Wait until all that `watched` has published is heard, then compare."""
        other = watched.namespace(OTHER)
        self.until(lambda: all(self._heard(index, watched) for index in self.indexes()))
        for prompt in PROMPTS:
            for ns, salt in ((None, None), (other, OTHER.digest.hex())):
                with watched.match(prompt, ns) as hit:
                    near = next((i for i, tier in enumerate(hit.tiers) if tier != Tier.HBM.value), len(hit.blocks))
                    truth = [hit.num_tokens, 16 * near]
                heard = [index.match(prompt, cache_salt=salt).get("pool", 0) for index in self.indexes()]
                assert heard == truth
        for index in self.indexes():
            index.check()

    def _heard(self, index: EventIndex, watched: MemPool) -> bool:
        status = index.status()["pool"]
        assert watched.events is not None
        return status.state is FeedState.LIVE and status.next_sequence == watched.events.next_sequence

    def close(self) -> None:
        for subscriber in self.subscribers:
            subscriber.close()


@pytest.fixture
def watched() -> Iterator[MemPool]:
    with pool() as made:
        yield made


@pytest.fixture
def fleet(watched: MemPool) -> Iterator[Fleet]:
    made = Fleet(watched)
    yield made
    made.close()


def store(target: MemPool, prompt: np.ndarray, ns: int | None = None, tier: Tier = Tier.HBM) -> None:
    blocks = target.alloc(len(prompt) // 16, tier)
    target.seal(blocks)
    target.insert(prompt, blocks, ns)
    target.free(blocks)


def work(target: MemPool, draw: random.Random, steps: int) -> None:
    """Stores, deletions, swaps both ways, and evictions by need."""
    other = target.namespace(OTHER)
    for _ in range(steps):
        prompt, ns = draw.choice(PROMPTS), draw.choice([None, other])
        step = draw.randrange(8)
        if step < 4:
            store(target, prompt[: 16 * draw.randrange(1, 10)], ns, draw.choice([Tier.HBM, Tier.DRAM]))
        elif step == 4:
            target.delete(prompt, ns)
        elif step == 5:
            target.swap_out(draw.randrange(6))
        else:
            with target.match(prompt, ns) as hit:
                try:
                    target.swap_in(hit.blocks)
                except OutOfBlocks:
                    continue


def test_who_listens_knows_what_the_pool_holds(watched: MemPool, fleet: Fleet) -> None:
    draw = random.Random(1)
    for _ in range(12):
        work(watched, draw, 25)
        fleet.agree(watched)
        watched.check()
    figures = watched.stats().events
    assert all(figures[name] > 0 for name in ("evicted", "deleted", "swapped_out", "swapped_in"))  # it happened, too


def test_lost_batches_are_made_good(watched: MemPool, fleet: Fleet) -> None:
    class Lossy:
        """Stands before a feed and loses every third batch."""

        def __init__(self, feed: EventFeed) -> None:
            self.feed, self.count = feed, 0

        def receive(self, sequence: int, payload: bytes) -> int | None:
            self.count += 1
            return None if self.count % 3 == 0 else self.feed.receive(sequence, payload)

        def __getattr__(self, name: str) -> object:
            return getattr(self.feed, name)

    store(watched, PROMPTS[0])
    fleet.agree(watched)
    feeds = [subscriber._links["pool"].feed for subscriber in fleet.subscribers]
    for subscriber, feed in zip(fleet.subscribers, feeds, strict=True):
        subscriber._links["pool"].feed = Lossy(feed)  # type: ignore[assignment]
    work(watched, random.Random(2), 150)
    fleet.until(lambda: all(feed.gaps > 0 for feed in feeds))
    for subscriber, feed in zip(fleet.subscribers, feeds, strict=True):
        subscriber._links["pool"].feed = feed
    work(watched, random.Random(3), 20)
    fleet.agree(watched)


def test_a_pool_that_starts_again_is_believed_anew(watched: MemPool, fleet: Fleet) -> None:
    work(watched, random.Random(4), 100)
    fleet.agree(watched)
    assert watched.events is not None
    config = PublisherConfig(endpoint=watched.events.endpoint, replay_endpoint=watched.events.replay_endpoint)
    watched.close()
    fleet.until(lambda: all(index.status()["pool"].state is FeedState.DEGRADED for index in fleet.indexes()))
    assert all(index.match(prompt) == {} for index in fleet.indexes() for prompt in PROMPTS)
    with pool(config) as again:
        work(again, random.Random(5), 100)
        fleet.agree(again)


def test_a_snapshot_tells_a_late_listener_of_both_tiers() -> None:
    with pool(PublisherConfig(kept_batches=2)) as watched:
        work(watched, random.Random(6), 150)
        late = Fleet(watched)
        try:
            late.until(lambda: all(index.status()["pool"].batches > 0 for index in late.indexes()))
            late.agree(watched)
        finally:
            late.close()


def test_a_pool_without_events_has_no_publisher() -> None:
    with MemPool(LAYOUT, hbm=BLOCKS * LAYOUT.block_bytes, config=PoolConfig(page_bytes=4096)) as quiet:
        assert quiet.events is None
