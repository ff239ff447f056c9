"""The calling side of one instance, for programs with threads."""

from __future__ import annotations

from poolweave.serving.control.client import RpcClient
from poolweave.serving.control.messages import Hello, Reply, Welcome


class InstanceClient(RpcClient):
    """Connected and welcomed once constructed: `welcome` says who the instance is.

    `peer` is the name used in errors. Raises PeerLost when nobody listens at `address`, DeadlineExceeded when
    somebody does but says nothing, ConfigError for an address that is none.
    """

    def __init__(self, address: str, *, peer: str, timeout_s: float = 10.0) -> None:
        super().__init__(address, peer=peer, replies=Reply)
        self.welcome = self.greet(Hello(), Welcome, timeout_s=timeout_s)
