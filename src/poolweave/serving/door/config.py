"""Settings of the HTTP door."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import ArchitectureModel
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.calibration.calibration import BUILT_IN, Calibration, load_calibration
from poolweave.serving.instance.flows import flow_named
from poolweave.serving.instance.named_model import NamedModel, check_names
from poolweave.types import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """One tenant's API key. Its requests over `max_in_flight` at a time are refused with 429 and counted; None: only
    the door's own bound holds. `isolated`: its KV is never shared with another tenant's."""

    name: str
    key: str
    max_in_flight: int | None = None
    isolated: bool = False

    def __post_init__(self) -> None:
        if not self.name or not self.key:
            raise ConfigError("an API key needs a name and a key", setting="keys", value=self.name)
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ConfigError(
                f"max_in_flight of key {self.name!r} must be at least 1, got {self.max_in_flight}",
                setting="max_in_flight",
                value=self.max_in_flight,
                limit=1,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How instances are chosen: `policy` of poolweave.scheduler, with the times that were measured on them.

    `calibration`: a file that `poolweave calibrate` wrote, or "smollm2-cpu", which comes with the package; `cost`
    replaces its times. `moves_kv`: prefixes are copied between instances where that is faster than computing them, and
    when their prompts keep each holder busy for over `hot_load` of the time. Raises ConfigError for a policy that is
    none.
    """

    policy: str = "prompt_tree"
    tree_ttl_s: float = 300.0
    calibration: str = BUILT_IN
    cost: ArchitectureModel | None = None
    moves_kv: bool = True
    hot_load: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        SchedulerConfig(
            policy=self.policy, tree_ttl_s=self.tree_ttl_s, hot_load=self.hot_load, seed=self.seed
        )  # its checks

    def measured(self) -> Calibration:
        """Raises ConfigError for a file that is none."""
        found = load_calibration(self.calibration)
        return found if self.cost is None else replace(found, cost=self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """`max_in_flight` bounds the requests that wait or run; more are refused with 429. `max_body` bounds the bytes of
    one; a larger one is refused with 413 before it is read. `timeout_s` bounds one request, `attempts` how often it is
    tried on other instances, `wait_s` how long it waits for an instance to come back. Without `keys` anybody may ask.
    Raises ConfigError for values out of range and for a flow that is none."""

    registry: str = ""
    model: str = "smollm2"
    models: tuple[NamedModel, ...] = ()  # in place of `model`
    served_name: str = ""  # in /v1/models; default: the model's own
    listen: str = "127.0.0.1:8000"
    flow: str = "pd-caching-3"
    keys: tuple[KeyConfig, ...] = ()
    max_in_flight: int = 256
    max_body: str | int = "8MiB"
    timeout_s: float = 600.0
    wait_s: float = 10.0
    drain_s: float = 30.0
    attempts: int = 4
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self) -> None:
        flow_named(self.flow)
        check_names(self.models)
        for setting in ("max_in_flight", "attempts"):
            if getattr(self, setting) < 1:
                value = getattr(self, setting)
                raise ConfigError(f"{setting} must be at least 1, got {value}", setting=setting, value=value, limit=1)
        parse_bytes(self.max_body, "max_body")
        for setting in ("timeout_s", "wait_s", "drain_s"):
            if getattr(self, setting) <= 0:
                value = getattr(self, setting)
                raise ConfigError(f"{setting} must be positive, got {value}", setting=setting, value=value)
        for what, values in (("name", [k.name for k in self.keys]), ("key", [k.key for k in self.keys])):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise ConfigError(f"two API keys have one {what}; each needs its own", setting="keys")
        self.endpoint  # noqa: B018 - checked now

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of `listen`. Raises ConfigError."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(
                f"listen={self.listen!r} is no HOST:PORT; write e.g. '127.0.0.1:8000', port 0 picks a free one",
                setting="listen",
                value=self.listen,
            )
        return host.strip("[]"), int(port)
