"""Addresses that nobody could reach are refused before anybody waits for them."""

from __future__ import annotations

import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.control.endpoint import check_endpoint
from poolweave.serving.control.server import RpcServer
from poolweave.serving.membership import open_registry


@pytest.mark.parametrize("url", ["tcp://*:0", "tcp://127.0.0.1:65535", "tcp://[::1]:7100", "ipc:///tmp/x"])
def test_addresses_that_can_be(url: str) -> None:
    check_endpoint(url, "listen", least_port=0)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:65536", "tcp://127.0.0.1", "tcp://:7100"])
def test_a_server_refuses_what_it_could_not_bind(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen='tcp://.*' wants tcp://HOST:PORT with a port in \[0, 65535\]$"):
        RpcServer(url, 1, name="x")


@pytest.mark.parametrize("url", ["tcp://host", "tcp://host:0", "tcp://host:70000", "tcp://host:port"])
def test_a_registry_that_nobody_can_be_at_is_refused_at_once(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^registry='tcp://host.*' wants tcp://HOST:PORT with a port in \[1, 65535\]$"
    ):
        open_registry(url, MembershipConfig())
