"""The instances we send to: their addresses, and the one connection to each, dialled when first needed."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from poolweave.errors import PeerLost, PoolweaveError, TransferFailed, UnknownPeer
from poolweave.transfer.addresses import Address, begin_dial
from poolweave.transfer.keys import greeting_key, session_keys
from poolweave.transfer.link import Link, is_temporary
from poolweave.transfer.loop import Loop
from poolweave.transfer.messages import REPLIES, Hello, Refused, Welcome, decode, encode, revive
from poolweave.transfer.resharding import Route, Shard, route_between
from poolweave.transfer.tls import tls_failure
from poolweave.transfer.transport import Limits

_RETRY_S = 0.01
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether a peer is there: the `epoch` of its life while a connection to it stands, else 0; and how many dials of
    it have failed so far, so that who sees the number rise knows that it could not be reached.
    """

    epoch: int
    failed_dials: int


@dataclass(slots=True, eq=False)
class Peer:
    """Frames may be sent over `link` once `ready`. `epoch` is that of its present life, as far as we know."""

    name: str
    addresses: tuple[Address, ...]  # in the order in which they are tried
    requested: str
    link: Link | None = None
    ready: bool = False
    epoch: int = 0
    route: Route | None = None  # what of our shard the peer's shard needs; None: nothing
    scheme: str = ""  # of the connection made last
    tried: int = 0  # addresses of this round of dialling
    deadline: float = math.inf  # of the dial under way
    retry_at: float = math.inf
    give_up_at: float = math.inf  # on an address that takes no more connections for now
    nonce: bytes = field(default=b"", repr=False)
    failed_dials: int = 0

    def assist(self, look_s: float, sleep_s: float, over: Callable[[], bool]) -> bool:
        """The calling thread waits for an answer of this peer: it may read it itself. See Link.assist()."""
        link = self.link  # the loop's thread may take it away meanwhile
        return link is not None and self.ready and link.assist(look_s, sleep_s, over)


@dataclass(frozen=True, slots=True)
class DialHooks:
    """What a dialer asks of and tells its owner; all on the loop's thread.

    `hello(peer, link)` is what to open with. `on_failed`: no address answered, or the peer refused. `on_lost`: the
    connection was ready before.
    """

    hello: Callable[[Peer, Link], tuple[Hello, Sequence[int]]]
    on_ready: Callable[[Peer], None]
    on_frame: Callable[[Peer, bytes], None]
    on_failed: Callable[[Peer, PoolweaveError], None]
    on_lost: Callable[[Peer, PoolweaveError], None]


class Dialer:
    """Makes and greets connections. All calls on the loop's thread, or when it has stopped."""

    def __init__(self, loop: Loop, limits: Limits, shard: Shard, hooks: DialHooks) -> None:
        self._loop = loop
        self._shard = shard
        self._secret = limits.secret
        self._tls = limits.tls
        self._timeout_s = limits.connect_timeout_s
        self._hooks = hooks
        self._busy: set[Peer] = set()  # dials under way

    def dial(self, peer: Peer) -> None:
        """Start with the first address, unless a dial is under way or done."""
        if peer.link is None and peer not in self._busy:
            peer.tried = 0
            peer.give_up_at = time.monotonic() + self._timeout_s
            self._busy.add(peer)
            self._try_next(peer, self._failure(peer, "no address"))

    def hang_up(self, peer: Peer) -> None:
        """Idempotent; no hook is called."""
        self._drop(peer)
        self._busy.discard(peer)

    def tick(self, now: float) -> float:
        """Retries and deadlines of dials under way; returns when it wants to be called again."""
        for peer in list(self._busy):
            if now >= peer.retry_at:
                peer.retry_at = math.inf
                self._try_next(peer, self._failure(peer, "it takes no connection"))
            elif now >= peer.deadline:
                self._drop(peer)
                self._try_next(peer, self._failure(peer, f"no greeting within {self._timeout_s} s"))
        return min((min(peer.retry_at, peer.deadline) for peer in self._busy), default=math.inf)

    def _try_next(self, peer: Peer, error: PoolweaveError) -> None:
        while peer.tried < len(peer.addresses):
            address = peer.addresses[peer.tried]
            peer.tried += 1
            try:
                self._begin(peer, address)
                return
            except OSError as problem:
                now = time.monotonic()
                if is_temporary(problem) and now < peer.give_up_at:  # its backlog is full, say: it lives, so ask again
                    peer.tried -= 1
                    peer.retry_at = now + _RETRY_S
                    self._loop.wake_by(peer.retry_at)
                    return
                peer.give_up_at = now + self._timeout_s  # on the next address
                error = self._failure(peer, f"{address}: {problem.strerror}")
            except PoolweaveError as problem:
                error = problem
        self._fail(peer, error)

    def _begin(self, peer: Peer, address: Address) -> None:
        sock = begin_dial(address)
        if self._tls is not None and not address.is_local:
            sock = self._tls.dial(sock, address)
        key = greeting_key(self._secret) if self._secret is not None else None
        link = Link(self._loop, sock, key, self._on_frame, self._on_lost)
        link.owner = peer
        peer.link, peer.ready, peer.scheme = link, False, address.scheme
        peer.nonce = secrets.token_bytes(16)
        peer.deadline = time.monotonic() + self._timeout_s
        self._loop.wake_by(peer.deadline)
        try:
            link.start(connecting=True)
            hello, fds = self._hooks.hello(peer, link)
            link.send(encode(hello), fds)
        except PoolweaveError:
            self._drop(peer)
            raise

    def _on_frame(self, link: Link, payload: bytes, _: list[int]) -> None:
        peer = link.owner
        assert isinstance(peer, Peer)
        if peer.ready:
            self._hooks.on_frame(peer, payload)
            return
        reply = decode(REPLIES, payload)
        if isinstance(reply, Refused):
            self._fail(peer, revive(reply.error, reply.message, reply.numbers, peer.name))
        elif reply.instance != peer.name:
            reached = peer.addresses[peer.tried - 1]
            self._fail(peer, UnknownPeer(f"{reached} is {reply.instance}, not {peer.name}", peer=peer.name))
        else:
            self._welcome(peer, link, reply)

    def _welcome(self, peer: Peer, link: Link, reply: Welcome) -> None:
        peer.route = route_between(self._shard, self._shard.seated(reply.seat))
        keys = session_keys(self._secret, peer.nonce, reply.nonce) if self._secret is not None else (None, None)
        link.rekey(*keys)
        peer.epoch, peer.deadline, peer.ready = reply.epoch, math.inf, True
        self._busy.discard(peer)
        if peer.tried > 1:
            _log.warning("%s is reached over %s: its other addresses do not answer", peer.name, peer.scheme)
        self._hooks.on_ready(peer)

    def _on_lost(self, link: Link, error: PoolweaveError) -> None:
        peer = link.owner
        assert isinstance(peer, Peer)
        if peer.link is not link:
            return
        was_ready, refusal = peer.ready, tls_failure(link.sock)
        self._drop(peer)
        if was_ready:
            self._hooks.on_lost(peer, PeerLost(f"{peer.name} is gone: {error}", peer=peer.name, reason="lost"))
        elif refusal is not None:
            reached = peer.addresses[peer.tried - 1]
            message = f"{peer.name} cannot be reached at {reached}: {refusal}"
            self._try_next(peer, TransferFailed(message, peer=peer.name, reason="tls"))
        elif type(error) is TransferFailed:
            plain = self._tls is None and not peer.addresses[peer.tried - 1].is_local
            hint = "; does it expect TLS? set tls on all instances, or on none" if plain else ""
            self._try_next(peer, self._failure(peer, f"{error}{hint}"))
        else:
            self._fail(peer, error)

    def _fail(self, peer: Peer, error: PoolweaveError) -> None:
        self.hang_up(peer)
        peer.failed_dials += 1
        if "peer" in error.fields:
            error.__dict__["peer"] = peer.name
        self._hooks.on_failed(peer, error)

    def _drop(self, peer: Peer) -> None:
        link, peer.link, peer.ready = peer.link, None, False
        peer.deadline = peer.retry_at = math.inf
        if link is not None:
            link.close()

    def _failure(self, peer: Peer, problem: str) -> TransferFailed:
        return TransferFailed(
            f"{peer.name} cannot be reached ({problem}); is it up, and are its addresses right?",
            peer=peer.name,
            reason="connect",
        )
