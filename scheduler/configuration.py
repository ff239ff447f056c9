"""Who is a member, and how a receiver follows the changes. Source: MemServe §4.4 (failure at instance granularity)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from poolweave.types import Role


class State(enum.Enum):
    """What a member may be given: ACTIVE new requests; the others finish what they have."""

    ACTIVE = "active"
    SUSPECT = "suspect"  # not heard of for half its lease
    DRAINING = "draining"  # asked to end


class Departure(enum.Enum):
    """Why a member is none any more."""

    LEFT = "left"
    EXPIRED = "expired"
    REPLACED = "replaced"  # its name joined under a new epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One life of an instance: `epoch` is drawn anew at each start."""

    name: str
    epoch: int
    role: Role
    addresses: tuple[str, ...] = ()
    suspect: bool = False
    draining: bool = False

    @property
    def state(self) -> State:
        if self.suspect:
            return State.SUSPECT
        return State.DRAINING if self.draining else State.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """All members, by name. `version` counts the changes that one life of a coordinator made.

    Not `complete`: the coordinator started lately and members of its predecessor may still be missing.
    """

    coordinator: int
    version: int
    members: tuple[Member, ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a configuration changes. A member that joined under a new epoch is among the gone and the joined."""

    gone: tuple[Member, ...] = ()
    joined: tuple[Member, ...] = ()
    changed: tuple[Member, ...] = ()  # as they are now

    def __bool__(self) -> bool:
        return bool(self.gone or self.joined or self.changed)


class Roster:
    """The members as a receiver of configurations knows them: late and repeated ones change nothing."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._coordinator: int | None = None
        self._version = -1
        self._past: set[int] = set()

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members[name] for name in sorted(self._members))

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def apply(self, configuration: Configuration) -> Difference:
        """Take over what is new in `configuration`; nothing when it is older than the last one."""
        if configuration.coordinator in self._past:
            return Difference()
        if configuration.coordinator != self._coordinator:
            if self._coordinator is not None:
                self._past.add(self._coordinator)
            self._coordinator, self._version = configuration.coordinator, -1
        if configuration.version <= self._version:
            return Difference()
        self._version = configuration.version
        told = {member.name: member for member in configuration.members}
        new = told if configuration.complete else {**self._members, **told}
        old, self._members = self._members, new
        return Difference(
            gone=tuple(m for m in old.values() if m.name not in new or new[m.name].epoch != m.epoch),
            joined=tuple(m for m in new.values() if m.name not in old or old[m.name].epoch != m.epoch),
            changed=tuple(
                m for m in new.values() if m.name in old and old[m.name].epoch == m.epoch and old[m.name] != m
            ),
        )
