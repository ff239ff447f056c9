"""OneSided: what transports have in common whose receivers read by themselves, under the lease word."""

from __future__ import annotations

import socket

from poolweave.errors import ProtocolError
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.transport import Home


class OneSided:
    """The sender's half of such a transport: it has nothing to do. To be derived from."""

    in_place = False

    def __init__(self, home: Home) -> None:
        self._home = home

    def publish(self, offer: OpenOffer, step: int = 0) -> None:
        """The lease word says it all."""

    def revoke(self, offer: OpenOffer) -> None:
        """Readers look at the word after they read."""

    def adopt(self, sock: socket.socket) -> None:
        sock.close()
        raise ProtocolError("a transport whose receivers read by themselves has no data connections")

    def close(self) -> None:
        """Nothing is held."""
