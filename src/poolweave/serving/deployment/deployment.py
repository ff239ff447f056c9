"""The processes of one deployment, from start to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from poolweave.serving.child import Program, instance_program
from poolweave.serving.deployment.config import DeploymentConfig
from poolweave.serving.deployment.keeper import Keeper, Upkeep, at_listen

_SLACK_S = 10.0  # beyond the door's own time to drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Onlooker:
    """Who watches a deployment. `up(name, address)` is called as each part is up, `printed(name, line)` for each line
    that a part prints, in any thread; once `ending` is set, a start that goes on is given up."""

    up: Callable[[str, str], None] = lambda name, address: None
    printed: Callable[[str, str], None] = lambda name, line: None
    ending: threading.Event = field(default_factory=threading.Event)


class Deployment:
    """Everything runs once constructed; who dies is started again. `close` (or `with`) drains the door and ends all.

    Raises what kept a part from starting, as its own class, and StartStopped when the onlooker's `ending` was set
    meanwhile; then no process is left.
    """

    def __init__(self, config: DeploymentConfig, onlooker: Onlooker | None = None) -> None:
        self._config = config
        self._onlooker = onlooker = onlooker or Onlooker()
        self._keepers: dict[str, Keeper] = {}
        plain = Upkeep(config.start_timeout_s, config.restart_s, hear=onlooker.printed)
        try:
            self.registry = config.registry or self._start_coordinator(plain)
            for instance in config.instance_configs(self.registry):
                self._start(instance_program(instance), plain)
            door = Program("door", "poolweave.serving.door.server", config.door_config(self.registry))
            self._start(door, replace(plain, at=at_listen("http://")))
            for name in ("door", *(one.name for one in config.instances)):
                onlooker.up(name, self._keepers[name].wait_ready(onlooker.ending))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the door takes requests."""
        return self._keepers["door"].wait_ready()

    @property
    def pids(self) -> dict[str, int]:
        """Of the parts that run now."""
        return {name: keeper.pid for name, keeper in self._keepers.items() if keeper.pid is not None}

    @property
    def restarts(self) -> int:
        """Processes that were started again."""
        return sum(keeper.restarts for keeper in self._keepers.values())

    def close(self) -> None:
        """The door first: it answers what it has. Idempotent."""
        door = self._keepers.pop("door", None)
        if door is not None:
            door.close(self._config.door.drain_s + _SLACK_S)
        for keeper in self._keepers.values():
            if keeper.name != "coordinator":
                keeper.begin_stop()
        for name in sorted(self._keepers, key=lambda name: name == "coordinator"):
            self._keepers[name].close()
        self._keepers.clear()

    def _start_coordinator(self, upkeep: Upkeep) -> str:
        program = Program("coordinator", "poolweave.serving.membership.coordinator", self._config.coordinator_config())
        self._start(program, replace(upkeep, at=at_listen()))
        address = self._keepers["coordinator"].wait_ready(self._onlooker.ending)
        self._onlooker.up("coordinator", address)
        return address

    def _start(self, program: Program, upkeep: Upkeep) -> None:
        self._keepers[program.name] = Keeper(program, upkeep)
