"""Where a deployment's members are written down: the seam between membership's two shells and who uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from poolweave.errors import ConfigError
from poolweave.scheduler.configuration import Configuration
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refused
from poolweave.serving.control.endpoint import check_endpoint


class Registry(Protocol):
    """All calls block, any thread may make them, and each raises PeerLost or DeadlineExceeded while the registry
    cannot be reached: it may come back, so call again."""

    def join(self, message: Join) -> Admitted | Refused:
        """Ask to become a member."""

    def heartbeat(self, message: Heartbeat) -> Refused | None:
        """Renew a lease; None when it was renewed."""

    def leave(self, name: str, epoch: int) -> None:
        """This life ends in order."""

    def drain(self, name: str) -> None:
        """Give this member no new requests."""

    def watch(self, seen: Configuration | None, timeout_s: float) -> Configuration | None:
        """Wait for a configuration other than `seen`; None when there was none within `timeout_s`."""

    def close(self) -> None:
        """Idempotent. Calls that wait end."""


def open_registry(url: str, config: MembershipConfig) -> Registry:
    """The registry at `tcp://HOST:PORT` or `ipc://PATH` (a coordinator), or `etcd://HOST:PORT/DEPLOYMENT` (etcd).

    Does not connect yet. Raises ConfigError for another scheme or no port, ModuleNotFoundError without etcd3gw.
    """
    scheme = url.partition("://")[0]
    if scheme not in _SHELLS:
        raise ConfigError(
            f"registry={url!r} is none of {', '.join(f'{name}://' for name in _SHELLS)}", setting="registry", value=url
        )
    return _SHELLS[scheme](url, config)


def _embedded(url: str, config: MembershipConfig) -> Registry:
    from poolweave.serving.membership.coordinator_client import CoordinatorClient

    check_endpoint(url, "registry", least_port=1)
    return CoordinatorClient(url, config)


def _etcd(url: str, config: MembershipConfig) -> Registry:
    from poolweave.serving.membership.etcd import EtcdRegistry

    return EtcdRegistry.open(url, config)


_SHELLS: Mapping[str, Callable[[str, MembershipConfig], Registry]] = {"tcp": _embedded, "ipc": _embedded, "etcd": _etcd}
