"""Settings of a whole deployment, as its TOML file spells them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from poolweave.errors import ConfigError
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.flows import flow_named
from poolweave.serving.instance_config import ClusterConfig, InstanceConfig
from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """`model` is served by all instances. Without `registry` a coordinator is started that listens at `coordinator`.

    A process that ends is started again, at most every `restart_s`. Raises ConfigError for names given twice, roles
    that the flow cannot use, and what is set for a part though it is the whole's.
    """

    instances: tuple[InstanceConfig, ...]
    door: DoorConfig = field(default_factory=DoorConfig)
    model: str = "smollm2"
    registry: str | None = None
    coordinator: str = "tcp://127.0.0.1:0"
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    start_timeout_s: float = 300.0
    restart_s: float = 1.0

    def __post_init__(self) -> None:
        ClusterConfig(instances=self.instances)  # its checks
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

    def _check_part(self, part: DoorConfig | InstanceConfig) -> None:
        name = part.name if isinstance(part, InstanceConfig) else "the door"
        if part.model not in ("smollm2", self.model):
            raise ConfigError(
                f"{name} has the model {part.model!r}, the deployment {self.model!r}; set model at the top",
                setting="model",
                value=part.model,
            )
        if part.registry:
            raise ConfigError(
                f"{name} has a registry of its own; set registry at the top", setting="registry", value=part.registry
            )

    def coordinator_config(self) -> CoordinatorConfig:
        """Of the embedded registry."""
        return CoordinatorConfig(listen=self.coordinator, membership=self.membership)

    def door_config(self, registry: str) -> DoorConfig:
        """Of the door, when this is the registry."""
        return replace(self.door, registry=registry, model=self.model, membership=self.membership)

    def instance_configs(self, registry: str) -> tuple[InstanceConfig, ...]:
        """Of the instances, when this is the registry."""
        return tuple(
            replace(one, registry=registry, model=self.model, membership=self.membership) for one in self.instances
        )
