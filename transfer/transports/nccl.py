"""NCCL: from one GPU's memory into another's, over NVLink, PCIe or the network, as NCCL finds it.

Needs the optional package `nccl4py` and pools on GPUs. NCCL is two-sided: the receiver asks over a data connection for
bytes of an offer, the sender answers each chunk and sends it. A chunk is copied into a buffer of the sender's while the
offer stands, so what is on its way was valid; it arrives in a buffer of the receiver's, so an abort or an error leaves
nothing that could write into blocks later.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec

from poolweave.errors import ConfigError, InstanceClosed, PoolweaveError, TransferFailed
from poolweave.transfer import nccl_lane
from poolweave.transfer._native import Device, Outcome
from poolweave.transfer.data_line import DataLine, data_address, dial
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.messages import Hello, decode
from poolweave.transfer.nccl_lane import Lane, chunks
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.shelf import Shelf
from poolweave.transfer.transport import Home, PullSlice, Source

_log = logging.getLogger(__name__)
_IDLE_S = 60.0  # the sender ends a line that asked for nothing this long
_KEEP_S = 30.0  # the receiver does not reuse one older than this, so it never meets that end
_STEP_SHIFT = 48  # offers' numbers are far below

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True, forbid_unknown_fields=True):
    """The receiver has made a communicator of two: join it as rank 0."""

    unique_id: bytes


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True, forbid_unknown_fields=True):
    """Send bytes [begin, end) of a stream: all its blocks, one after the other, in chunks."""

    stream: _Count
    nonce: _Count
    begin: _Count
    end: _Count


class Chunk(msgspec.Struct, frozen=True, tag="chunk", array_like=True, forbid_unknown_fields=True):
    """The next one follows by NCCL; or none does any more, because the offer's lease has ended."""

    follows: bool


_REQUESTS = msgspec.msgpack.Decoder(Join | Ask)
_CHUNKS = msgspec.msgpack.Decoder(Chunk)
_encode = msgspec.msgpack.Encoder().encode


class NcclSource(Source):
    """Lanes to one sender, opened as needed, `connections` at the most."""

    is_instant = False

    def __init__(self, home: Home, device: Device, hello: Hello) -> None:
        self._home = home
        self._device = device
        self._peer = hello.instance
        self._epoch = hello.epoch
        self._address = data_address(hello, "nccl")
        self._changed = threading.Condition()
        self._idle: list[tuple[float, Lane]] = []
        self._num_busy = 0
        self._closed = False

    def pull(self, slice_: PullSlice) -> Outcome:
        until = time.monotonic() + slice_.timeout_s
        lane = self._take(until, slice_)
        if lane is None:
            return Outcome.ABORTED
        kept = False
        try:
            outcome = self._pull(lane, slice_, until)
            kept = outcome != Outcome.ABORTED  # after an abort or an error it is out of step
        except (OSError, msgspec.DecodeError) as error:
            raise TransferFailed(f"{self._peer} stopped answering: {error}", peer=self._peer, reason="cut") from error
        finally:
            self._give_back(lane, kept)
        if outcome == Outcome.DONE and slice_.hashes is not None:
            self._home.memory.hash_blocks(slice_.target, self._home.limits.copy_threads, slice_.hashes)
        return outcome

    def _pull(self, lane: Lane, slice_: PullSlice, until: float) -> Outcome:
        """Chunk by chunk: while one is on its way, the one before is copied to its place."""
        target, offset = slice_.target, (slice_.first - slice_.step_first) * slice_.target.block_bytes
        stream = _stream(slice_.offer.offer, slice_.step)
        lane.line.send(_encode(Ask(stream, slice_.offer.nonce, offset, offset + target.nbytes)), until)
        arrived: tuple[int, int, int] | None = None  # its bytes and its turn
        for turn, (begin, end) in enumerate(chunks(0, target.nbytes)):
            if not decode(_CHUNKS, lane.line.receive(self._patience(until))).follows:
                return Outcome.REVOKED
            lane.receive(turn, end - begin)
            if arrived is not None:
                self._device.scatter(target, arrived[0], arrived[1], lane.buffer(arrived[2]))
            if not lane.wait(self._patience(until) - time.monotonic(), lambda: slice_.abort.is_set):
                return Outcome.ABORTED
            if slice_.abort.is_set:
                return Outcome.ABORTED
            arrived = (begin, end, turn)
        if arrived is not None:
            self._device.scatter(target, arrived[0], arrived[1], lane.buffer(arrived[2]))
        return Outcome.DONE

    def close(self) -> None:
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for _, lane in idle:
            lane.close()

    def _patience(self, until: float) -> float:
        return min(until, time.monotonic() + self._home.limits.stall_s)

    def _take(self, until: float, slice_: PullSlice) -> Lane | None:
        """A lane of our own; None when the pull was aborted while all were busy."""
        limits = self._home.limits
        with self._changed:
            while not self._idle and self._num_busy >= limits.connections and not self._closed:
                if slice_.abort.is_set:
                    return None
                if time.monotonic() > until:
                    raise TransferFailed(f"all lanes to {self._peer} are busy", peer=self._peer, reason="timeout")
                self._changed.wait(0.05)
            if self._closed:
                raise InstanceClosed(f"the connection to {self._peer} is closed")
            self._num_busy += 1
            stale = [lane for since, lane in self._idle if time.monotonic() - since > _KEEP_S]
            self._idle = [(since, lane) for since, lane in self._idle if lane not in stale]
            found = self._idle.pop()[1] if self._idle else None
        for lane in stale:
            lane.close()
        if found is not None:
            return found
        try:
            return self._open(until)
        except BaseException:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()
            raise

    def _give_back(self, lane: Lane, kept: bool) -> None:
        with self._changed:
            self._num_busy -= 1
            kept = kept and not self._closed
            if kept:
                self._idle.append((time.monotonic(), lane))
            self._changed.notify_all()
        if not kept:
            lane.close()

    def _open(self, until: float) -> Lane:
        unique_id = nccl_lane.new_id()
        sock = dial(self._home, self._peer, self._epoch, self._address)
        line = DataLine(sock, self._home.limits.secret)
        try:
            line.send(_encode(Join(unique_id)), until)
        except OSError as error:
            line.close()
            raise TransferFailed(f"{self._peer} hung up: {error}", peer=self._peer, reason="cut") from error
        return Lane(
            self._device, line, nccl_lane.RECEIVER, unique_id, self._home.limits.connect_timeout_s, lambda: self._closed
        )  # fmt: skip


class Desk:
    """The sender's end of one lane: a thread that answers what the receiver asks."""

    def __init__(self, home: Home, device: Device, shelf: Shelf, sock: socket.socket) -> None:
        self._home = home
        self._device = device
        self._shelf = shelf
        self._line = DataLine(sock, home.limits.secret)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"poolweave-nccl-{home.instance}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """Returns when nothing of ours is read any more. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._line.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self) -> None:
        lane: Lane | None = None
        try:
            first = decode(_REQUESTS, self._line.receive(time.monotonic() + self._home.limits.connect_timeout_s))
            if not isinstance(first, Join):
                return
            limits = self._home.limits
            lane = Lane(
                self._device, self._line, nccl_lane.SENDER, first.unique_id, limits.connect_timeout_s, self._is_left
            )
            while not self._closed:
                ask = decode(_REQUESTS, self._line.receive(time.monotonic() + _IDLE_S))
                if not isinstance(ask, Ask):
                    return
                self._answer(lane, ask)
        except (PoolweaveError, OSError) as error:  # the peer sees the line close
            _log.info("a lane of %s ended: %s", self._home.instance, error)
        finally:
            (lane or self._line).close()

    def _answer(self, lane: Lane, ask: Ask) -> None:
        """While one chunk is on its way the next is copied out of the blocks. Raises when the line is of no use."""
        stall_s = self._home.limits.stall_s
        for turn, (begin, end) in enumerate(chunks(ask.begin, ask.end)):
            follows = self._copy_out(ask, begin, end, lane.buffer(turn))
            if turn and not lane.wait(stall_s, self._is_left):
                raise ConnectionError("the receiver has gone")
            self._line.send(_encode(Chunk(follows)), time.monotonic() + stall_s)
            if not follows:
                return
            lane.send(turn, end - begin)
        if not lane.wait(stall_s, self._is_left):
            raise ConnectionError("the receiver has gone")

    def _copy_out(self, ask: Ask, begin: int, end: int, staged: int) -> bool:
        found = self._shelf.begin(ask.stream, ask.nonce)
        if found is None:
            return False
        try:
            self._device.gather(found.extents, begin, end, staged)
        finally:
            self._shelf.end(found)
        return True

    def _is_left(self) -> bool:
        return self._closed or self._line.is_cut


class NcclTransport:
    """Both sides of one engine. Raises ConfigError without `nccl4py`, or for a pool that is on no GPU."""

    in_place = False

    def __init__(self, home: Home) -> None:
        if home.memory.device is None:
            raise ConfigError(
                "the nccl transport moves GPUs' memory: make the pool with device='cuda:0', or listen on another",
                setting="listen", value="nccl",
            )  # fmt: skip
        nccl_lane.load_nccl()
        self._home = home
        self._device = home.memory.device
        self._shelf = Shelf()
        self._lock = threading.Lock()
        self._desks: list[Desk] = []
        self._closed = False

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        return self._home.data_address(connection, "nccl"), ()

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> NcclSource:
        for fd in fds:
            os.close(fd)
        return NcclSource(self._home, self._device, hello)

    def publish(self, offer: OpenOffer, step: int = 0) -> None:
        """A growing offer has a stream for each step, none for the whole."""
        if offer.growth is None or step:
            self._shelf.put(_stream(offer.number, step), offer.extents(self._home.memory, step), offer.nonce)

    def revoke(self, offer: OpenOffer) -> None:
        steps = len(offer.growth.steps) if offer.growth is not None else 0
        self._shelf.take_down([_stream(offer.number, step) for step in range(1 + steps)])

    def adopt(self, sock: socket.socket) -> None:
        with self._lock:
            self._desks = [desk for desk in self._desks if not desk.is_done]
            if self._closed:
                sock.close()
                return
            self._desks.append(Desk(self._home, self._device, self._shelf, sock))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            desks, self._desks = self._desks, []
        for desk in desks:
            desk.close()


def _stream(offer: int, step: int) -> int:
    return step << _STEP_SHIFT | offer
