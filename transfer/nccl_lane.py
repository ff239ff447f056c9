"""Lane: a data connection to another GPU's engine and an NCCL communicator of two beside it.

Needs the optional package `nccl4py`.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from poolweave.errors import ConfigError, PoolweaveError, TransferFailed
from poolweave.transfer._native import CurrentDevice, Device, DeviceBuffer
from poolweave.transfer.data_line import DataLine

CHUNK_BYTES = 32 << 20
SENDER, RECEIVER = 0, 1  # ranks
_NAP_S = 20e-6  # between two looks at what takes longer than _EAGER_S
_EAGER_S = 500e-6
_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t


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
        self, device: Device, line: DataLine, rank: int, unique_id: bytes, timeout_s: float, stop: Callable[[], bool]
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
                own_id = api.UniqueId.from_bytes(unique_id)
                self._comm = api.Communicator.init(2, rank, own_id, api.NCCLConfig(blocking=False))
            if not self.wait(timeout_s, stop):
                raise TransferFailed("the lane was closed while it was made", reason="closed")
        except BaseException:
            self.close()
            raise

    def buffer(self, turn: int) -> int:
        """The address of one of the two."""
        return self._buffers[turn % 2].address

    def send(self, turn: int, nbytes: int) -> None:
        self._start("send", turn, nbytes, RECEIVER)

    def receive(self, turn: int, nbytes: int) -> None:
        self._start("recv", turn, nbytes, SENDER)

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


def new_id() -> bytes:
    """What the two ends of a lane to come name it by. Raises TransferFailed."""
    with _nccl_errors():
        return bytes(load_nccl().get_unique_id())


def chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Of bytes [begin, end), as a lane carries them."""
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
