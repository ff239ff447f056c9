"""What is sent and what comes of it: Shipment in, Transfer at the sender, Arrival at the receiver."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from poolweave.errors import ConfigError, PoolweaveError, TransferTimeout
from poolweave.holding import Holding
from poolweave.transfer.messages import MAX_BLOCKS, MAX_TAG, Confirm
from poolweave.types import Int32Array, Tier, UInt64Array, require_timeout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks set aside at `peer` for one transfer (`dst=`); they go back there when the lease ends unused."""

    peer: str
    epoch: int
    number: int
    num_blocks: int


def require_bytes(value: Any, name: str) -> None:
    """Raises TypeError, so that a str that equals no tag is not waited for."""
    if not isinstance(value, bytes):
        raise TypeError(f"{name} is bytes, got {type(value).__name__}: {value!r}")


class Shipment(msgspec.Struct, kw_only=True, eq=False):
    """Sealed blocks to send, in token order, the last one perhaps partly filled.

    With `growing` they may still be computed: Transfer.ready() tells what is sealed, and that is pulled at once.
    `tag` is what the receiver asks for; b"" means that nobody will (useful with `insert`). `tokens` lets the receiver
    leave out what it has. `tenant`: the digest of whose quota pays there; b"" where that is not known. `on_demand` are
    the tiers the receiver may allocate in, None with `dst`. `private`: the copy is the receiver's alone. The arrays
    are copied, so the caller may use its own again at once. Raises TypeError for a tag, identity or tenant that is not
    bytes, ConfigError for numbers that do not fit each other. A value, though not frozen: that would double the cost of
    making one, which each offer pays.
    """

    blocks: UInt64Array
    num_tokens: int
    tag: bytes = b""
    tokens: Int32Array | None = None
    identity: bytes = bytes(16)
    tenant: bytes = b""
    insert: bool = False
    private: bool = False
    on_demand: Tier | None = Tier.HBM
    dst: Reservation | None = None
    lease_s: float | None = None  # None: the engine's
    growing: bool = False

    def __post_init__(self) -> None:
        self._own()
        count = len(self.blocks)
        if count > MAX_BLOCKS:
            raise ConfigError(f"{count} blocks in one transfer, at most {MAX_BLOCKS}", setting="blocks", value=count)
        if not 0 <= self.num_tokens < 2**31:
            raise ConfigError(f"{self.num_tokens} tokens", setting="num_tokens", value=self.num_tokens, limit=2**31 - 1)
        if len(self.tag) > MAX_TAG:
            raise ConfigError(f"a tag has at most {MAX_TAG} bytes, got {len(self.tag)}", setting="tag")
        if len(self.identity) != 16 or len(self.tenant) not in (0, 16):
            raise ConfigError(
                f"an identity digest has 16 bytes and a tenant's 16 or none, got {len(self.identity)} and "
                f"{len(self.tenant)}",
                setting="identity",
            )
        if self.tokens is not None and len(self.tokens) != self.num_tokens:
            raise ConfigError(f"{len(self.tokens)} tokens where num_tokens is {self.num_tokens}", setting="tokens")
        if self.insert and self.tokens is None:
            raise ConfigError("insert needs the tokens to index by", setting="tokens")
        if (self.dst is None) == (self.on_demand is None):
            raise ConfigError("give either on_demand tiers or dst, not both or neither", setting="on_demand")
        if self.on_demand is not None and self.on_demand._value_ == 0:
            raise ConfigError("on_demand names no tier; use Tier.HBM, Tier.DRAM or both", setting="on_demand", value=0)
        if self.lease_s is not None and not 0 < self.lease_s < 1e6:
            raise ConfigError(f"a lease of {self.lease_s} s is no lease", setting="lease_s", value=self.lease_s)

    def _own(self) -> None:
        """Make the fields what crosses the wire, shared with nobody: an offer may wait after offer() returned."""
        require_bytes(self.tag, "tag")
        require_bytes(self.identity, "identity")
        require_bytes(self.tenant, "tenant")
        self.blocks = np.array(self.blocks, np.uint64)
        self.num_tokens = operator.index(self.num_tokens)
        if self.tokens is not None:
            self.tokens = np.array(self.tokens, np.int32)


class TransferReport(msgspec.Struct, frozen=True):
    """How a transfer went: of `num_blocks`, `pulled_blocks` moved in `calls` copies or requests, the rest was there.

    `early_nbytes` of a growing one were there before its last stretch was ready. `pull_s` is what the receiver spent on
    moving and checking, `steps` in how many goes.
    """

    num_blocks: int
    pulled_blocks: int
    nbytes: int
    calls: int
    seconds: float
    early_nbytes: int = 0
    pull_s: float = 0.0
    steps: int = 1


class Carrier(Protocol):
    """Who carries an offer, as its Transfer calls it: with the carrier's own record of it."""

    def cancel(self, offer: Any) -> bool: ...

    def ready(self, offer: Any, layers: int | None, num_blocks: int | None) -> None: ...

    def wait(self, offer: Any, longest_s: float) -> bool:
        """Wait for word of its peer on the calling thread. False when that is the engine's again."""
        ...


class Transfer:
    """An offer under way. Thread-safe; also awaitable. The blocks stay lent until it is done."""

    def __init__(self, peer: str, tag: bytes, num_blocks: int) -> None:
        self.peer = peer
        self.tag = tag
        self.num_blocks = num_blocks
        self._carried: tuple[Carrier, Any] | None = None  # until it is done: the offer's record leads back here
        self._started = time.perf_counter()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._mutex = threading.Lock()
        self._done = False
        self._report: TransferReport | None = None
        self._error: PoolweaveError | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._progress = 0.0

    def result(self, timeout: float | None = None) -> TransferReport:
        """Waits for the end. Raises what the transfer failed with, or TransferTimeout after `timeout` seconds.

        A timeout here leaves the transfer going: cancel() ends it.
        """
        require_timeout(timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (carried := self._carried) is not None:
            if not carried[0].wait(carried[1], until - time.monotonic()):
                break
            # what came was another's, or a word of progress
        left = until - time.monotonic()
        if not self._gate.acquire(timeout=-1 if left == math.inf else max(0.0, left)):
            raise TransferTimeout(
                f"transfer of {self.num_blocks} blocks to {self.peer} not done in {timeout} s; wait longer or cancel",
                peer=self.peer,
                reason="timeout",
            )
        self._gate.release()
        if self._error is not None:
            raise copy.copy(self._error)  # each caller gets its own traceback, and none keeps this object alive
        assert self._report is not None
        return self._report

    def exception(self) -> PoolweaveError | None:
        """What it failed with; None while it is going on or when it went well."""
        return self._error

    def done(self) -> bool:
        return self._done

    def cancel(self) -> bool:
        """End it now: the blocks are given back before this returns. False when it was done already.

        The receiver drops what it has; if it had claimed the arrival by then, its copy stays valid.
        """
        carried = self._carried
        return carried is not None and carried[0].cancel(carried[1])

    def ready(self, layers: int | None = None, num_blocks: int | None = None) -> None:
        """Of a growing transfer: the first `layers` layers of the first `num_blocks` blocks are sealed (None: all).

        The receiver pulls them at once. May be said again with more, layer by layer, block by block; the transfer ends
        when all is ready and there. Does not wait. Nothing happens once it is done. Raises ConfigError, NotSealed.
        """
        carried = self._carried
        if carried is not None:
            carried[0].ready(carried[1], layers, num_blocks)

    @property
    def progress(self) -> float:
        """Share of the blocks that have arrived, as far as the receiver has told: 0 to 1."""
        return self._progress

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls `callback(self)` once done: at once if it is, else from an engine thread, so it must be short.

        What it raises there is logged and goes no further.
        """
        with self._mutex:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, TransferReport]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: Transfer) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody awaits it any more
                loop.call_soon_threadsafe(settle)

        self.add_done_callback(wake)
        yield from future.__await__()
        return self.result(0)

    def _advance(self, share: float) -> None:
        self._progress = max(self._progress, share)

    def _succeed(self, end: Confirm, steps: int) -> None:
        seconds = time.perf_counter() - self._started
        report = TransferReport(
            self.num_blocks, end.pulled_blocks, end.nbytes, end.calls, seconds, end.early_nbytes, end.pull_s, steps
        )
        self._finish(report, None)

    def _fail(self, error: PoolweaveError) -> None:
        self._finish(None, error)

    def _finish(self, report: TransferReport | None, error: PoolweaveError | None) -> None:
        with self._mutex:
            if self._done:
                return
            self._report, self._error, self._done, self._carried = report, error, True, None
            if report is not None:
                self._progress = 1.0
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  # the caller's code on the engine's thread: other transfers go on
                _log.exception("a callback of the transfer %r to %s failed", self.tag, self.peer)


@dataclass(slots=True, eq=False)
class Arrival(Holding[UInt64Array]):
    """Blocks that arrived, matched and pulled, in token order, with one reference each."""

    peer: str
    tag: bytes
    blocks: UInt64Array
    num_tokens: int
    tokens: Int32Array | None
    pulled_blocks: int
    _release: Callable[[UInt64Array], None] = field(repr=False)
    _release_later: Callable[[UInt64Array], None] | None = field(default=None, repr=False)  # waits for no lock
    _open: bool = field(default=True, init=False, repr=False)
    _kind: ClassVar[str] = "arrival"

    def _drop(self) -> None:
        self._release(self.blocks)

    def _forgotten(self) -> str:
        if self._release_later is None:
            return "they stay pinned"
        self._release_later(self.blocks)
        return f"{self.peer} sent them, and they are released now"


def no_blocks() -> UInt64Array:
    return np.empty(0, np.uint64)
