"""NCCL: from one GPU's memory into another's, over NVLink, PCIe or the network, as NCCL finds it.

Needs the optional package `nccl4py` and pools on GPUs. NCCL is two-sided: the receiver asks over a data connection for
bytes of an offer, the sender answers each chunk and sends it. A chunk is copied into a buffer of the sender's while the
offer stands, so what is on its way was valid; it arrives in a buffer of the receiver's, so an abort or an error leaves
nothing that could write into blocks later.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from poolweave.errors import ConfigError, InstanceClosed, PoolweaveError, TransferFailed
from poolweave.transfer._native import CurrentDevice, Device, DeviceBuffer, Extents, Outcome
from poolweave.transfer.data_line import DataLine, data_address, dial
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.messages import Hello, decode
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.transport import Home, PullSlice, Source

CHUNK_BYTES = 32 << 20
_log = logging.getLogger(__name__)
_NAP_S = 20e-6  # between two looks at what takes longer than _EAGER_S
_EAGER_S = 500e-6
_IDLE_S = 60.0  # the sender ends a line that asked for nothing this long
_KEEP_S = 30.0  # the receiver does not reuse one older than this, so it never meets that end
_STEP_SHIFT = 48  # offers' numbers are far below
_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t
_SENDER, _RECEIVER = 0, 1  # ranks


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


class _Staged:
    """A device's buffer, or its beginning, as NCCL's binding takes arrays."""

    def __init__(self, buffer: DeviceBuffer, nbytes: int) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (buffer.address, False), "version": 3, "strides": None,
            "stream": None,
        }  # fmt: skip


class Lane:
    """A data connection and the communicator beside it: one chunk is under way at a time, another is being copied.

    For one thread at a time. After an error it can only be closed.
    """

    def __init__(
        self, device: Device, line: DataLine, rank: int, unique_id: Any, timeout_s: float, stop: Callable[[], bool]
    ) -> None:  # fmt: skip
        """Raises TransferFailed when the peer does not join in `timeout_s`, or stop() says so; all is closed then."""
        self.line = line
        self._device = device
        self._stream = 0
        self._comm: Any = None
        try:
            self._buffers = [DeviceBuffer(device, CHUNK_BYTES) for _ in range(2)]
            self._stream = device.make_stream()
            api = load_nccl()
            with _current(device), _nccl_errors():
                self._comm = api.Communicator.init(2, rank, unique_id, api.NCCLConfig(blocking=False))
            if not self.wait(timeout_s, stop):
                raise TransferFailed("the lane was closed while it was made", reason="closed")
        except BaseException:
            self.close()
            raise

    def buffer(self, turn: int) -> int:
        """The address of one of the two."""
        return self._buffers[turn % 2].address

    def send(self, turn: int, nbytes: int) -> None:
        self._start("send", turn, nbytes, _RECEIVER)

    def receive(self, turn: int, nbytes: int) -> None:
        self._start("recv", turn, nbytes, _SENDER)

    def _start(self, what: str, turn: int, nbytes: int, peer: int) -> None:
        with _current(self._device), _nccl_errors():
            getattr(self._comm, what)(_Staged(self._buffers[turn % 2], nbytes), peer, stream=self._stream)

    def wait(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Until all that was started is done; False when `stop()` came first. Raises TransferFailed."""
        began = time.monotonic()
        while not self._is_done():
            now = time.monotonic()
            if stop():
                return False
            if now - began > timeout_s:
                raise TransferFailed(f"NCCL moved nothing for {timeout_s:.3g} s", reason="timeout")
            if now - began > _EAGER_S:
                time.sleep(_NAP_S)
        return True

    def _is_done(self) -> bool:
        with _nccl_errors():
            state = int(self._comm.get_async_error())
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise TransferFailed(f"NCCL ended in state {state}", reason="nccl")
        return state == _SUCCESS and self._device.is_idle(self._stream)

    def close(self) -> None:
        """End what is under way here, and the line. Idempotent."""
        self.line.close()
        if self._comm is not None:
            comm, self._comm = self._comm, None
            with suppress(Exception), _current(self._device):  # NCCL's own kinds; it is given up anyway
                comm.abort()
        if self._stream:
            self._device.drop_stream(self._stream)
            self._stream = 0
        self._buffers = []


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
        for turn, (begin, end) in enumerate(_chunks(0, target.nbytes)):
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
        api = load_nccl()
        with _nccl_errors():
            unique_id = api.get_unique_id()
        sock = dial(self._home, self._peer, self._epoch, self._address)
        line = DataLine(sock, self._home.limits.secret)
        try:
            line.send(_encode(Join(bytes(unique_id))), until)
        except OSError as error:
            line.close()
            raise TransferFailed(f"{self._peer} hung up: {error}", peer=self._peer, reason="cut") from error
        return Lane(
            self._device, line, _RECEIVER, unique_id, self._home.limits.connect_timeout_s, lambda: self._closed
        )  # fmt: skip


@dataclass(slots=True)
class _Published:
    extents: Extents
    nonce: int
    readers: int = 0


class Shelf:
    """What may be read now, by stream. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[int, _Published] = {}

    def put(self, stream: int, extents: Extents, nonce: int) -> None:
        with self._changed:
            self._streams[stream] = _Published(extents, nonce)

    def take_down(self, streams: Sequence[int]) -> None:
        """After it returns nobody reads them. Idempotent."""
        with self._changed:
            gone = [one for one in (self._streams.pop(stream, None) for stream in streams) if one is not None]
            self._changed.wait_for(lambda: not any(one.readers for one in gone))

    def begin(self, stream: int, nonce: int) -> _Published | None:
        """It may be read until end(); None when it is not there."""
        with self._changed:
            found = self._streams.get(stream)
            if found is None or found.nonce != nonce:
                return None
            found.readers += 1
            return found

    def end(self, one: _Published) -> None:
        with self._changed:
            one.readers -= 1
            self._changed.notify_all()


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
            with _nccl_errors():
                unique_id = load_nccl().UniqueId.from_bytes(first.unique_id)
            limits = self._home.limits
            lane = Lane(self._device, self._line, _SENDER, unique_id, limits.connect_timeout_s, self._is_left)
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
        for turn, (begin, end) in enumerate(_chunks(ask.begin, ask.end)):
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
        load_nccl()
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


def _chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((at, min(end, at + CHUNK_BYTES)) for at in range(begin, end, CHUNK_BYTES))


@contextmanager
def _current(device: Device) -> Iterator[None]:
    """The device's context is this thread's inside."""
    guard = CurrentDevice(device)
    try:
        yield
    finally:
        del guard


@contextmanager
def _nccl_errors() -> Iterator[None]:
    """NCCL's own exceptions leave as TransferFailed."""
    try:
        yield
    except PoolweaveError:
        raise
    except Exception as error:
        raise TransferFailed(f"NCCL: {error}", reason="nccl") from error


@functools.cache
def load_nccl() -> Any:
    """The API of the installed package. Raises ConfigError where there is none, or its library cannot be loaded."""
    try:
        return importlib.import_module("nccl.core")
    except Exception as error:  # ImportError, and the kinds of its own search for libraries
        raise ConfigError(
            f"the nccl transport needs the package nccl4py ({error}): pip install 'poolweave[nccl]'",
            setting="listen", value="nccl",
        ) from error  # fmt: skip
