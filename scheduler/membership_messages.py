"""What members and their coordinator tell each other, and what follows from it: values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from poolweave.scheduler.configuration import Configuration, Departure, Member
from poolweave.types import Role


class Refusal(enum.Enum):
    """Why a message was not accepted, and what its sender does about it."""

    UNKNOWN = "unknown"  # join (again), with the epoch you have
    STALE_EPOCH = "stale epoch"  # this life has ended: join with a new epoch
    NAME_TAKEN = "name taken"  # a connected instance has this name: retry after retry_after_s, or choose another
    FULL = "full"  # max_members


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """An instance wants in. `sequence` grows with each message that one epoch sends, heartbeats included."""

    name: str
    epoch: int
    role: Role
    addresses: tuple[str, ...] = ()
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """An instance lives."""

    name: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Answer to a join. `new`: not a repetition; the member now tells what it holds."""

    name: str
    epoch: int
    new: bool
    configuration: Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer to a join or a heartbeat."""

    name: str
    epoch: int
    reason: Refusal
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """This life has ended: trees forget it, requests on it are retried, survivors free what they hold for it."""

    member: Member
    why: Departure


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Send this configuration to every member."""

    configuration: Configuration


Effect: TypeAlias = "Admitted | Refused | Gone | Announce"
