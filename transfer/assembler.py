"""Pulls growing offers and those of other shards, and puts arrivals together of them.

    Offer -> announce, place, once -> Ready -> pull that stretch ... -> all parts whole -> commit, settle, Confirm each
Whatever fails in between ends all parts: the placement is released and each sender hears Failed.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from poolweave.errors import (
    ConfigError,
    InstanceClosed,
    PeerLost,
    PoolweaveError,
    ProtocolError,
    TransferFailed,
    TransferTimeout,
)
from poolweave.transfer import messages
from poolweave.transfer.arrivals import ArrivalBook
from poolweave.transfer.assembly import Assembly, Feed
from poolweave.transfer.growth import Coverage
from poolweave.transfer.messages import describe
from poolweave.transfer.pulls import Session
from poolweave.transfer.steps import pull_step, step_bytes
from poolweave.transfer.store import Placement
from poolweave.transfer.transport import Home

_INLINE_BYTES = 1 << 20  # as in Receiver
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyHooks:
    """What an Assembler needs of its Receiver.

    `finish` commits and hands over; False when the sender took it back, with nothing left. `submit` runs something on
    a worker; False once shut down.
    """

    place: Callable[[Session, messages.Offer], Placement | None]
    finish: Callable[[Assembly], bool]
    release: Callable[[Assembly], None]
    submit: Callable[[Callable[[], None]], bool]
    count_failure: Callable[[], None]


class Assembler:
    """take(), take_ready(), cancel(), lose() and tick() run on the loop's thread; pulls there or on workers."""

    def __init__(
        self, home: Home, arrivals: ArrivalBook, hooks: AssemblyHooks, wake_by: Callable[[float], None]
    ) -> None:
        self._home = home
        self._arrivals = arrivals
        self._hooks = hooks
        self._wake_by = wake_by
        self._changed = threading.Condition()  # guards all assemblies and the three below
        self._open: dict[tuple[Session, int], Feed] = {}
        self._parted: dict[bytes, Assembly] = {}  # by tag, those that wait for more parts
        self._known: dict[bytes, Assembly] = {}  # by tag, for follow()
        self._closed = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def take(self, session: Session, offer: messages.Offer) -> None:
        """A new offer. What is wrong with it is answered, not raised."""
        try:
            feed = self._join(session, offer)
        except PoolweaveError as error:
            self._answer(session, offer, error)
            return
        self._wake_by(feed.deadline)
        self._end_if_over(feed.assembly)  # an empty one is whole at once

    def take_ready(self, session: Session, ready: messages.Ready) -> None:
        """Raises ProtocolError for a stretch that does not fit its offer."""
        with self._changed:
            feed = self._open.get((session, ready.offer))
            if feed is None or feed.assembly.error is not None:
                return  # it ended here while the message was on its way
            try:
                feed.told(ready)
            except ConfigError as error:
                raise ProtocolError(f"{session.peer} told {error}") from error
            feed.deadline = time.monotonic() + feed.offer.lease_s
            feed.assembly.deadline = max(feed.assembly.deadline, feed.deadline)
            if feed.busy:
                return
            feed.busy = True
        small = session.source.is_instant and step_bytes(self._home, feed, ready) <= _INLINE_BYTES
        if small or not self._hooks.submit(lambda: self._work(feed)):
            self._work(feed)

    def cancel(self, session: Session, number: int, error: PoolweaveError) -> bool:
        """The sender took an offer back. False when it is not being pulled."""
        with self._changed:
            feed = self._open.get((session, number))
        if feed is not None:
            self._fail(feed.assembly, error)
        return feed is not None

    def lose(self, session: Session) -> None:
        with self._changed:
            feeds = [feed for feed in self._open.values() if feed.session is session]
        for feed in feeds:
            self._fail(feed.assembly, PeerLost(f"{session.peer} was lost", peer=session.peer, reason="lost"))

    def tick(self, now: float) -> float:
        """Gives up what its senders let lie; returns when it wants to be called again."""
        with self._changed:
            late = {feed.assembly for feed in self._open.values() if feed.assembly.deadline <= now}
            for tag in [tag for tag, one in self._known.items() if one.deadline <= now]:
                del self._known[tag]
        for assembly in late:
            lacking = assembly.num_parts - len(assembly.feeds)
            what = f"{lacking} of {assembly.num_parts} parts did not come" if lacking else "no more came"
            self._fail(
                assembly,
                TransferTimeout(
                    f"transfer {assembly.offer.tag!r} given up: {what} within {assembly.offer.lease_s:g} s; raise its "
                    "lease_s",
                    peer=assembly.owner[0].peer, reason="lease",
                ),
            )  # fmt: skip
        with self._changed:
            known = [assembly.deadline for assembly in self._known.values()]
            return min([feed.assembly.deadline for feed in self._open.values()] + known, default=math.inf)

    def close(self) -> None:
        """Give everything up; pulls under way end by their abort."""
        with self._changed:
            self._closed = True
            assemblies = {feed.assembly for feed in self._open.values()}
            self._known.clear()
            self._changed.notify_all()
        for assembly in assemblies:
            self._fail(assembly, InstanceClosed(f"{self._home.instance} is closing"))

    # --- who looks at an arrival before it is whole: any thread ---------------------------------------------------

    def follow(self, tag: bytes, timeout: float | None) -> Assembly:
        """The growing arrival `tag`, once it has its blocks. Raises TransferTimeout, InstanceClosed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or tag in self._known, timeout):
                raise TransferTimeout(
                    f"no growing transfer {tag!r} began within {timeout} s; was it offered, and to this instance?",
                    part=tag, reason="timeout",
                )  # fmt: skip
            if self._closed:
                raise InstanceClosed("the transfer engine is closed")
            return self._known.pop(tag)

    def wait(self, assembly: Assembly, layers: int, num_blocks: int, timeout: float | None) -> None:
        """Until the first layers of the first blocks are here. Raises what it failed with, TransferTimeout."""

        def arrived() -> bool:
            return assembly.error is not None or assembly.layers_here(num_blocks) >= layers

        with self._changed:
            if not self._changed.wait_for(arrived, timeout):
                raise TransferTimeout(
                    f"{layers} layers of {num_blocks} blocks of {assembly.offer.tag!r} did not come within {timeout} s",
                    part=assembly.offer.tag, reason="timeout",
                )  # fmt: skip
            if assembly.error is not None:
                raise copy.copy(assembly.error)

    # --- private ----------------------------------------------------------------------------------------------------

    def _join(self, session: Session, offer: messages.Offer) -> Feed:
        if session.route is None or not offer.growing:
            raise TransferFailed(
                f"{session.peer} offered what its shard has not for ours", peer=session.peer, reason="parts"
            )
        if session.num_parts > 1 and not offer.tag:
            raise ConfigError("a transfer from several shards is put together by its tag: give it one", setting="tag")
        deadline = time.monotonic() + offer.lease_s
        with self._changed:
            assembly = self._parted.get(offer.tag)
        if assembly is None or session.num_parts == 1:
            assembly = self._begin(session, offer, deadline)
        layers = session.route.source_layers
        feed = Feed(
            session, offer, assembly, deadline, Coverage(offer.num_blocks, layers), Coverage(offer.num_blocks, layers)
        )
        with self._changed:
            assembly.require_part(session, offer)
            if self._closed:
                assembly.error = InstanceClosed(f"{self._home.instance} is closing")
            assembly.feeds.append(feed)
            assembly.deadline = max(assembly.deadline, deadline)
            self._open[session, offer.offer] = feed
            self._changed.notify_all()
        return feed

    def _begin(self, session: Session, offer: messages.Offer, deadline: float) -> Assembly:
        owner = session, offer.offer
        if offer.tag:
            self._arrivals.announce(offer.tag, owner, deadline)
        try:
            placement = self._hooks.place(session, offer)
        except PoolweaveError as error:
            if offer.tag:
                self._arrivals.fail(offer.tag, owner, error)
            raise
        assembly = Assembly(owner, offer, session.num_parts, placement, deadline)
        with self._changed:
            if offer.tag:
                self._known[offer.tag] = assembly
            if session.num_parts > 1:
                self._parted[offer.tag] = assembly
        return assembly

    def _work(self, feed: Feed) -> None:
        """Pull what is told of one feed until there is no more for now."""
        assembly = feed.assembly
        while True:
            with self._changed:
                if assembly.error is not None or not feed.queue:
                    feed.busy = False
                    break
                ready = feed.queue.popleft()
            try:
                pull_step(self._home, feed, ready)
            except PoolweaveError as error:
                self._fail(assembly, error)
                continue
            except Exception as error:  # noqa: BLE001  # the request's boundary: it fails alone
                _log.exception("a growing offer of %s failed", feed.session.peer)
                self._fail(assembly, TransferFailed(f"internal error at the receiver: {error!r}", reason="internal"))
                continue
            with self._changed:
                self._changed.notify_all()
        self._end_if_over(assembly)

    def _fail(self, assembly: Assembly, error: PoolweaveError) -> None:
        with self._changed:
            if assembly.error is None and not assembly.over:
                assembly.error = copy.copy(error)  # without the traceback, whose frames hold the peer's memory
            if assembly.abort is not None:
                assembly.abort.set()
            self._changed.notify_all()
        self._end_if_over(assembly)

    def _end_if_over(self, assembly: Assembly) -> None:
        """Commit what is whole, release what failed, once nobody pulls for it."""
        with self._changed:
            if assembly.over or assembly.is_busy or not (assembly.error is not None or assembly.is_whole):
                return
            assembly.over = True
            for feed in assembly.feeds:
                self._open.pop((feed.session, feed.offer.offer), None)
            if self._parted.get(assembly.offer.tag) is assembly:
                del self._parted[assembly.offer.tag]
        if assembly.error is not None:
            self._hooks.release(assembly)
        error = assembly.error or self._commit(assembly)
        if error is None:
            for feed in assembly.feeds:
                feed.session.tell(_confirm(assembly, feed))
        else:
            self._tell_failure(assembly, error)
        with self._changed:
            assembly.feeds, assembly.abort = [], None  # feeds refer back to it: without them it goes at once
            self._changed.notify_all()

    def _tell_failure(self, assembly: Assembly, error: PoolweaveError) -> None:
        with self._changed:
            assembly.error = copy.copy(error)
            if self._known.get(assembly.offer.tag) is assembly:
                del self._known[assembly.offer.tag]
        if assembly.offer.tag:
            self._arrivals.fail(assembly.offer.tag, assembly.owner, error)
            self._wake_by(assembly.deadline)
        for feed in assembly.feeds:
            self._answer(feed.session, feed.offer, error)

    def _commit(self, assembly: Assembly) -> PoolweaveError | None:
        """What went wrong; the placement is released then, as it is for one that failed before."""
        error: PoolweaveError
        try:
            if self._hooks.finish(assembly):
                return None
            peer = assembly.owner[0].peer
            return TransferFailed(f"{peer} took the transfer back", peer=peer, reason="cancelled")
        except PoolweaveError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001  # the request's boundary: it fails alone
            _log.exception("an arrival could not be committed")
            error = TransferFailed(f"internal error at the receiver: {problem!r}", reason="internal")
        self._hooks.release(assembly)
        return error

    def _answer(self, session: Session, offer: messages.Offer, error: PoolweaveError) -> None:
        self._hooks.count_failure()
        session.tell(messages.Failed(offer.offer, *describe(error)))


def _confirm(assembly: Assembly, feed: Feed) -> messages.Confirm:
    return messages.Confirm(
        feed.offer.offer, assembly.num_fresh, feed.nbytes, feed.calls, feed.early_nbytes, feed.pull_s
    )  # fmt: skip
