"""The etcd shell against Debian's etcd-server, started here on free ports."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ref_member import RegistryMember, Watched
from ref_waiting import until

from poolweave.errors import ConfigError, PeerLost
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Heartbeat, Join, Refusal, Refused
from poolweave.serving.membership import open_registry
from poolweave.types import Role

pytest.importorskip("etcd3gw")
ETCD = shutil.which("etcd") or ("/usr/bin/etcd" if Path("/usr/bin/etcd").exists() else None)
TIMES = MembershipConfig(ttl_s=2.0, heartbeat_s=0.2)  # etcd's leases are whole seconds

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(ETCD is None, reason="no etcd here: apt-get install etcd-server"),
]


class Etcd:
    """One server; `restart` kills it and starts it again on its data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.client, self._peer = (_free_port() for _ in range(2))
        self._start()

    def _start(self) -> None:
        here, peer = f"http://127.0.0.1:{self.client}", f"http://127.0.0.1:{self._peer}"
        self.process = subprocess.Popen(
            [
                str(ETCD), "--data-dir", str(self._folder / "data"), "--listen-client-urls", here,
                "--advertise-client-urls", here, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._folder,
        )  # fmt: skip
        until(self._healthy, "etcd is healthy")

    def _healthy(self) -> bool:
        assert self.process.poll() is None, "etcd ended"
        try:
            return httpx.get(f"http://127.0.0.1:{self.client}/health").json()["health"] == "true"
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self._start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


_numbers = itertools.count()


@pytest.fixture
def url(etcd: Etcd) -> str:
    """A deployment of this test's own."""
    return f"etcd://127.0.0.1:{etcd.client}/test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def watched(url: str) -> Iterator[Watched]:
    made = Watched(url, TIMES)
    yield made
    made.close()


def test_members_come_and_leave_and_deployments_are_apart(url: str, watched: Watched) -> None:
    one, other = RegistryMember(url, TIMES, "one"), RegistryMember(f"{url}-other", TIMES, "other")
    until(lambda: watched.names == {"one"}, "it is told, the other deployment's is not")
    one.close()
    until(lambda: not watched.names, "it has left")
    assert [member.name for member in watched.gone] == ["one"]
    other.close()


def test_a_silent_member_expires_with_its_lease_and_its_name_is_free(url: str, watched: Watched) -> None:
    member = RegistryMember(url, TIMES, "silent")
    until(lambda: "silent" in watched.names, "it joined")
    epoch = watched.epoch("silent")
    member.fall_silent()
    until(lambda: "silent" not in watched.names, "its lease ended")
    again = RegistryMember(url, TIMES, "silent")
    until(lambda: "silent" in watched.names, "it is back")
    assert watched.epoch("silent") != epoch
    again.close()


def test_a_name_belongs_to_one_life_and_an_ended_epoch_stays_ended(url: str) -> None:
    registry = open_registry(url, TIMES)
    first = Join(name="n", epoch=1, role=Role.COLOCATED)
    admitted = registry.join(first)
    assert not isinstance(admitted, Refused)
    assert (admitted.new, [member.epoch for member in admitted.configuration.members]) == (True, [1])
    repeated = registry.join(first)
    assert not isinstance(repeated, Refused)
    assert not repeated.new
    other = open_registry(url, TIMES)
    refused = other.join(Join(name="n", epoch=2, role=Role.COLOCATED))
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.NAME_TAKEN
    assert refused.retry_after_s == TIMES.heartbeat_s
    unknown = other.heartbeat(Heartbeat(name="n", epoch=1, sequence=1))
    assert unknown is not None
    assert unknown.reason is Refusal.UNKNOWN
    assert registry.heartbeat(Heartbeat(name="n", epoch=1, sequence=2)) is None
    registry._leases["n", 1].revoke()  # type: ignore[attr-defined]  # as if it had run out
    stale = registry.heartbeat(Heartbeat(name="n", epoch=1, sequence=3))
    assert stale is not None
    assert stale.reason is Refusal.STALE_EPOCH
    registry.close()
    other.close()


def test_an_etcd_that_was_down_for_longer_than_the_ttl_loses_nobody(etcd: Etcd, url: str, watched: Watched) -> None:
    member = RegistryMember(url, TIMES, "patient")
    until(lambda: "patient" in watched.names, "it joined")
    epoch = watched.epoch("patient")
    etcd.kill()
    until(lambda: member.failures > 1.5 * TIMES.ttl_s / TIMES.heartbeat_s, "more than a TTL of heartbeats fails")
    etcd.restart()
    before = member.heartbeats
    until(lambda: member.heartbeats > before + 3, "it is heard again")
    assert watched.epoch("patient") == epoch
    assert not watched.gone
    member.close()


def test_a_drained_member_is_told_so(url: str, watched: Watched) -> None:
    member = RegistryMember(url, TIMES, "tired")
    until(lambda: "tired" in watched.names, "it joined")
    registry = open_registry(url, TIMES)
    registry.drain("tired")
    until(lambda: watched.get("tired").draining, "it drains")
    member.close()


def test_an_etcd_that_is_not_there_is_peer_lost_and_a_wrong_address_a_config_error() -> None:
    registry = open_registry("etcd://127.0.0.1:1/x", TIMES)
    with pytest.raises(PeerLost, match=r"etcd at etcd://127\.0\.0\.1:1/x cannot be used"):
        registry.watch(None, 1)
    with pytest.raises(ConfigError, match="is no etcd address"):
        open_registry("etcd:///x", TIMES)
