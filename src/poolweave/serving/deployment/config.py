"""Settings of a whole deployment, as its TOML file spells them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from poolweave.config import load
from poolweave.errors import ConfigError
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.calibration.calibration import BUILT_IN
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig, check_instance_names
from poolweave.serving.instance.flows import flow_named
from poolweave.serving.instance.named_model import NamedModel, check_names
from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.types import Role


def load_deployment(path: Path) -> DeploymentConfig:
    """The file at `path`; a calibration that it names counts from its folder. Raises ConfigError."""
    settings = load(path, DeploymentConfig)
    routing = settings.door.routing
    if routing.calibration != BUILT_IN:
        routing = replace(routing, calibration=str(path.absolute().parent / routing.calibration))
    routing.measured()  # it can be read
    return replace(settings, door=replace(settings.door, routing=routing))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """`model`, or each of `models`, is served by all instances. Without `registry` a coordinator is started that
    listens at `coordinator`.

    `serves`: with a door of its own; without one, its instances join the deployment of `registry`, where the others and
    the door are. A process that ends is started again, at most every `restart_s`; one that a signal stopped is ended
    after the membership's `ttl_s`. `spares`: so many instance processes are kept that have imported everything and
    follow those that die, at most one an instance. Raises ConfigError for names given twice, roles that the flow cannot
    use, and what is set for a part though it is the whole's.
    """

    instances: tuple[InstanceConfig, ...]
    door: DoorConfig = field(default_factory=DoorConfig)
    model: str = "smollm2"
    models: tuple[NamedModel, ...] = ()
    registry: str | None = None
    serves: bool = True
    coordinator: str = "tcp://127.0.0.1:0"
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    start_timeout_s: float = 300.0
    restart_s: float = 1.0
    spares: int = 2

    def __post_init__(self) -> None:
        if self.serves:
            ClusterConfig(instances=self.instances)  # its checks
        else:
            self._check_joining()
        check_names(self.models)
        if self.spares < 0:
            raise ConfigError(f"spares must be at least 0, got {self.spares}", setting="spares", value=self.spares)
        if self.serves:
            self._check_tenants()
            self._check_costs()
        parts: tuple[DoorConfig | InstanceConfig, ...] = (self.door, *self.instances)
        for part in parts:
            self._check_part(part)
        disaggregated = flow_named(self.door.flow).disaggregated
        if any(one.role is not Role.COLOCATED for one in self.instances) and not disaggregated:
            raise ConfigError(
                f"flow {self.door.flow!r} uses no prefill and decode instances; take another or role 'colocated'",
                setting="flow",
                value=self.door.flow,
            )

    def _check_costs(self) -> None:
        """A door cannot choose among decode instances without knowing what a step of theirs takes."""
        cost = self.door.routing.cost
        if cost is not None and cost.decode is None and any(one.role is Role.DECODE for one in self.instances):
            raise ConfigError(
                "door.routing.cost has no decode part, which choosing decode instances needs; give cost.decode",
                setting="door.routing.cost.decode",
            )

    def _check_part(self, part: DoorConfig | InstanceConfig) -> None:
        name = part.name if isinstance(part, InstanceConfig) else "the door"
        if part.model not in ("smollm2", self.model):
            raise ConfigError(
                f"{name} has the model {part.model!r}, the deployment {self.model!r}; set model at the top",
                setting="model",
                value=part.model,
            )
        if part.models:
            raise ConfigError(f"{name} has models of its own; set models at the top", setting="models")
        if part.registry:
            raise ConfigError(
                f"{name} has a registry of its own; set registry at the top", setting="registry", value=part.registry
            )

    def _check_joining(self) -> None:
        """Each role may be alone, its others are elsewhere."""
        check_instance_names(self.instances)
        if not self.registry:
            raise ConfigError(
                "instances that join a door elsewhere need its registry: set registry, or serves = true",
                setting="registry",
            )
        if self.door != DoorConfig():
            raise ConfigError("with serves = false no door is started: leave [door] out", setting="door")

    def _check_tenants(self) -> None:
        """A quota's tenant is a key whose KV is its own."""
        isolated = [key.name for key in self.door.keys if key.isolated]
        for quota in (quota for one in self.instances for quota in one.quotas):
            if quota.tenant and quota.tenant not in isolated:
                raise ConfigError(
                    f"quotas name the tenant {quota.tenant!r}, which is none of the isolated keys "
                    f"({', '.join(isolated) or 'there is none'}); set isolated = true at its key",
                    setting="quotas",
                    value=quota.tenant,
                )

    def coordinator_config(self) -> CoordinatorConfig:
        """Of the embedded registry."""
        return CoordinatorConfig(listen=self.coordinator, membership=self.membership)

    def door_config(self, registry: str) -> DoorConfig:
        """Of the door, when this is the registry."""
        return replace(self.door, registry=registry, model=self.model, models=self.models, membership=self.membership)

    def instance_configs(self, registry: str) -> tuple[InstanceConfig, ...]:
        """Of the instances, when this is the registry."""
        return tuple(
            replace(one, registry=registry, model=self.model, models=self.models, membership=self.membership)
            for one in self.instances
        )
