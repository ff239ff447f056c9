"""Whether a deployment is whole: every part has a process, the registry names every instance, the door routes to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from ref_waiting import until

from poolweave.errors import PoolweaveError
from poolweave.scheduler.configuration import Member
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.deployment import Deployment
from poolweave.serving.http_call import get_json
from poolweave.serving.membership import open_registry


def members(deployment: Deployment) -> dict[str, Member]:
    """By name, as a registry that has just been asked says; nobody while it does not answer."""
    registry = open_registry(deployment.registry, MembershipConfig(ttl_s=2.0, heartbeat_s=0.3))  # its patience
    try:
        configuration = registry.watch(None, 0.5)
    except PoolweaveError:
        return {}
    finally:
        registry.close()
    return {} if configuration is None else {member.name: member for member in configuration.members}


def routed(deployment: Deployment) -> dict[str, int]:
    """Epochs of those whom the door sends requests to."""
    try:
        found = get_json(f"{deployment.url}/deployment")["instances"]
    except PoolweaveError:
        return {}
    return {one["name"]: one["epoch"] for one in found if one["state"] == "active"}


class Whole:
    """What there was before something was done to a deployment, and whether it is all there again."""

    def __init__(self, deployment: Deployment) -> None:
        """Waits until it can tell: a coordinator that is busy is asked again."""
        self._deployment = deployment
        self.pids: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        self.killed: set[str] = set()
        until(self._stands, "the deployment is whole at first", 300)

    def _stands(self) -> bool:
        self.members, self.pids = members(self._deployment), self._deployment.pids
        epochs = {name: member.epoch for name, member in self.members.items()}
        parts = {"coordinator", "door", *(name.partition(".")[0] for name in epochs)}
        return bool(epochs) and routed(self._deployment) == epochs and self.pids.keys() == parts

    def kill(self, names: Iterable[str], number: signal.Signals = signal.SIGKILL) -> None:
        """To each, one right after another; SIGSTOP, too, is the end of a process that is never let go on."""
        for name in names:
            self.killed.add(name)
            os.kill(self.pids[name], number)

    def again(self) -> bool:
        """Everybody has a process, a lease and a link; who was killed, others than before."""
        pids = self._deployment.pids
        if pids.keys() != self.pids.keys() or any(pids[name] == self.pids[name] for name in self.killed):
            return False
        there = members(self._deployment)
        if there.keys() != self.members.keys() or any(member.suspect for member in there.values()):
            return False
        new = {name for name, member in there.items() if member.epoch != self.members[name].epoch}
        if not {name for name in there if name.partition(".")[0] in self.killed} <= new:
            return False
        return routed(self._deployment) == {name: member.epoch for name, member in there.items()}
