"""Which policies and flows to compare on which simulated deployment, in the words of `poolweave simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from poolweave.errors import ConfigError
from poolweave.scheduler.policies import POLICIES
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.calibration.calibration import load_calibration
from poolweave.serving.simulator.config import Flow, InstanceGroup, SimulationConfig
from poolweave.serving.simulator.devices import calibrated, llama2_13b_on_two_h800
from poolweave.serving.simulator.faults import Faults
from poolweave.types import Role

MAX_INSTANCES = 2048  # each join and each tick looks at all of them
_COLOCATED = {"colocated": Flow.PD_BASIC, "colocated-caching": Flow.PD_CACHING_3}  # all instances do both phases
FLOWS = (*_COLOCATED, *(flow.value for flow in Flow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """As a user writes it: `instances` as "prefill=3,decode=1", `policies` as "prompt_tree,session", `flows` of FLOWS
    likewise; each policy is run with each flow. Raises ConfigError for unknown roles, policies and flows, and for
    instances that cannot answer."""

    instances: str
    policies: str
    flows: str = Flow.PD_CACHING_3.value
    cache_tokens: int = 140_000
    kv_tokens: int = 140_000
    seed: int = 0
    device: Path | None = None  # a calibration; default: Llama-2-13B on two H800
    moves_kv: bool = False
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.series()  # refuses what cannot be

    def series(self) -> Mapping[str, SimulationConfig]:
        """What is compared, by name, in the order given: policies, or flows, or both."""
        policies = _names(self.policies, "policies", POLICIES)
        flows = _names(self.flows, "flow", FLOWS)
        base = self._base()
        found = {}
        for policy in policies:
            for flow in flows:
                name = flow if len(policies) == 1 and len(flows) > 1 else policy
                config = replace(_flowing(base, flow), scheduler=SchedulerConfig(policy=policy, seed=self.seed))
                found[name if min(len(policies), len(flows)) == 1 else f"{policy}, {flow}"] = config
        return found

    def _base(self) -> SimulationConfig:
        if self.seed < 0:
            raise ConfigError(f"a seed must not be negative, got {self.seed}", setting="seed", value=self.seed)
        return SimulationConfig(
            device=llama2_13b_on_two_h800() if self.device is None else calibrated(load_calibration(self.device)),
            instances=self._groups(),
            faults=self.faults,
            moves_kv=self.moves_kv,
            seed=self.seed,
        )

    def _groups(self) -> tuple[InstanceGroup, ...]:
        groups = tuple(self._group(word) for word in words(self.instances))
        total = sum(group.count for group in groups)
        if total > MAX_INSTANCES:
            raise ConfigError(
                f"instances={self.instances!r} are {total}, more than the {MAX_INSTANCES} that are simulated",
                setting="instances", value=self.instances, limit=MAX_INSTANCES,
            )  # fmt: skip
        return groups

    def _group(self, word: str) -> InstanceGroup:
        role, _, count = word.partition("=")
        if role not in [known.value for known in Role] or not count.isdecimal():
            raise ConfigError(
                f"instances={self.instances!r}: {word!r} is no role and count, as prefill=3,decode=1 or colocated=4",
                setting="instances",
                value=self.instances,
            )
        return InstanceGroup(
            role=Role(role), count=int(count), cache_tokens=self.cache_tokens, kv_tokens=self.kv_tokens
        )


def words(text: str) -> list[str]:
    """The words of "a,b"."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _names(text: str, setting: str, known: Mapping[str, object] | tuple[str, ...]) -> tuple[str, ...]:
    """Each once, in the order given."""
    for name in words(text):
        if name not in known:
            raise ConfigError(f"{setting}: {name!r} is none of {', '.join(known)}", setting=setting, value=text)
    if not words(text):
        raise ConfigError(f"{setting}={text!r} names none: {', '.join(known)}", setting=setting, value=text)
    return tuple(dict.fromkeys(words(text)))


def _flowing(base: SimulationConfig, flow: str) -> SimulationConfig:
    """The deployment under this flow: as many instances, that do both phases where it says so."""
    if flow not in _COLOCATED:
        return replace(base, flow=Flow(flow))
    together = tuple(replace(group, role=Role.COLOCATED) for group in base.instances)
    return replace(base, flow=_COLOCATED[flow], instances=together)
