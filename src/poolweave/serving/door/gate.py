"""Who may come in, and how many at a time. Knows no HTTP and no instance."""

from __future__ import annotations

import asyncio
import enum
import hmac
from collections import Counter

from poolweave.serving.door.config import DoorConfig, KeyConfig

_EVERYBODY = KeyConfig(name="everybody", key="-")


class Reason(str, enum.Enum):
    """Why a request was turned away."""

    DRAINING = "draining"
    FULL = "full"
    QUOTA = "quota"
    KEY = "key"


class TurnedAway(Exception):
    """The request does not come in. `tenant`: whose it was, "" when that is not known."""

    def __init__(self, reason: Reason, tenant: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.tenant = tenant
        self.message = message


class Gate:
    """Counts who is inside. One rule for all: over a bound, the new request is turned away and counted; those inside
    are not touched, and a tenant at its own bound takes nothing of what others may use."""

    def __init__(self, config: DoorConfig) -> None:
        self._keys = config.keys
        self._limit = config.max_in_flight
        self._inside: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    @property
    def inside(self) -> int:
        """Requests that wait or run."""
        return self._inside.total()

    def tenant(self, key: str | None) -> KeyConfig:
        """Whose key this is. Raises TurnedAway for none of ours."""
        if not self._keys:
            return _EVERYBODY
        found = None
        for known in self._keys:  # all of them, so that the time tells nothing
            if key is not None and hmac.compare_digest(known.key.encode(), key.encode()):
                found = known
        if found is None:
            message = "no API key was given" if key is None else "this API key is not known"
            raise TurnedAway(Reason.KEY, "", f"{message}; send 'Authorization: Bearer KEY'")
        return found

    def enter(self, tenant: KeyConfig) -> Place:
        """A place inside, to be left at the request's end. Raises TurnedAway."""
        if self.draining:
            raise TurnedAway(Reason.DRAINING, tenant.name, "this server is about to stop; ask another one")
        if tenant.max_in_flight is not None and self._inside[tenant.name] >= tenant.max_in_flight:
            raise TurnedAway(
                Reason.QUOTA,
                tenant.name,
                f"{tenant.max_in_flight} requests of {tenant.name} run already, which is max_in_flight of its key",
            )
        if self.inside >= self._limit:
            raise TurnedAway(
                Reason.FULL, tenant.name, f"{self._limit} requests run or wait already, which is max_in_flight"
            )
        self._inside[tenant.name] += 1
        self._empty.clear()
        return Place(self, tenant.name)

    def _leave(self, tenant: str) -> None:
        self._inside[tenant] -= 1
        if not self.inside:
            self._empty.set()

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False after `timeout_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True


class Place:
    """One request's place inside the gate."""

    __slots__ = ("_gate", "_tenant")

    def __init__(self, gate: Gate, tenant: str) -> None:
        self._gate: Gate | None = gate
        self._tenant = tenant

    def leave(self) -> None:
        """Make room for another one. Idempotent."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate._leave(self._tenant)
