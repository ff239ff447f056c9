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
from poolweave.serving.control.messages import Connect, Counters, Done, Job, Stats, Welcome, pack_tokens
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.generation import Generation, Route
from poolweave.serving.instance.client import InstanceClient
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig
from poolweave.serving.instance.flows import flow_named
from poolweave.serving.process.child import Child, instance_program
from poolweave.serving.tenant_quota import Owner
from poolweave.types import Role, TokenIds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A running instance, or one model of it: the process's settings, the process, and the connection."""

    config: InstanceConfig
    child: Child
    client: InstanceClient

    @property
    def name(self) -> str:
        return self.client.peer

    @property
    def model(self) -> str:
        """Its name, where the process has several."""
        return self.client.welcome.model


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
        model: str = "",
        tenant: bytes | Owner = b"",
        timeout_s: float = 60.0,
    ) -> Generation:
        """Start a request: iterate the result for its events (tokens, hand-over, end with the request's record).

        Instances of a role take turns. `model`: its name, where they have several. KV is shared between requests of
        one `tenant` only: its salt, or the salt and who pays. Raises ConfigError for a flow that is none or that no
        instance here can run, and an unknown model, TypeError and ValueError for what is no token id; what happens
        later is raised by the iteration (see Generation).
        """
        sampling = sampling or SamplingParams()
        if sampling.seed is None:  # both phases must draw from the same one
            sampling = replace(sampling, seed=secrets.randbits(63))
        route = self._route(flow, model)
        with self._lock:
            request = next(self._names)
        owner = tenant if isinstance(tenant, Owner) else Owner(tenant)
        job = Job(request=request, tokens=pack_tokens(tokens), flow=flow, sampling=sampling, owner=owner)
        return Generation(job, route, timeout_s=timeout_s)

    def stats(self, name: str) -> Counters:
        """Counters of one instance. Raises PeerLost when it has died."""
        return self.member(name).client.call(Stats(), Counters)

    def restart(self, name: str) -> Member:
        """End the process of an instance if it still runs, start it anew with a new epoch, connect the others to it.

        Raises as the constructor does; the instance then stays out of use until a restart succeeds.
        """
        child, config = self.member(name).child, self.member(name).config
        for old in self.members:
            if old.child is child:
                old.client.close()
        child.close()
        fresh = self._start([config])
        with self._lock:
            self._members |= {new.name: new for new in fresh}
        for new in fresh:
            self._connect(new)
        return self.member(name)

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
                members += _stations(config, child, address)
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
            if member.model != other.model:
                continue
            for here, there in ((member, other), (other, member)):
                address = there.client.welcome.addresses[self.config.transport]
                try:
                    here.client.call(Connect(there.name, address), Done)
                except PeerLost as error:  # it died just now: its own restart connects it
                    logger.warning("%s is not connected to %s: %s", here.name, there.name, error)

    def _route(self, flow: str, model: str) -> Route:
        if not flow_named(flow).disaggregated:
            return Route(self._next(Role.COLOCATED, flow, model))
        return Route(self._next(Role.PREFILL, flow, model), self._next(Role.DECODE, flow, model))

    def _next(self, role: Role, flow: str, model: str) -> InstanceClient:
        """The living instance of `role` whose turn it is; a dead one when all are, whose PeerLost then says so."""
        with self._lock:
            models = {member.model for member in self._members.values()}
            if model not in models:
                raise ConfigError(
                    f"no model {model!r} is here: {', '.join(sorted(models))}", setting="model", value=model
                )
            fit = [one for one in self._members.values() if one.config.role is role and one.model == model]
            if not fit:
                raise ConfigError(
                    f"flow {flow} needs an instance of role {role.value}, this cluster has none",
                    setting="instances",
                    value=flow,
                )
            living = [member for member in fit if not member.client.lost] or fit
            return living[next(self._turns[role]) % len(living)].client


def _stations(config: InstanceConfig, child: Child, address: str) -> list[Member]:
    """A connection to each model of a process; the first one, at `address`, knows where the others are."""
    names = [place.name for place in config.stations]
    found = [Member(config, child, InstanceClient(address, peer=names[0]))]
    try:
        addresses = found[0].client.welcome.stations
        for name, model in zip(names[1:], config.model_names[1:], strict=True):
            found.append(Member(config, child, InstanceClient(addresses[model], peer=name)))
    except BaseException:
        for member in found:
            member.client.close()
        raise
    return found
