"""Questions to peers whose answers a thread waits for: reservations. Thread-safe; sends nothing itself."""

from __future__ import annotations

import itertools
import threading

from poolweave.errors import ConfigError, PoolweaveError, StaleEpoch, TransferFailed
from poolweave.transfer.messages import MAX_BLOCKS, Reserve
from poolweave.transfer.peers import Peer
from poolweave.transfer.shipment import Reservation
from poolweave.transfer.store import Payer
from poolweave.types import Tier


class Question:
    """One question and, once its gate opens, its answer."""

    def __init__(self, peer: Peer, message: Reserve) -> None:
        self.peer = peer
        self.message = message
        self.sent = False
        self.reservation = 0
        self.epoch = 0  # of the life of the peer that answered
        self.error: PoolweaveError | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, timeout: float) -> bool:
        """True once answered."""
        return self._gate.acquire(timeout=max(0.0, timeout))

    def finish(self) -> None:
        self._gate.release()


class QuestionBook:
    """Open questions by number. Numbers are negative, so an answer cannot be taken for an offer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}

    def ask(self, peer: Peer, num_blocks: int, tier: Tier, lease_s: float, payer: Payer) -> Question:
        """Raises ConfigError for a size that no reservation has."""
        if not 0 < num_blocks <= MAX_BLOCKS:
            raise ConfigError(
                f"a reservation has 1 to {MAX_BLOCKS} blocks, got {num_blocks}",
                setting="num_blocks", value=num_blocks, limit=MAX_BLOCKS,
            )  # fmt: skip
        with self._lock:
            number = -next(self._numbers)
            self._open[number] = Question(
                peer, Reserve(number, num_blocks, tier.value, lease_s, payer.identity, payer.tenant)
            )
            return self._open[number]

    def unsent(self, peer: Peer) -> list[Question]:
        if not self._open:  # nearly always
            return []
        with self._lock:
            return [question for question in self._open.values() if question.peer is peer and not question.sent]

    def drop(self, question: Question) -> None:
        with self._lock:
            self._open.pop(question.message.request, None)

    def answer(self, number: int, reservation: int, error: PoolweaveError | None) -> bool:
        """False for a question that nobody waits for any more."""
        with self._lock:
            question = self._open.pop(number, None)
        if question is None:
            return False
        question.reservation, question.epoch, question.error = reservation, question.peer.epoch, error
        question.finish()
        return True

    def abandon(self, peer: Peer, error: PoolweaveError, *, only_sent: bool) -> None:
        with self._lock:
            mine = [q for q in self._open.values() if q.peer is peer and (q.sent or not only_sent)]
        for question in mine:
            self.answer(question.message.request, 0, error)


def check_reservation(peer: Peer, dst: Reservation, num_blocks: int) -> None:
    """Raises TransferFailed for a reservation elsewhere or too small, StaleEpoch for one of the peer's former life."""
    if dst.peer != peer.name:
        raise TransferFailed(f"this reservation is at {dst.peer}, not at {peer.name}", peer=peer.name, reason="dst")
    if peer.epoch != dst.epoch:
        raise StaleEpoch(f"{peer.name} has restarted since it gave this reservation; reserve again", peer=peer.name)
    if num_blocks > dst.num_blocks:
        raise TransferFailed(
            f"{num_blocks} blocks do not fit a reservation of {dst.num_blocks}", peer=peer.name, reason="dst"
        )
