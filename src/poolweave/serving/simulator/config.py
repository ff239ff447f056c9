"""What is simulated: instances, their device, the PD flow. Values only; what goes wrong: faults.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import CostModel, KVLink
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.simulator.faults import Faults
from poolweave.types import Role


class Flow(enum.Enum):
    """Which KV is kept where, and what is sent (facts of MemServe §5). Colocated instances cache in any flow but
    PD_BASIC."""

    PD_BASIC = "pd-basic"  # nothing is kept
    PD_CACHING_1 = "pd-caching-1"  # prefill instances keep prompts; all KV is sent
    PD_CACHING_2 = "pd-caching-2"  # decode instances keep prompts and answers; only what they lack is sent
    PD_CACHING_3 = "pd-caching-3"  # answers are sent back to the prefill instance

    @property
    def prefill_keeps(self) -> bool:
        return self is not Flow.PD_BASIC

    @property
    def decode_keeps(self) -> bool:
        return self in (Flow.PD_CACHING_2, Flow.PD_CACHING_3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One instance's engine: its times, and its KV's way to the others."""

    model: CostModel
    kv_link: KVLink


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """`count` equal instances. `cache_tokens`: room for historical KV; `kv_tokens`: for that of running requests."""

    role: Role
    count: int = 1
    cache_tokens: int = 100_000
    kv_tokens: int = 100_000
    slowness: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.cache_tokens < 0 or self.kv_tokens < 1 or self.slowness <= 0:
            raise ConfigError(
                f"an instance group needs a count, tokens and a slowness above zero, got {self}", setting="instances"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """`moves_kv`: prefixes are fetched from other instances where that is faster; the scheduler reckons with the
    device's own link. `tells_evictions`: instances tell what they evict (KV events); otherwise the scheduler only
    guesses. `horizon_s`: the end, whatever is unfinished then counts as such; None: when all is answered.
    """

    device: Device
    instances: tuple[InstanceGroup, ...]
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    flow: Flow = Flow.PD_CACHING_3
    faults: Faults = field(default_factory=Faults)
    moves_kv: bool = False
    tells_evictions: bool = True
    horizon_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        roles = {group.role for group in self.instances}
        if not roles & {Role.PREFILL, Role.COLOCATED}:
            raise ConfigError("nobody prefills: add a prefill or colocated group", setting="instances")
        if (Role.PREFILL in roles) != (Role.DECODE in roles):
            raise ConfigError("prefill and decode instances need each other: add the other group", setting="instances")
        if self.scheduler.kv_link is not None:
            raise ConfigError(
                "the device has the link that KV moves over; set moves_kv to have it used", setting="kv_link"
            )
        for _, name in self.faults.deaths:
            if name not in self.names:
                raise ConfigError(
                    f"{name!r} is to die but is none of {', '.join(self.names)}", setting="deaths", value=name
                )

    @property
    def names(self) -> dict[str, InstanceGroup]:
        """Instance names: role and number, `prefill-0`."""
        named: dict[str, InstanceGroup] = {}
        for group in self.instances:
            first = sum(1 for other in named.values() if other.role is group.role)
            named.update({f"{group.role.value}-{first + i}": group for i in range(group.count)})
        return named
