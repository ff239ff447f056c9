"""A door of this process over fake instances on threads: real HTTP, real control protocol, no model."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import httpx
from ref_instance import Thread
from ref_waiting import until

from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.server import DoorServer
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.membership.coordinator import Coordinator, CoordinatorConfig
from poolweave.types import Role

TIMES = MembershipConfig(ttl_s=2.0, heartbeat_s=0.2)


class World:
    """A coordinator, fake instances and a door, all in this process."""

    def __init__(self, folder: Path, roles: tuple[Role, ...], **door: Any) -> None:
        self.coordinator = Coordinator(CoordinatorConfig(membership=TIMES))
        self._threads = [threading.Thread(target=self.coordinator.serve, daemon=True)]
        self._threads[0].start()
        self.instances: dict[str, Thread] = {}
        for number, role in enumerate(roles):
            self.add(f"{role.value}-{number}", role)
        settings = {"model": str(folder), "listen": "127.0.0.1:0", "membership": TIMES, **door}
        self._config = DoorConfig(registry=self.coordinator.address, **settings)
        self.model = folder.name
        self._open()
        self.headers = {"Authorization": f"Bearer {door['keys'][0].key}"} if door.get("keys") else {}
        until(lambda: self.believed == len(roles), "all instances are linked and believed")

    def _open(self) -> None:
        self.door = DoorServer(self._config)
        self._threads.append(threading.Thread(target=self.door.serve, daemon=True))
        self._threads[1].start()
        self.client = httpx.Client(base_url=self.door.address, timeout=60)

    def _shut(self) -> None:
        self.client.close()
        self.door.stop()
        self._threads.pop().join()
        self.door.close()

    def restart_door(self) -> None:
        """Another door: it knows nothing of what the last one did."""
        self._shut()
        self._open()
        until(lambda: self.believed == len(self.instances), "all instances are linked and believed")

    @property
    def usable(self) -> int:
        found = self.client.get("/deployment", headers=self.headers).json()["instances"]
        return sum(one["state"] == "active" for one in found)

    @property
    def believed(self) -> int:
        """Those that can be used, and told what they hold already; until then they are credited with half of it."""
        found = self.client.get("/deployment", headers=self.headers).json()["instances"]
        return sum(one["state"] == "active" and one["events"] == "live" for one in found)

    def add(self, name: str, role: Role, token_s: float = 0.0) -> Thread:
        config = InstanceConfig(name=name, role=role, registry=self.coordinator.address, membership=TIMES)
        self.instances[name] = Thread(config, token_s)
        return self.instances[name]

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.client.post(path, json={"model": self.model, **fields})

    def log(self, kind: str) -> list[str]:
        """Names of the requests that instances were told this of."""
        logs = itertools.chain.from_iterable(thread.instance.log for thread in self.instances.values())
        return [request for what, request in logs if what == kind]

    def hold(self, open_: bool = False) -> None:
        for thread in self.instances.values():
            (thread.instance.gate.set if open_ else thread.instance.gate.clear)()

    def close(self) -> None:
        self.hold(open_=True)
        self._shut()
        for thread in self.instances.values():
            thread.close()
        self.coordinator.stop()
        self._threads[0].join()
        self.coordinator.close()
