"""Traffic: KV between this engine's pool and others: a pool process, and the peers of a prefill/decode pair.

Requests say what they want by vLLM's `kv_transfer_params`: {"send_to": peer} hands the prompt's KV over and makes the
answer say {"from": this engine, "epoch": of its life, "tag": ...}; a request with these takes that KV, for which it
waits no longer than that life lasts, and its own goes back at its end.
Source: MemServe §5.1 (PD-Caching-3).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from poolweave.errors import ConfigError, InstanceClosed, PoolweaveError
from poolweave.integrations.vllm.early_sender import EarlySender
from poolweave.integrations.vllm.incoming import Incoming
from poolweave.integrations.vllm.losses import Losses
from poolweave.integrations.vllm.peer_life import PeerLife
from poolweave.integrations.vllm.pool_client import PoolClient
from poolweave.integrations.vllm.track import Track, Write
from poolweave.mempool import Blocks, MemPool, TierWindow
from poolweave.transfer import Transfer
from poolweave.types import Int32Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes to a peer; without a tag only its index keeps it."""

    peer: str
    blocks: Blocks
    tokens: Int32Array
    ns: int
    tag: bytes = b""


class Traffic:
    """`role` is vLLM's kv_role. `counters` counts requests: arrived, missed, shipped, ship_failed; and early_blocks,
    which peers took while the prompt was computed, early_bytes of them before all of it was.
    """

    def __init__(
        self, pool: MemPool, role: str, peers: Mapping[str, str], keeper: PoolClient | None, wait_s: float
    ) -> None:  # fmt: skip
        """Raises ConfigError for a peer's address that cannot be."""
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._pool = pool
        self._role = role
        self._peers = dict(peers)
        self._keeper = keeper
        self._wait_s = wait_s
        self._early: EarlySender | None = None
        self._shipper = ThreadPoolExecutor(1, thread_name_prefix="poolweave-ship")
        self._losses = Losses(pool, self._send_nothing, wait_s)
        self._incoming: dict[str, Incoming] = {}
        self._tags: dict[str, tuple[str, bytes]] = {}  # of requests that ended: where their KV goes
        for peer, address in self._peers.items():
            pool.connect(peer, address)

    @property
    def waits(self) -> bool:
        """Whether KV is on its way for any request."""
        return bool(self._incoming)

    def settled(self, track: Track, prefix: Int32Array, local: int) -> bool:
        """Whether all that will come for it has come; the first call asks for it. `prefix`: whole blocks of tokens."""
        name = track.request.request_id
        if not track.asked:
            track.asked = True
            track.receiver = self._receiver(track.request)
            incoming = self._expect(track, prefix, local)
            if incoming is not None:
                self._incoming[name] = incoming
        pending = self._incoming.get(name)
        return pending is None or pending.over()

    def claimed(self, track: Track) -> None:
        """What came for it has been matched and is pinned there."""
        incoming = self._incoming.pop(track.request.request_id, None)
        if incoming is not None:
            self._count("arrived" if incoming.arrived else "missed")
            incoming.close()

    def abandoned(self, track: Track) -> None:
        """It ended: nothing that is still on its way is wanted."""
        incoming = self._incoming.pop(track.request.request_id, None)
        if incoming is not None:
            incoming.close()

    def refuse(self, request: Any) -> None:
        """It ended before it was looked at: what was sent for it is not wanted."""
        tag = self._tag(request)
        if tag is not None:
            self._pool.discard(tag)

    def announce(self, track: Track) -> dict[str, Any] | None:
        """For the answer of a request that ended well and whose KV goes to a peer: what the peer's request must say."""
        request = track.request
        peer = track.receiver
        if peer is None or request.status.name == "FINISHED_ABORTED":
            return None
        if request.num_prompt_tokens < self._pool.layout.block_tokens:
            return None
        tag = secrets.token_bytes(12)
        self._tags[request.request_id] = (peer, tag)
        return {"from": self._pool.instance, "epoch": f"{self._pool.epoch:x}", "tag": tag.hex()}

    def offer_early(self, track: Track, block_tokens: int) -> None:
        """Its prompt goes to its receiver while it is computed: what it holds, then what it has reserved."""
        if self._early is None:
            self._early = EarlySender(self._pool)
        blocks = track.held + track.reserved
        tokens = track.tokens()[: len(blocks) * block_tokens]
        transfer = self._early.begin(track, blocks, tokens)
        if transfer is not None:
            transfer.add_done_callback(self._went_early)

    def watch(self, step: int, writes: Sequence[Write]) -> TierWindow | None:
        """Where the workers of `step` are to write how far they are; None: nobody wants to know."""
        early = self._early
        if early is None or not any([early.writes(step, write) for write in writes]):
            return None
        return early.window

    def written(self, track: Track, first: int) -> None:
        """The step that wrote its blocks from `first` on is over; they are not sealed or freed yet."""
        if self._early is not None:
            self._early.settle(track, first)

    def good(self, track: Track) -> None:
        """All that it holds is sealed."""
        if self._early is not None:
            self._early.good(track)

    def drop_early(self, track: Track) -> None:
        """What it computes is not to be had. Idempotent."""
        if self._early is not None:
            self._early.drop(track)

    def ship(self, track: Track, block_tokens: int) -> None:
        """Its KV goes to the pool process, to the peer it was announced to, or back to where its prompt's came from."""
        peer, tag = self._tags.pop(track.request.request_id, (None, b""))
        blocks = track.held
        if not len(blocks):
            if peer is not None:
                self._send_nothing(peer, tag)
            return
        tokens = track.tokens()[: len(blocks) * block_tokens]
        early = self._early.take(track) if self._early is not None else None
        if peer is not None and early is not None:
            self._send_after(early, Parcel(peer, blocks, tokens, track.ns, tag))
        elif peer is not None:
            self._send(Parcel(peer, blocks, tokens, track.ns, tag))
        origin = self._sender(track.request)
        if origin is not None and self._role != "kv_producer":
            self._send(Parcel(origin, blocks, tokens, track.ns))
        if self._keeper is not None and self._keeper.peer is not None:
            self._send(Parcel(self._keeper.peer, blocks, tokens, track.ns))

    def close(self) -> None:
        """No more requests; the pool is closed next."""
        for incoming in self._incoming.values():
            incoming.close()
        self._incoming.clear()
        self._shipper.shutdown(cancel_futures=True)
        if self._early is not None:
            self._early.close()
        if self._keeper is not None:
            self._keeper.close()

    def _receiver(self, request: Any) -> str | None:
        named = _told(request).get("send_to")
        if named is None and self._role == "kv_producer" and len(self._peers) == 1:
            return next(iter(self._peers))
        if named is not None and (self._peer(named) is None or self._role == "kv_consumer"):
            logger.warning("a request's send_to=%r is none of peers=%s: its KV stays here", named, sorted(self._peers))
            return None
        return self._peer(named)

    def _sender(self, request: Any) -> str | None:
        """The peer whose KV it was promised."""
        return self._peer(_told(request).get("from"))

    def _peer(self, named: Any) -> str | None:
        """The peer of that name; None for whatever else a client sends."""
        return named if isinstance(named, str) and named in self._peers else None

    def _tag(self, request: Any) -> bytes | None:
        """Under which KV comes for it from a peer."""
        told = _told(request).get("tag")
        if told is None or self._role == "kv_producer":
            return None
        try:
            return bytes.fromhex(told)
        except (ValueError, TypeError):
            logger.warning("a request's tag %r is none: its prompt is computed here", told)
            return None

    def _expect(self, track: Track, prefix: Int32Array, local: int) -> Incoming | None:
        tag = self._tag(track.request)
        if tag is not None:
            return Incoming(self._pool, tag, self._wait_s, self._life(track.request))
        keeper = self._keeper
        if keeper is None or not keeper.present:
            return None
        with self._pool.match(prefix, track.ns) as hit:
            have = max(local, hit.num_tokens)
        if have >= len(prefix):
            return None
        tag = secrets.token_bytes(12)
        asked = keeper.ask(tag, prefix, have, self._pool.digest(track.ns))
        return Incoming(self._pool, tag, self._wait_s, asked.open, asked)

    def _life(self, request: Any) -> Callable[[], bool]:
        """Whether who promised the KV of `request` still lives. Of one who is no peer here nothing is known."""
        told, sender = _told(request), self._sender(request)
        if sender is None:
            return lambda: True
        try:
            epoch = int(told["epoch"], 16) if "epoch" in told else None
        except (ValueError, TypeError):
            logger.warning("a request's epoch %r is none: what it is promised is waited for", told["epoch"])
            epoch = None
        return PeerLife(self._pool, sender, epoch).goes_on

    def _send(self, parcel: Parcel) -> None:
        try:
            transfer = self._pool.transfer_with_insert(
                parcel.peer, parcel.blocks, parcel.tokens, parcel.ns, tag=parcel.tag
            )
        except PoolweaveError as error:
            self._lost(parcel.peer, error)
            return
        transfer.add_done_callback(self._sent)

    def _send_after(self, early: Transfer, parcel: Parcel) -> None:
        """Once `early` is there: the peer lacks only the rest then."""
        self._pool.retain(parcel.blocks)

        def send() -> None:
            self._send(parcel)
            with contextlib.suppress(InstanceClosed):
                self._pool.free(parcel.blocks)

        def done(_: Transfer) -> None:
            with contextlib.suppress(RuntimeError):  # closing, and the pool with it
                self._shipper.submit(send)

        early.add_done_callback(done)

    def _went_early(self, transfer: Transfer) -> None:
        if transfer.exception() is None:
            report = transfer.result(0)
            self._count("early_blocks", report.pulled_blocks)
            self._count("early_bytes", report.early_nbytes)

    def _send_nothing(self, peer: str, tag: bytes) -> None:
        """It was announced, and no block of it could be kept: who waits for it shall know."""
        try:
            self._pool.transfer(peer, Blocks.empty(), tag=tag, num_tokens=0)
        except PoolweaveError as error:
            self._lost(peer, error)

    def _sent(self, transfer: Transfer) -> None:
        error = transfer.exception()
        if error is None:
            self._count("shipped")
            return
        self._lost(transfer.peer, error)
        if transfer.tag:
            self._losses.add(transfer.peer, transfer.tag)

    def _count(self, what: str, more: int = 1) -> None:
        """On any thread."""
        with self._counting:
            self.counters[what] += more

    def _lost(self, peer: str, error: PoolweaveError) -> None:
        self._count("ship_failed")
        logger.warning("KV of %s did not reach %s, which will compute it: %s", self._pool.instance, peer, error)


def _told(request: Any) -> Mapping[str, Any]:
    """What the request's client said about its KV."""
    return getattr(request, "kv_transfer_params", None) or {}


def check_role(role: str | None, peers: Mapping[str, str], pool: str | None) -> str:
    """The kv_role. Raises ConfigError for one that has nobody to work with."""
    if role is None:
        raise ConfigError("kv_role is not set; say kv_both, kv_producer or kv_consumer", setting="kv_role")
    if role != "kv_both" and not peers and pool is None:
        raise ConfigError(
            f"kv_role={role!r} needs the other side: set peers (name: address) in kv_connector_extra_config",
            setting="peers",
        )
    return role
