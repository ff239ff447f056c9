"""What the sending half of an engine is set to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSettings:
    """`data_address(socket)` is where a peer reached over that connection opens its data connections to us."""

    lease_s: float
    checksums: bool
    max_in_flight_bytes: int
    spin_s: float
    data_address: Callable[[socket.socket], str]
