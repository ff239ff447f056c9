"""A member's own thread: joins, sends heartbeats, joins anew when it has to."""

from __future__ import annotations

import logging
import threading
import time

from poolweave.errors import PoolweaveError
from poolweave.scheduler.enrolment import Enrolment
from poolweave.scheduler.membership_messages import Join
from poolweave.serving.membership.registry import Registry

logger = logging.getLogger(__name__)


class Participant:
    """Runs from construction to `close`, which leaves in order. The registry stays its owner's."""

    def __init__(self, enrolment: Enrolment, registry: Registry) -> None:
        self._enrolment = enrolment
        self._registry = registry
        self._ending = threading.Event()
        self._reachable = True
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave, if the registry can be reached, and stop. Idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join()
        if self._enrolment.joined:
            try:
                self._registry.leave(self._enrolment.name, self._enrolment.epoch)
            except PoolweaveError as error:
                logger.info("could not leave: %s", error)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._send()
            except Exception as error:
                if self._reachable:
                    unforeseen = None if isinstance(error, PoolweaveError) else error
                    name = self._enrolment.name
                    logger.warning("%s: the registry cannot be reached: %s", name, error, exc_info=unforeseen)
                self._reachable = False
            else:
                self._reachable = True
            due = self._enrolment.next_s
            if due is not None:
                self._ending.wait(max(0.0, due - time.monotonic()))

    def _send(self) -> None:
        message = self._enrolment.due(time.monotonic())
        if message is None:
            return
        answer = self._registry.join(message) if isinstance(message, Join) else self._registry.heartbeat(message)
        if answer is not None and self._enrolment.answered(answer, time.monotonic()):
            logger.warning("%s was declared dead; it joins again under a new epoch", self._enrolment.name)
