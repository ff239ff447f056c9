"""Announcer: tells what a pool's index holds as KV events. Imported only where a pool publishes: it needs ZeroMQ."""

from __future__ import annotations

from poolweave.index.events import EventRecorder, KVEventPublisher
from poolweave.mempool.config import PoolConfig
from poolweave.transfer import KVLayout


def announcer(layout: KVLayout, config: PoolConfig) -> EventRecorder:
    """Its publisher is open. Blocks of the pool's own identity carry no salt.

    Raises AddressInUse and ConfigError for the endpoints.
    """
    publisher = KVEventPublisher(layout.block_tokens, config.events)
    return EventRecorder(publisher, config.identity(layout).digest)
