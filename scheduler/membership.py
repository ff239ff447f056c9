"""Who belongs to the deployment: the coordinator's side as a pure state machine. Source: MemServe §4.4.

    join -> ACTIVE <-> SUSPECT (half the TTL unheard) -> gone (EXPIRED)
              |  drain                                    a gone epoch never comes back: rejoin with a new one
           DRAINING -> gone (LEFT)

Messages go in with the time, effects come out; a shell sends them. Leases run on *observed* time, which a call
advances by at most one heartbeat: a coordinator that was stopped, however long, has not seen its members fail, so it
loses nobody. The shell hands over all received messages before it calls `tick`, and ticks once a heartbeat or more.
A member whose connection ended keeps its lease, but not its name: who was killed is followed at once by its next life.
State is not persisted: a restarted coordinator answers heartbeats with UNKNOWN and the members join it again with
the epoch they have, and tell it what they hold. Until a TTL after its start its configurations are not `complete`:
who is missing from them is not gone.

Knows no socket, no clock and no tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from poolweave.errors import ConfigError
from poolweave.scheduler.configuration import Configuration, Departure, Member
from poolweave.scheduler.membership_messages import (
    Admitted,
    Announce,
    Effect,
    Gone,
    Heartbeat,
    Join,
    Refusal,
    Refused,
)

_REMEMBERED_TTLS = 10  # a message delayed longer than this many TTLs could pass for a new one


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """`ttl_s`: unheard for so long, a member is gone. `heartbeat_s` must be under a third of it, so that two lost
    heartbeats cost nothing. Raises ConfigError."""

    ttl_s: float = 10.0
    heartbeat_s: float = 2.0
    max_members: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.ttl_s / 3:
            raise ConfigError(
                f"heartbeat_s={self.heartbeat_s} must be positive and under a third of ttl_s={self.ttl_s} "
                f"({self.ttl_s / 3:.3g} s): lower heartbeat_s or raise ttl_s",
                setting="heartbeat_s",
                value=self.heartbeat_s,
                limit=self.ttl_s / 3,
            )
        if self.max_members < 1:
            raise ConfigError(
                f"max_members must be at least 1, got {self.max_members}", setting="max_members", value=self.max_members
            )

    @property
    def suspect_s(self) -> float:
        """Unheard for so long, a member gets no new requests."""
        return self.ttl_s / 2


@dataclass(slots=True)
class _Lease:
    member: Member
    heard_s: float  # observed time
    sequence: int
    connected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStats:
    members: int
    suspect: int
    draining: int
    version: int
    expired: int
    refused: int
    repeated: int  # duplicates and reordered messages, ignored
    remembered: int  # ended epochs that are still refused


@dataclass(slots=True)
class _Counts:
    expired: int = 0
    refused: int = 0
    repeated: int = 0


@dataclass(slots=True)
class Membership:
    """The coordinator's state. Every call takes the time (any clock; running backwards counts as standing still)."""

    config: MembershipConfig = field(default_factory=MembershipConfig)
    coordinator: int = 0  # the epoch of this coordinator
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _ended: dict[tuple[str, int], float] = field(default_factory=dict)  # when; oldest first
    _version: int = 0
    _announced_complete: bool = False
    _last: float | None = None
    _observed_s: float = 0.0
    _counts: _Counts = field(default_factory=_Counts)

    def join(self, message: Join, now: float) -> tuple[Effect, ...]:
        """Admit, or refuse, an instance. Repeating a join changes nothing and is answered again."""
        self._observe(now)
        if (message.name, message.epoch) in self._ended:
            return self._refuse(message, Refusal.STALE_EPOCH)
        lease = self._leases.get(message.name)
        if lease is not None and lease.member.epoch == message.epoch:
            renewed = self._renew(lease, message.sequence)
            return (self._admitted(message, new=False), *renewed)
        effects: tuple[Effect, ...] = ()
        if lease is not None:
            unheard_s = self._observed_s - lease.heard_s
            if lease.connected and unheard_s < self.config.suspect_s:
                return self._refuse(message, Refusal.NAME_TAKEN)
            effects = (self._end(message.name, Departure.REPLACED),)
        elif len(self._leases) >= self.config.max_members:
            return self._refuse(message, Refusal.FULL)
        member = Member(name=message.name, epoch=message.epoch, role=message.role, addresses=message.addresses)
        self._leases[message.name] = _Lease(member, self._observed_s, message.sequence)
        announced = self._announce()
        return (*effects, self._admitted(message, new=True), announced)

    def heartbeat(self, message: Heartbeat, now: float) -> tuple[Effect, ...]:
        """Renew a lease. Duplicates and overtaken heartbeats renew nothing."""
        self._observe(now)
        lease = self._leases.get(message.name)
        if lease is None or lease.member.epoch != message.epoch:
            ended = (message.name, message.epoch) in self._ended
            return self._refuse(message, Refusal.STALE_EPOCH if ended else Refusal.UNKNOWN)
        return self._renew(lease, message.sequence)

    def hung_up(self, name: str, epoch: int, now: float) -> None:
        """The connection of this life ended: it died, or calls again. Until it is heard, another life may take its
        name."""
        self._observe(now)
        lease = self._leases.get(name)
        if lease is not None and lease.member.epoch == epoch:
            lease.connected = False

    def drain(self, name: str, now: float) -> tuple[Effect, ...]:
        """Give this member no new requests; it leaves when it has finished. Unknown names change nothing."""
        self._observe(now)
        lease = self._leases.get(name)
        if lease is None or lease.member.draining:
            return ()
        lease.member = replace(lease.member, draining=True)
        return (self._announce(),)

    def leave(self, name: str, epoch: int, now: float) -> tuple[Effect, ...]:
        """This life ends in order. A second or late leave changes nothing."""
        self._observe(now)
        lease = self._leases.get(name)
        if lease is None or lease.member.epoch != epoch:
            return ()
        return (self._end(name, Departure.LEFT), self._announce())

    def tick(self, now: float) -> tuple[Effect, ...]:
        """Suspect and expire whom the observed time has overtaken."""
        self._observe(now)
        effects: list[Effect] = []
        changed = False
        for name, lease in list(self._leases.items()):
            unheard_s = self._observed_s - lease.heard_s
            if unheard_s >= self.config.ttl_s:
                effects.append(self._end(name, Departure.EXPIRED))
                self._counts.expired += 1
            elif unheard_s >= self.config.suspect_s and not lease.member.suspect:
                lease.member = replace(lease.member, suspect=True)
                changed = True
        self._forget_ended()
        if effects or changed or self._complete != self._announced_complete:
            effects.append(self._announce())
        return tuple(effects)

    @property
    def configuration(self) -> Configuration:
        """What was last announced."""
        members = tuple(self._leases[name].member for name in sorted(self._leases))
        return Configuration(
            coordinator=self.coordinator, version=self._version, members=members, complete=self._announced_complete
        )

    def stats(self) -> MembershipStats:
        members = [lease.member for lease in self._leases.values()]
        return MembershipStats(
            members=len(members),
            suspect=sum(member.suspect for member in members),
            draining=sum(member.draining for member in members),
            version=self._version,
            expired=self._counts.expired,
            refused=self._counts.refused,
            repeated=self._counts.repeated,
            remembered=len(self._ended),
        )

    def check(self) -> None:
        """Assert all invariants."""
        for name, lease in self._leases.items():
            assert lease.member.name == name
            assert (name, lease.member.epoch) not in self._ended, f"{name} lives and has ended"
            assert lease.heard_s <= self._observed_s
        assert list(self._ended.values()) == sorted(self._ended.values())
        assert len(self._leases) <= self.config.max_members

    @property
    def _complete(self) -> bool:
        """Whether every live member of an earlier coordinator has had the time to join this one."""
        return self._observed_s >= self.config.ttl_s

    def _observe(self, now: float) -> None:
        if self._last is not None:
            self._observed_s += min(max(now - self._last, 0.0), self.config.heartbeat_s)
        self._last = now

    def _renew(self, lease: _Lease, sequence: int) -> tuple[Effect, ...]:
        if sequence <= lease.sequence:
            self._counts.repeated += 1
            return ()
        lease.sequence = sequence
        lease.heard_s = self._observed_s
        lease.connected = True
        if not lease.member.suspect:
            return ()
        lease.member = replace(lease.member, suspect=False)
        return (self._announce(),)

    def _end(self, name: str, why: Departure) -> Gone:
        member = self._leases.pop(name).member
        self._ended[name, member.epoch] = self._observed_s
        return Gone(member=member, why=why)

    def _forget_ended(self) -> None:
        horizon = self._observed_s - _REMEMBERED_TTLS * self.config.ttl_s
        for key, ended_s in list(self._ended.items()):
            if ended_s > horizon:
                break
            del self._ended[key]

    def _announce(self) -> Announce:
        self._version += 1
        self._announced_complete = self._complete
        return Announce(configuration=self.configuration)

    def _admitted(self, message: Join, *, new: bool) -> Admitted:
        return Admitted(name=message.name, epoch=message.epoch, new=new, configuration=self.configuration)

    def _refuse(self, message: Join | Heartbeat, reason: Refusal) -> tuple[Effect, ...]:
        self._counts.refused += 1
        # A name or a place is free as soon as a connection ends or somebody leaves, long before a lease does.
        waits = reason in (Refusal.NAME_TAKEN, Refusal.FULL)
        retry_after_s = self.config.heartbeat_s if waits else None
        return (Refused(name=message.name, epoch=message.epoch, reason=reason, retry_after_s=retry_after_s),)
