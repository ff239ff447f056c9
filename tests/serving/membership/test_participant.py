"""A member's and a follower's threads outlive what nobody expected of a registry."""

from __future__ import annotations

import threading

from ref_waiting import until

from poolweave.scheduler.configuration import Configuration, Difference, Member
from poolweave.scheduler.enrolment import Enrolment
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refused
from poolweave.serving.membership.follower import Follower
from poolweave.serving.membership.participant import Participant
from poolweave.types import Role

MEMBER = Member(name="one", epoch=1, role=Role.COLOCATED)
CONFIGURATION = Configuration(coordinator=1, version=1, members=(MEMBER,))


class Babbling:
    """A registry whose first answers cannot be read."""

    def __init__(self) -> None:
        self.nonsense = {"join": 1, "heartbeat": 1, "watch": 1}
        self.heartbeats = 0
        self._closed = threading.Event()

    def join(self, message: Join) -> Admitted | Refused:
        self._babble("join")
        return Admitted(name=message.name, epoch=message.epoch, new=True, configuration=CONFIGURATION)

    def heartbeat(self, message: Heartbeat) -> Refused | None:
        self._babble("heartbeat")
        self.heartbeats += 1
        return None

    def watch(self, seen: Configuration | None, timeout_s: float) -> Configuration | None:
        self._babble("watch")
        if seen is None:
            return CONFIGURATION
        self._closed.wait(timeout_s)
        return None

    def leave(self, name: str, epoch: int) -> None: ...
    def drain(self, name: str) -> None: ...

    def close(self) -> None:
        self._closed.set()

    def _babble(self, call: str) -> None:
        if self.nonsense[call]:
            self.nonsense[call] -= 1
            raise KeyError("header")


def test_a_member_asks_again_after_an_answer_that_cannot_be_read() -> None:
    registry = Babbling()
    times = MembershipConfig(ttl_s=1.0, heartbeat_s=0.01)
    participant = Participant(Enrolment("one", Role.COLOCATED, lambda: 1, (), times), registry)
    until(lambda: registry.heartbeats, "it joined, and its lease is renewed")
    participant.close()


def test_a_follower_asks_again_after_an_answer_that_cannot_be_read() -> None:
    told: list[Difference] = []
    follower = Follower(Babbling(), told.append)
    until(lambda: told, "it is told")
    assert told[0].joined == (MEMBER,)
    follower.close()
