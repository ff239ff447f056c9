"""The embedded shell's process: Membership behind the control protocol's socket.

It keeps nothing on disk. A restarted coordinator is told by its members that they are there; one that was stopped for
longer than the TTL has not seen them fail, so nobody is lost by either.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from poolweave.scheduler.membership import Membership, MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Announce, Effect, Gone, Heartbeat, Join, Refused
from poolweave.serving.control.messages import Done
from poolweave.serving.control.server import Caller, RpcServer
from poolweave.serving.membership.wire import (
    Announced,
    Answer,
    AskJoin,
    Beat,
    Drain,
    Greet,
    Leave,
    MemberRequest,
    Watch,
)
from poolweave.serving.process.service import end_process, run_process

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """`listen`: where members reach it. A fixed port lets them find a restarted one."""

    listen: str = "tcp://127.0.0.1:0"
    membership: MembershipConfig = field(default_factory=MembershipConfig)


class Coordinator:
    """Binds at construction; `serve` runs until `stop`. Raises AddressInUse, ConfigError."""

    def __init__(self, config: CoordinatorConfig) -> None:
        epoch = secrets.randbits(63) | 1
        self._tick_s = config.membership.heartbeat_s / 2
        self._membership = Membership(config.membership, coordinator=epoch)
        self._server = RpcServer(config.listen, epoch, name="coordinator", accepts=MemberRequest, hello=Greet)
        self._watchers: list[tuple[Caller, float]] = []  # and until when
        self._clients: dict[tuple[str, int], bytes] = {}  # by name and epoch: over which connection it was heard last

    @property
    def address(self) -> str:
        """Where members and watchers connect."""
        return self._server.address

    def serve(self) -> int:
        """Run until `stop`; -> the process's exit code."""
        logger.info("coordinator serves at %s", self.address)
        self._server.serve(self._handle, on_gone=self._forget, tick=self._tick, tick_s=self._tick_s)
        return 0

    def stop(self) -> None:
        """Let `serve` return; from any thread."""
        self._server.stop()

    def close(self) -> None:
        """Idempotent."""
        self._server.close()

    def _handle(self, caller: Caller, request: Any) -> None:
        now = time.monotonic()
        if isinstance(request, AskJoin):
            self._answer(caller, request.join, self._membership.join(request.join, now))
        elif isinstance(request, Beat):
            self._answer(caller, request.heartbeat, self._membership.heartbeat(request.heartbeat, now))
        elif isinstance(request, Watch):
            self._watch(caller, request, now)
        else:
            if isinstance(request, Drain):
                self._follow(self._membership.drain(request.name, now))
            elif isinstance(request, Leave):
                self._follow(self._membership.leave(request.name, request.epoch, now))
            caller.reply(Done())

    def _answer(self, caller: Caller, message: Join | Heartbeat, effects: tuple[Effect, ...]) -> None:
        answer = Answer()
        for effect in effects:
            if isinstance(effect, Admitted):
                answer = Answer(admitted=effect)
            elif isinstance(effect, Refused):
                answer = Answer(refused=effect)
        caller.reply(answer)
        self._follow(effects)
        if answer.refused is None:
            self._clients[message.name, message.epoch] = caller.client

    def _watch(self, caller: Caller, request: Watch, now: float) -> None:
        current = self._membership.configuration
        if (request.coordinator, request.version) != (current.coordinator, current.version):
            caller.reply(Announced(current))
        else:
            self._watchers.append((caller, now + request.timeout_s))

    def _follow(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Gone):
                logger.info("%s is gone: %s", effect.member.name, effect.why.value)
                self._clients.pop((effect.member.name, effect.member.epoch), None)
            elif isinstance(effect, Announce):
                watchers, self._watchers = self._watchers, []
                for caller, _ in watchers:
                    caller.reply(Announced(effect.configuration))

    def _tick(self) -> None:
        now = time.monotonic()
        self._follow(self._membership.tick(now))
        for caller, until in self._watchers:
            if until <= now:
                caller.reply(Done())
        self._watchers = [(caller, until) for caller, until in self._watchers if until > now]

    def _forget(self, client: bytes) -> None:
        self._watchers = [(caller, until) for caller, until in self._watchers if caller.client != client]
        for name, epoch in [life for life, heard in self._clients.items() if heard == client]:
            self._membership.hung_up(name, epoch, time.monotonic())


def main(arguments: list[str] | None = None) -> int:
    """The process; -> its exit code."""
    return run_process(CoordinatorConfig, Coordinator, "poolweave.serving.membership.coordinator", arguments)


if __name__ == "__main__":
    end_process(main())
