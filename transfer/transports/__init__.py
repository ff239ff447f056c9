"""The ways bytes move between instances: a file and a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from poolweave.transfer.transport import Home, Transport
from poolweave.transfer.transports.arena import ArenaTransport
from poolweave.transfer.transports.inproc import InprocTransport
from poolweave.transfer.transports.nccl import NcclTransport
from poolweave.transfer.transports.nixl import NixlTransport
from poolweave.transfer.transports.shm import ShmTransport
from poolweave.transfer.transports.tcp import TcpTransport

TRANSPORTS: Mapping[str, Callable[[Home], Transport]] = {
    "arena": ArenaTransport,
    "inproc": InprocTransport,
    "shm": ShmTransport,
    "nccl": NcclTransport,
    "nixl": NixlTransport,
    "tcp": TcpTransport,
}

ON_DEVICES = frozenset({"nccl"})  # those that can move the memory of GPUs

__all__ = ["ON_DEVICES", "TRANSPORTS"]
