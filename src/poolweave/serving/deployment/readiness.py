"""When a deployment can be used: every instance is one that the door sends requests to, or that its registry names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from poolweave.errors import DeadlineExceeded, PoolweaveError
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.http_call import get_json
from poolweave.serving.membership import open_registry

_LOOK_S = 0.05
_ROUTED = ("active", "draining")  # one that somebody drains already was reached, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Of the instances `names`. `who` knows them; `known()` says whom it does, and raises while it cannot be asked."""

    names: Collection[str]
    who: str
    known: Callable[[], Collection[str]]

    def lacking(self) -> list[str]:
        """Whom it does not know now."""
        try:
            return sorted(set(self.names) - set(self.known()))
        except PoolweaveError:
            return sorted(self.names)

    def wait(self, timeout_s: float, ending: threading.Event) -> bool:
        """Until nobody is lacking; false when `ending` was set before. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        while lacking := self.lacking():
            if ending.wait(_LOOK_S):
                return False
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{self.who} does not reach {', '.join(lacking)} after {timeout_s:g} s: look at what they print "
                    "and whether registry and listen can be reached, or raise start_timeout_s",
                    peer=lacking[0],
                    seconds=timeout_s,
                )
        return not ending.is_set()


def routed_by(url: str, key: str | None, names: Collection[str]) -> Readiness:
    """Behind the door at `url`, which may want a key."""

    def known() -> set[str]:
        found = get_json(f"{url}/deployment", key)["instances"]
        return {one["name"] for one in found if one["state"] in _ROUTED}

    return Readiness(names=names, who="the door", known=known)


def named_by(registry: str, membership: MembershipConfig, names: Collection[str]) -> Readiness:
    """Where the door is elsewhere."""

    def known() -> set[str]:
        asked = open_registry(registry, membership)
        try:
            configuration = asked.watch(None, membership.heartbeat_s)
        finally:
            asked.close()
        return set() if configuration is None else {member.name for member in configuration.members}

    return Readiness(names=names, who=f"the registry {registry}", known=known)
