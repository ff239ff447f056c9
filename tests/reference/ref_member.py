"""A member of a deployment and somebody who watches it, for tests of a registry's shell."""

from __future__ import annotations

import secrets
from typing import Any

from poolweave.errors import PoolweaveError
from poolweave.scheduler.configuration import Difference, Member
from poolweave.scheduler.enrolment import Enrolment
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.membership import open_registry
from poolweave.serving.membership.follower import Follower
from poolweave.serving.membership.participant import Participant
from poolweave.types import Role


class _Counted:
    """A registry that counts its calls by how they ended."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self.silent = False
        self.heartbeats = self.failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def heartbeat(self, message: Any) -> Any:
        if self.silent:
            return None
        answer = self._counted(self._registry.heartbeat, message)
        self.heartbeats += 1
        return answer

    def join(self, message: Any) -> Any:
        return self._counted(self._registry.join, message)

    def _counted(self, call: Any, message: Any) -> Any:
        try:
            return call(message)
        except PoolweaveError:
            self.failures += 1
            raise


class RegistryMember:
    """Joins at construction."""

    def __init__(self, url: str, times: MembershipConfig, name: str, role: Role = Role.COLOCATED) -> None:
        self._registry = _Counted(open_registry(url, times))
        enrolment = Enrolment(name, role, lambda: secrets.randbits(62) | 1, ("tcp://127.0.0.1:1",), times)
        self._participant = Participant(enrolment, self._registry)  # type: ignore[arg-type]

    @property
    def heartbeats(self) -> int:
        return self._registry.heartbeats

    @property
    def failures(self) -> int:
        """Joins and heartbeats that were not heard."""
        return self._registry.failures

    def fall_silent(self) -> None:
        """As one that was killed: no more heartbeats, no leaving."""
        self._registry.silent = True

    def hang_up(self) -> None:
        """As one that was killed, with its connections."""
        self._registry.silent = True
        self._registry.close()

    def close(self) -> None:
        self._participant.close()
        self._registry.close()


class Watched:
    """What a follower was told."""

    def __init__(self, url: str, times: MembershipConfig) -> None:
        self._members: dict[str, Member] = {}
        self.gone: list[Member] = []
        self._follower = Follower(open_registry(url, times), self._changed)

    def _changed(self, difference: Difference) -> None:
        members = dict(self._members)
        for member in difference.gone:
            self.gone.append(member)
            members.pop(member.name, None)
        for member in (*difference.joined, *difference.changed):
            members[member.name] = member
        self._members = members

    @property
    def names(self) -> set[str]:
        return set(self._members)

    def get(self, name: str) -> Member:
        return self._members[name]

    def epoch(self, name: str) -> int:
        return self._members[name].epoch

    def close(self) -> None:
        self._follower.close()
