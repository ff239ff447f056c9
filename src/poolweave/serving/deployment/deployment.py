"""The processes of one deployment, from start to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from poolweave.serving.deployment.config import DeploymentConfig
from poolweave.serving.deployment.keeper import Keeper, StartStopped, Upkeep, at_listen
from poolweave.serving.deployment.readiness import Readiness, named_by, routed_by
from poolweave.serving.deployment.spares import Spares
from poolweave.serving.process.child import Program, instance_program

_SLACK_S = 10.0  # beyond the door's own time to drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Onlooker:
    """Who watches a deployment. `up(name, address)` is called as each part is up, `printed(name, line)` for each line
    that a part prints, in any thread; once `ending` is set, a start that goes on is given up."""

    up: Callable[[str, str], None] = lambda name, address: None
    printed: Callable[[str, str], None] = lambda name, line: None
    ending: threading.Event = field(default_factory=threading.Event)


class Deployment:
    """Once constructed, everything runs and the door can send requests to every instance, or the registry names each
    where the door is elsewhere; who dies is started again.
    `close` (or `with`) drains the door and ends all.

    Raises what kept a part from starting, as its own class, DeadlineExceeded when the door does not reach an instance,
    and StartStopped when the onlooker's `ending` was set meanwhile; then no process is left.
    """

    def __init__(self, config: DeploymentConfig, onlooker: Onlooker | None = None) -> None:
        self._config = config
        self._onlooker = onlooker = onlooker or Onlooker()
        self._keepers: dict[str, Keeper] = {}
        self._spares: Spares | None = None
        plain = Upkeep(config.start_timeout_s, config.restart_s, config.membership.ttl_s, hear=onlooker.printed)
        try:
            self.registry = config.registry or self._start_coordinator(plain)
            programs = [instance_program(instance) for instance in config.instance_configs(self.registry)]
            if config.spares:
                self._spares = Spares(programs[0], min(config.spares, len(programs)), plain.stopped_s)
            with contextlib.nullcontext() if self._spares is None else self._spares.starting():
                self._start_all(programs, plain)
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
        """Where the door takes requests, if it `serves`."""
        return self._keepers["door"].wait_ready()

    @property
    def readiness(self) -> Readiness:
        """Whom the door can send requests to; whom the registry names, where the door is elsewhere."""
        config = self._config
        names = [place.name for one in config.instance_configs(self.registry) for place in one.stations]
        if not config.serves:
            return named_by(self.registry, config.membership, names)
        return routed_by(self.url, config.door.keys[0].key if config.door.keys else None, names)

    @property
    def pids(self) -> dict[str, int]:
        """Of the parts that run now."""
        return {name: keeper.pid for name, keeper in self._keepers.items() if keeper.pid is not None}

    @property
    def restarts(self) -> int:
        """Processes that were started again."""
        return sum(keeper.restarts for keeper in self._keepers.values())

    @property
    def spares(self) -> Spares | None:
        """Who wait to follow instances that die; None where the settings want none."""
        return self._spares

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
        if self._spares is not None:
            self._spares.close()

    def _start_all(self, programs: Sequence[Program], plain: Upkeep) -> None:
        """The instances and the door, until they can be used."""
        config, onlooker = self._config, self._onlooker
        for program in programs:
            self._start(program, replace(plain, spares=self._spares))
        if config.serves:
            door = Program("door", "poolweave.serving.door.server", config.door_config(self.registry))
            self._start(door, replace(plain, at=at_listen("http://")))
        for name in (*(["door"] if config.serves else []), *(one.name for one in config.instances)):
            onlooker.up(name, self._keepers[name].wait_ready(onlooker.ending))
        if not self.readiness.wait(config.start_timeout_s, onlooker.ending):
            raise StartStopped

    def _start_coordinator(self, upkeep: Upkeep) -> str:
        program = Program("coordinator", "poolweave.serving.membership.coordinator", self._config.coordinator_config())
        self._start(program, replace(upkeep, at=at_listen()))
        address = self._keepers["coordinator"].wait_ready(self._onlooker.ending)
        self._onlooker.up("coordinator", address)
        return address

    def _start(self, program: Program, upkeep: Upkeep) -> None:
        self._keepers[program.name] = Keeper(program, upkeep)
