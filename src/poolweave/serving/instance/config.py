"""Settings of one instance and of a cluster of them, as a TOML file spells them. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from poolweave.errors import ConfigError
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.crosspool.config import CrossPoolConfig
from poolweave.serving.engine.config import EngineConfig
from poolweave.serving.instance.granularity import Granularity, check_granularity
from poolweave.serving.instance.named_model import NamedModel, check_names
from poolweave.serving.tenant_quota import TenantQuota, check_quotas
from poolweave.types import Role, parse_bytes

Transport = Literal["shm", "tcp"]
Kind = Literal["torch", "crosspool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """One process: its pool, its engine and where it listens.

    `name` is the instance's in every address and message. `model`: "smollm2" or a local Hugging Face directory.
    `listen` takes control messages; KV goes by the two transports, always both. `lease_s` bounds how long blocks
    wait for a peer that says nothing. `registry`: where the deployment's members are written down; None: nowhere,
    whoever started the instance connects it. `kv_order` is how a block lies in memory, `granularity` how finely KV is
    handed over: "by-layer" while it is computed, "by-request" afterwards, "auto" as measured costs say.
    `models` in place of `model`: one process serves them all, taking turns, each at a station of its own that is named
    NAME.MODEL, has a pool of `hbm` and `dram`, and listens at `listen` or the next port. `kind` "crosspool" decodes
    them natively from one KV pool and one weights pool, as `crosspool` says. `quotas` bound what tenants take of each
    pool. Raises ConfigError for values out of
    range.
    """

    name: str
    role: Role
    kind: Kind = "torch"
    model: str = "smollm2"
    models: tuple[NamedModel, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    hbm: str | int = "512MiB"
    dram: str | int = 0
    listen: str = "tcp://127.0.0.1:0"
    lease_s: float = 30.0
    registry: str | None = None
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    kv_order: Literal["aggregated", "layered"] = "aggregated"
    granularity: Granularity = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)
    crosspool: CrossPoolConfig = field(default_factory=CrossPoolConfig)
    quotas: tuple[TenantQuota, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in tuple(Role):
            roles = ", ".join(role.value for role in Role)
            raise ConfigError(f"role {self.role!r} is not one of {roles}", setting="role", value=self.role)
        object.__setattr__(self, "role", Role(self.role))
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or len(self.name) > 64:
            raise ConfigError(
                f"instance name {self.name!r} must be 1 to 64 letters, digits, '-', '_' or '.'",
                setting="name",
                value=self.name,
            )
        check_granularity(self.granularity)
        check_quotas(self.quotas)
        if self.kv_order not in ("aggregated", "layered"):
            raise ConfigError(
                f"kv_order {self.kv_order!r} is neither 'aggregated' nor 'layered'",
                setting="kv_order",
                value=self.kv_order,
            )
        for setting in ("hbm", "dram"):
            parse_bytes(getattr(self, setting), setting)
        if self.lease_s <= 0:
            raise ConfigError(f"lease_s must be positive, got {self.lease_s}", setting="lease_s", value=self.lease_s)
        self._check_models()

    def _check_models(self) -> None:
        check_names(self.models)
        long = [place.name for place in self.models and self.stations if len(place.name) > 64]
        if long:
            raise ConfigError(f"station name {long[0]!r} has more than 64 letters", setting="name", value=long[0])
        if self.kind not in ("torch", "crosspool"):
            raise ConfigError(f"kind {self.kind!r} is neither 'torch' nor 'crosspool'", setting="kind", value=self.kind)
        if self.kind == "crosspool" and (self.role is not Role.DECODE or self.kv_order != "aggregated"):
            raise ConfigError(
                f"an instance of kind 'crosspool' has the role 'decode' and kv_order 'aggregated', not "
                f"{self.role.value!r} and {self.kv_order!r}", setting="kind", value=self.role.value,
            )  # fmt: skip

    @property
    def stations(self) -> tuple[InstanceConfig, ...]:
        """One a model, each with that model alone; this one where it has no `models`."""
        if not self.models:
            return (self,)
        return tuple(
            replace(
                self, name=f"{self.name}.{one.name}", model=one.path, models=(), listen=_behind(self.listen, number)
            )
            for number, one in enumerate(self.models)
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Of the stations: the models' names; "" where there is one without a name."""
        return tuple(one.name for one in self.models) or ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The instances that one LocalCluster starts, and the transport between their pools.

    Raises ConfigError for two instances of one name, and for prefill without decode or the other way round.
    """

    instances: tuple[InstanceConfig, ...]
    transport: Transport = "shm"
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_instance_names(self.instances)
        roles = {instance.role for instance in self.instances}
        if (Role.PREFILL in roles) != (Role.DECODE in roles):
            raise ConfigError(
                "prefill and decode instances need each other; add the other role or use 'colocated'",
                setting="instances",
            )
        if self.transport not in ("shm", "tcp"):
            raise ConfigError(
                f"transport {self.transport!r} is neither 'shm' nor 'tcp'", setting="transport", value=self.transport
            )


def check_instance_names(instances: Sequence[InstanceConfig]) -> None:
    """Raises ConfigError for none, and for two of one name."""
    doubled = [name for name, count in Counter(one.name for one in instances).items() if count > 1]
    if doubled:
        raise ConfigError(f"two instances are named {doubled[0]!r}", setting="instances", value=doubled[0])
    if not instances:
        raise ConfigError("a cluster needs at least one instance", setting="instances")


def _behind(listen: str, number: int) -> str:
    """The port `number` behind that of `listen`; 0 stays 0."""
    head, _, port = listen.rpartition(":")
    return f"{head}:{int(port) + number}" if port.isdigit() and int(port) else listen
