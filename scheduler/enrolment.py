"""The member's side of membership as a pure state machine: when to send what, and under which epoch.

    joining --Admitted--> member --Refused(UNKNOWN)--> joining, same epoch: the coordinator restarted
       ^                     |
       +--new epoch----------+--Refused(STALE_EPOCH): this life was declared dead

Knows no socket and no clock; a shell sends what `due` returns and hands answers to `answered`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refusal, Refused
from poolweave.types import Role


@dataclass(slots=True)
class Enrolment:
    """One instance's membership. `draw_epoch` gives a new epoch at the start and after each life declared dead."""

    name: str
    role: Role
    draw_epoch: Callable[[], int]
    addresses: tuple[str, ...] = ()
    config: MembershipConfig = field(default_factory=MembershipConfig)
    epoch: int = field(init=False)
    joined: bool = field(init=False, default=False)
    _sequence: int = field(init=False, default=0)
    _next_s: float | None = field(init=False, default=None)  # None: at once

    _wait_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.epoch = self.draw_epoch()

    def due(self, now: float) -> Join | Heartbeat | None:
        """The message to send now, if any. Call it at least once a heartbeat, or at `next_s`."""
        # A clock set back must not silence the member: it waits no longer than it meant to.
        if self._next_s is not None and self._next_s - self._wait_s <= now < self._next_s:
            return None
        self._wait(now, self.config.heartbeat_s)
        self._sequence += 1
        if self.joined:
            return Heartbeat(name=self.name, epoch=self.epoch, sequence=self._sequence)
        return Join(name=self.name, epoch=self.epoch, role=self.role, addresses=self.addresses, sequence=self._sequence)

    @property
    def next_s(self) -> float | None:
        """When the next message is due; None: now."""
        return self._next_s

    def answered(self, answer: Admitted | Refused, now: float) -> bool:
        """Take an answer. True when a new epoch began: what the last one owned elsewhere is lost.

        Answers to other epochs or other names are late ones, and change nothing.
        """
        if answer.name != self.name or answer.epoch != self.epoch:
            return False
        if isinstance(answer, Admitted):
            self.joined = True
            return False
        self.joined = False
        self._next_s = None
        if answer.retry_after_s is not None:
            self._wait(now, answer.retry_after_s)
        if answer.reason is not Refusal.STALE_EPOCH:
            return False
        self.epoch = self.draw_epoch()
        self._sequence = 0
        return True

    def _wait(self, now: float, seconds: float) -> None:
        self._next_s, self._wait_s = now + seconds, seconds
