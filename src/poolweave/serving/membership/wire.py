"""The messages between a coordinator and its members, on the frames of the control protocol. Values only."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from poolweave.scheduler.configuration import Configuration
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refused
from poolweave.serving.control.messages import Done, Failure


class Greet(msgspec.Struct, frozen=True, tag=True):
    """The first request of a connection; it needs no epoch. Answered by Done."""


class AskJoin(msgspec.Struct, frozen=True, tag=True):
    """Answered by Answer."""

    join: Join


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Answered by Answer, without an admission."""

    heartbeat: Heartbeat


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Answered by Done."""

    name: str
    epoch: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Answered by Done."""

    name: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Answered by Announced as soon as there is another configuration than this one, by Done after `timeout_s`."""

    coordinator: int
    version: int
    timeout_s: float


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Both None: a lease was renewed."""

    admitted: Admitted | None = None
    refused: Refused | None = None


class Announced(msgspec.Struct, frozen=True, tag=True):
    """The members now."""

    configuration: Configuration


MemberRequest: TypeAlias = Greet | AskJoin | Beat | Leave | Drain | Watch
CoordinatorReply: TypeAlias = Answer | Announced | Done | Failure
