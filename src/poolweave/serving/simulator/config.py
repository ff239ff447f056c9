"""What is simulated: instances, their device, the PD flow, faults. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import CostModel, Link
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.routes import SchedulerConfig
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
    """One instance's engine: its times, its KV, and the way to the others."""

    model: CostModel
    link: Link
    kv_bytes_per_token: int


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
class Faults:
    """`deaths`: (time, instance) SIGKILLs; each starts anew `restart_s` later, empty, under a new epoch.

    `message_loss` of heartbeats and eviction events are lost, the others come up to `message_delay_s` late.
    `coordinator_pauses`: (time, seconds) during which it is stopped.
    """

    deaths: tuple[tuple[float, str], ...] = ()
    restart_s: float | None = 30.0  # None: stays dead
    message_loss: float = 0.0
    message_delay_s: float = 0.0
    coordinator_pauses: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.message_loss < 1 or self.message_delay_s < 0:
            raise ConfigError(
                f"message_loss must be in [0, 1) and message_delay_s not negative, got {self}", setting="message_loss"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """`tells_evictions`: instances tell what they evict (KV events); otherwise the scheduler only guesses.

    `horizon_s`: the end, whatever is unfinished then counts as such; None: when all is answered.
    """

    device: Device
    instances: tuple[InstanceGroup, ...]
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    flow: Flow = Flow.PD_CACHING_3
    faults: Faults = field(default_factory=Faults)
    tells_evictions: bool = True
    horizon_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        roles = {group.role for group in self.instances}
        if not roles & {Role.PREFILL, Role.COLOCATED}:
            raise ConfigError("nobody prefills: add a prefill or colocated group", setting="instances")
        if (Role.PREFILL in roles) != (Role.DECODE in roles):
            raise ConfigError("prefill and decode instances need each other: add the other group", setting="instances")

    @property
    def names(self) -> dict[str, InstanceGroup]:
        """Instance names: role and number, `prefill-0`."""
        named: dict[str, InstanceGroup] = {}
        for group in self.instances:
            first = sum(1 for other in named.values() if other.role is group.role)
            named.update({f"{group.role.value}-{first + i}": group for i in range(group.count)})
        return named
