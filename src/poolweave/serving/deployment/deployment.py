"""The processes of one deployment, from start to end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from poolweave.serving.child import Program, instance_program
from poolweave.serving.deployment.config import DeploymentConfig
from poolweave.serving.deployment.keeper import Keeper, Upkeep, at_listen

_SLACK_S = 10.0  # beyond the door's own time to drain


class Deployment:
    """Everything runs once constructed; who dies is started again. `close` (or `with`) drains the door and ends all.

    `progress(name, address)` is called as each part is up. Raises what kept a part from starting, as its own class;
    then no process is left.
    """

    def __init__(self, config: DeploymentConfig, progress: Callable[[str, str], None] = lambda *said: None) -> None:
        self._config = config
        self._keepers: dict[str, Keeper] = {}
        plain = Upkeep(config.start_timeout_s, config.restart_s)
        try:
            self.registry = config.registry or self._start_coordinator(plain, progress)
            for instance in config.instance_configs(self.registry):
                self._start(instance_program(instance), plain)
            door = Program("door", "poolweave.serving.door.server", config.door_config(self.registry))
            self._start(door, Upkeep(config.start_timeout_s, config.restart_s, at_listen("http://")))
            for name in ("door", *(one.name for one in config.instances)):
                progress(name, self._keepers[name].wait_ready())
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

    def _start_coordinator(self, upkeep: Upkeep, progress: Callable[[str, str], None]) -> str:
        program = Program("coordinator", "poolweave.serving.membership.coordinator", self._config.coordinator_config())
        self._start(program, Upkeep(upkeep.start_timeout_s, upkeep.restart_s, at_listen()))
        address = self._keepers["coordinator"].wait_ready()
        progress("coordinator", address)
        return address

    def _start(self, program: Program, upkeep: Upkeep) -> None:
        self._keepers[program.name] = Keeper(program, upkeep)
