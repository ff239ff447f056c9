"""LocalCluster: instances as child processes of this one, connected pool to pool, and requests run over them."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType

from poolweave.errors import ConfigError, PeerLost
from poolweave.serving.child import Child, instance_program
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flows import flow_named
from poolweave.serving.generation import Generation, Route
from poolweave.serving.instance_client import InstanceClient
from poolweave.serving.instance_config import ClusterConfig, InstanceConfig
from poolweave.serving.messages import Connect, Counters, Done, Job, Stats, Welcome, pack_tokens
from poolweave.types import Role, TokenIds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A running instance: its settings, its process, and the connection to it."""

    config: InstanceConfig
    child: Child
    client: InstanceClient

    @property
    def name(self) -> str:
        return self.config.name


class LocalCluster:
    """Everything is up and connected once constructed; `close` (or `with`) ends every process.

    Raises what kept an instance from starting, as its own error class; then no process is left. `generate` may be
    called from any number of threads, one thread a generation; start, restart and close from one.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._lock = threading.Lock()  # guards _members, _turns, _names
        self._turns: dict[Role, itertools.count[int]] = {role: itertools.count() for role in Role}
        self._members: dict[str, Member] = {}
        try:
            for member in self._start(config.instances):
                self._members[member.name] = member
            for member in self.members:
                self._connect(member)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def members(self) -> tuple[Member, ...]:
        """All instances, in the order of the settings."""
        with self._lock:
            return tuple(self._members.values())

    def member(self, name: str) -> Member:
        """The instance of that name. Raises ConfigError."""
        with self._lock:
            if name not in self._members:
                raise ConfigError(
                    f"no instance is named {name!r}; there are {', '.join(self._members)}", setting="name", value=name
                )
            return self._members[name]

    def welcome(self) -> Welcome:
        """What the first instance says of itself; the model's sizes are the same in all."""
        return self.members[0].client.welcome

    def generate(
        self,
        tokens: TokenIds,
        sampling: SamplingParams | None = None,
        flow: str = "pd-caching-3",
        *,
        tenant: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Generation:
        """Start a request: iterate the result for its events (tokens, hand-over, end with the request's record).

        Instances of a role take turns. KV is shared between requests of one `tenant` only. Raises ConfigError for a
        flow that is none or that no instance here can run, TypeError and ValueError for what is no token id;
        what happens later is raised by the iteration (see Generation).
        """
        sampling = sampling or SamplingParams()
        if sampling.seed is None:  # both phases must draw from the same one
            sampling = replace(sampling, seed=secrets.randbits(63))
        route = self._route(flow)
        with self._lock:
            request = next(self._names)
        job = Job(request=request, tokens=pack_tokens(tokens), flow=flow, sampling=sampling, tenant=tenant)
        return Generation(job, route, timeout_s=timeout_s)

    def stats(self, name: str) -> Counters:
        """Counters of one instance. Raises PeerLost when it has died."""
        return self.member(name).client.call(Stats(), Counters)

    def restart(self, name: str) -> Member:
        """End the instance if it still runs, start it anew with a new epoch, and connect the others to it.

        Raises as the constructor does; the instance then stays out of use until a restart succeeds.
        """
        old = self.member(name)
        old.client.close()
        old.child.close()
        (new,) = self._start([old.config])
        with self._lock:
            self._members[name] = new
        self._connect(new)
        return new

    def close(self) -> None:
        """End every instance. Idempotent."""
        with self._lock:
            members, self._members = list(self._members.values()), {}
        for member in members:
            member.child.begin_stop()
        for member in members:
            member.client.close()
            member.child.close()

    def _start(self, configs: Iterable[InstanceConfig]) -> list[Member]:
        """Start all at once, since loading a model takes its time; all or none."""
        children: list[tuple[InstanceConfig, Child]] = []
        members: list[Member] = []
        try:
            for config in configs:
                children.append((config, Child(instance_program(config))))
            for config, child in children:
                address = child.wait_ready(self.config.start_timeout_s)
                members.append(Member(config, child, InstanceClient(address, peer=config.name)))
        except BaseException:
            for member in members:
                member.client.close()
            for _, child in children:
                child.kill()
                child.close()
            raise
        return members

    def _connect(self, member: Member) -> None:
        """Let the pools of `member` and of every living instance of the other phase reach each other."""
        for other in self.members:
            if {member.config.role, other.config.role} != {Role.PREFILL, Role.DECODE} or not other.child.alive:
                continue
            for here, there in ((member, other), (other, member)):
                address = there.client.welcome.addresses[self.config.transport]
                try:
                    here.client.call(Connect(there.name, address), Done)
                except PeerLost as error:  # it died just now: its own restart connects it
                    logger.warning("%s is not connected to %s: %s", here.name, there.name, error)

    def _route(self, flow: str) -> Route:
        if not flow_named(flow).disaggregated:
            return Route(self._next(Role.COLOCATED, flow))
        return Route(self._next(Role.PREFILL, flow), self._next(Role.DECODE, flow))

    def _next(self, role: Role, flow: str) -> InstanceClient:
        """The living instance of `role` whose turn it is; a dead one when all are, whose PeerLost then says so."""
        with self._lock:
            fit = [member for member in self._members.values() if member.config.role is role]
            if not fit:
                raise ConfigError(
                    f"flow {flow} needs an instance of role {role.value}, this cluster has none",
                    setting="instances",
                    value=flow,
                )
            living = [member for member in fit if not member.client.lost] or fit
            return living[next(self._turns[role]) % len(living)].client
