"""Publishes KV events over ZeroMQ, with replay and snapshots. Source: the protocol of vLLM 0.32 and SGLang 0.5.23.

PUB sends [topic, sequence, batch]. A ROUTER answers [b"", sequence] with [b"", topic, sequence, batch] for every kept
batch from that sequence on and closes with END_OF_REPLAY. When batches that are asked for are no longer kept, a
snapshot is published to all (a batch that clears and then stores what is held), and the replay starts with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from poolweave.errors import AddressInUse, ConfigError, InstanceClosed
from poolweave.index._native import NativeEventIndex
from poolweave.index.events.wire import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockStored,
    Event,
    encode_batch,
    encode_sequence,
)

_LOG = logging.getLogger(__name__)
_POLL_MS = 100
_MAX_BLOCKS = 1 << 24
_ALL_MEDIA = 7
_MEDIA = ("GPU", "CPU", "STORAGE")  # by the native index's numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """Where to publish and how much to keep. Port 0 takes a free one; see `KVEventPublisher.endpoint`."""

    endpoint: str = "tcp://127.0.0.1:0"
    replay_endpoint: str | None = "tcp://127.0.0.1:0"
    topic: str = ""
    rank: int | None = None
    kept_batches: int = 10_000
    kept_bytes: int = 64 << 20
    high_water_mark: int = 100_000  # batches queued for a slow subscriber before it loses some

    def __post_init__(self) -> None:
        for setting in ("kept_batches", "kept_bytes", "high_water_mark"):
            if getattr(self, setting) < 1:
                value = getattr(self, setting)
                raise ConfigError(f"{setting} must be at least 1, got {value}", setting=setting, value=value)


class KVEventPublisher:
    """Thread-safe. One thread of its own answers replays; `close` ends it."""

    def __init__(
        self, block_tokens: int = 16, config: PublisherConfig | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises AddressInUse when an endpoint is taken."""
        self._config = config or PublisherConfig()
        self._clock = clock
        self._topic = self._config.topic.encode()
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._sequence = 0
        self._snapshot = -1  # the last one's sequence
        self._held = NativeEventIndex(block_tokens)
        self._slot = self._held.add_source(False, _MAX_BLOCKS, _ALL_MEDIA)
        self._closed = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(self._config.high_water_mark)
        self._thread: threading.Thread | None = None
        self.replay_endpoint: str | None = None
        try:
            self.endpoint = _bind(self._pub, self._config.endpoint, "endpoint")
            if self._config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                self.replay_endpoint = _bind(router, self._config.replay_endpoint, "replay_endpoint")
                self._thread = threading.Thread(target=self._serve, args=(router,), name="kv-event-replay", daemon=True)
                self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[Event]) -> int:
        """Send one batch; returns its sequence. Never waits. Raises InstanceClosed after `close`."""
        if self._closed.is_set():
            raise InstanceClosed("this publisher of KV events is closed")
        with self._lock:
            return self._send(events)

    def _send(self, events: Sequence[Event]) -> int:
        payload = encode_batch(self._clock(), events, self._config.rank)
        sequence = self._sequence
        self._held.apply(self._slot, payload)
        self._pub.send_multipart((self._topic, encode_sequence(sequence), payload))
        self._sequence += 1
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._config.kept_batches or self._kept_bytes > self._config.kept_bytes:
            if len(self._kept) == 1:
                break  # the newest is always kept, however long
            self._kept_bytes -= len(self._kept.popleft()[1])
        return sequence

    @property
    def block_tokens(self) -> int:
        return self._held.block_tokens

    @property
    def next_sequence(self) -> int:
        """The number that the next batch will have: how many were published."""
        return self._sequence

    @property
    def num_held(self) -> int:
        """Blocks that subscribers should know by now."""
        return self._held.num_held(self._slot)

    def close(self) -> None:
        """Idempotent. Batches not yet sent to slow subscribers are dropped."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._closed.is_set():
            if not router.poll(_POLL_MS):
                continue
            frames = router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _LOG.warning("a replay request of %d frames was ignored", len(frames))
                continue
            start = int.from_bytes(frames[2], "big")
            for sequence, payload in self._batches_from(start):
                router.send_multipart((frames[0], b"", self._topic, encode_sequence(sequence), payload))
            router.send_multipart((frames[0], b"", b"", END_OF_REPLAY, b""))
        router.close(linger=0)

    def _batches_from(self, start: int) -> list[tuple[int, bytes]]:
        with self._lock:
            if self._kept and start < self._kept[0][0]:
                if self._snapshot < self._kept[0][0]:
                    self._snapshot = self._send(self._inventory())
                start = self._snapshot
            return [(sequence, payload) for sequence, payload in self._kept if sequence >= start]

    def _inventory(self) -> list[Event]:
        """All that is held, once for each medium."""
        events: list[Event] = [AllBlocksCleared()]
        for parent, media, scope, hashes, tokens in self._held.inventory(self._slot):
            lora_name, cache_salt = _scope_parts(scope)
            for medium in (name for bit, name in enumerate(_MEDIA) if media >> bit & 1):
                events.append(
                    BlockStored(
                        block_hashes=hashes.tolist(),
                        parent_block_hash=parent,
                        token_ids=tokens.tolist(),
                        block_size=self._held.block_tokens,
                        lora_id=None,
                        medium=medium,
                        lora_name=lora_name,
                        cache_salt=cache_salt,
                    )
                )
        return events


def _scope_parts(scope: bytes) -> tuple[str | None, str | None]:
    """The adapter and salt of a native scope: each "-" or its length, ":" and text."""
    parts: list[str | None] = []
    while scope:
        if scope[:1] == b"-":
            parts.append(None)
            scope = scope[1:]
            continue
        length, _, rest = scope.partition(b":")
        parts.append(rest[: int(length)].decode())
        scope = rest[int(length) :]
    adapter, salt = parts or [None, None]
    return adapter, salt


def _bind(socket: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            message = f"{setting}={endpoint!r} is in use; choose another port, or 0 for a free one"
            raise AddressInUse(message, address=endpoint, setting=setting) from error
        raise ConfigError(f"cannot bind {setting}={endpoint!r}: {error}", setting=setting, value=endpoint) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
