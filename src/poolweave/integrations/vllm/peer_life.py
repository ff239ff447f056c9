"""PeerLife: whether the life of a peer, in which it promised KV, goes on. Polled, never waited for."""

from __future__ import annotations

from poolweave.mempool import MemPool


class PeerLife:
    """Over once it cannot be reached, or was started again. `epoch`: of that life; None: of the first one seen."""

    def __init__(self, pool: MemPool, peer: str, epoch: int | None) -> None:
        """Raises UnknownPeer."""
        self._pool = pool
        self._peer = peer
        self._epoch = epoch
        self._failed_dials = pool.presence(peer).failed_dials

    def goes_on(self) -> bool:
        """True as long as nothing else is known."""
        seen = self._pool.presence(self._peer)
        if not seen.epoch:
            return seen.failed_dials == self._failed_dials
        if self._epoch is None:
            self._epoch = seen.epoch
        return seen.epoch == self._epoch
