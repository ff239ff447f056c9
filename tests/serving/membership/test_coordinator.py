"""The embedded shell: a real coordinator process, members and followers over sockets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ref_member import RegistryMember, Watched
from ref_waiting import until

from poolweave.errors import ConfigError, PeerLost
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.membership import open_registry
from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.serving.process.child import Child, Program

TIMES = MembershipConfig(ttl_s=3.0, heartbeat_s=0.1)  # a busy machine may starve a member of a second

pytestmark = pytest.mark.multiproc


class Process:
    """A coordinator that can be killed, stopped and started again at its address."""

    def __init__(self, times: MembershipConfig = TIMES) -> None:
        self._config = CoordinatorConfig(membership=times)
        self._start()

    def _start(self) -> None:
        program = Program("coordinator", "poolweave.serving.membership.coordinator", self._config)
        self.child = Child(program)
        self.address = self.child.wait_ready(60)
        self._config = replace(self._config, listen=self.address)

    def kill_and_restart(self) -> None:
        self.child.kill()
        self.child.close()
        self._start()

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Process]:
    process = Process()
    yield process
    process.child.close()


@pytest.fixture
def watched(coordinator: Process) -> Iterator[Watched]:
    made = Watched(coordinator.address, TIMES)
    yield made
    made.close()
    coordinator.signal(signal.SIGCONT)


def test_members_come_leave_in_order_and_are_told_to_followers(coordinator: Process, watched: Watched) -> None:
    one, two = RegistryMember(coordinator.address, TIMES, "one"), RegistryMember(coordinator.address, TIMES, "two")
    until(lambda: {"one", "two"} <= watched.names, "both are told")
    one.close()
    until(lambda: "one" not in watched.names, "one has left")
    assert "two" in watched.names
    assert [member.name for member in watched.gone] == ["one"]
    two.close()
    until(lambda: not watched.names, "nobody is left")


def test_a_silent_member_expires_and_comes_back_under_a_new_epoch(coordinator: Process, watched: Watched) -> None:
    """C31: nothing of it stays behind; its name is free again."""
    for _ in range(2):
        member = RegistryMember(coordinator.address, TIMES, "silent")
        until(lambda: "silent" in watched.names, "it joined")
        epoch = watched.epoch("silent")
        member.fall_silent()
        until(lambda: "silent" not in watched.names, "its lease ended")
        again = RegistryMember(coordinator.address, TIMES, "silent")
        until(lambda: "silent" in watched.names, "it is back")
        assert watched.epoch("silent") != epoch
        again.close()
        until(lambda: not watched.names, "nobody is left")


def test_the_name_of_a_member_whose_connection_ended_is_free_at_once() -> None:
    """Under leases that nobody could wait for the end of."""
    long = MembershipConfig(ttl_s=3600.0, heartbeat_s=0.1)
    patient = Process(long)
    watched = Watched(patient.address, long)
    lives = set()
    for _ in range(3):
        member = RegistryMember(patient.address, long, "killed")
        until(lambda: "killed" in watched.names and watched.epoch("killed") not in lives, "it joined")
        lives.add(watched.epoch("killed"))
        member.hang_up()
    watched.close()
    patient.child.close()


def test_an_idle_live_member_stays_and_a_slow_heartbeat_is_refused(coordinator: Process, watched: Watched) -> None:
    """C32: it does nothing but live for longer than its lease."""
    member = RegistryMember(coordinator.address, TIMES, "idle")
    until(lambda: "idle" in watched.names, "it joined")
    until(lambda: member.heartbeats > 1.5 * TIMES.ttl_s / TIMES.heartbeat_s, "more than a TTL of heartbeats")
    assert "idle" in watched.names
    assert not watched.gone
    member.close()
    with pytest.raises(ConfigError, match=r"under a third of ttl_s=9.0 \(3 s\)"):
        MembershipConfig(ttl_s=9.0, heartbeat_s=3.0)


def test_a_killed_coordinator_is_told_everything_by_its_members(coordinator: Process, watched: Watched) -> None:
    """C30: the same lives go on, nobody was gone for anybody, a third joins."""
    members = [RegistryMember(coordinator.address, TIMES, name) for name in ("one", "two")]
    until(lambda: watched.names == {"one", "two"}, "both are told")
    epochs = [watched.epoch(name) for name in ("one", "two")]
    coordinator.kill_and_restart()
    members.append(RegistryMember(coordinator.address, TIMES, "three"))
    until(lambda: watched.names == {"one", "two", "three"}, "all are there")
    fresh = Watched(coordinator.address, TIMES)  # knows only the new coordinator
    until(lambda: fresh.names == {"one", "two", "three"}, "the new one knows them all")
    assert [fresh.epoch(name) for name in ("one", "two")] == epochs
    assert not watched.gone
    fresh.close()
    for member in members:
        member.close()


def test_a_coordinator_that_stood_still_for_longer_than_the_ttl_loses_nobody(
    coordinator: Process, watched: Watched
) -> None:
    member = RegistryMember(coordinator.address, TIMES, "patient")
    until(lambda: "patient" in watched.names, "it joined")
    epoch = watched.epoch("patient")
    coordinator.signal(signal.SIGSTOP)
    until(lambda: member.failures >= 3, "heartbeats fail for more than a TTL")  # each waits for half of one
    coordinator.signal(signal.SIGCONT)
    before = member.heartbeats
    until(lambda: member.heartbeats > before + 3, "it is heard again")
    assert watched.epoch("patient") == epoch
    assert not watched.gone
    member.close()


def test_a_drained_member_is_told_so(coordinator: Process, watched: Watched) -> None:
    member = RegistryMember(coordinator.address, TIMES, "tired")
    until(lambda: "tired" in watched.names, "it joined")
    registry = open_registry(coordinator.address, TIMES)
    registry.drain("tired")
    until(lambda: watched.get("tired").draining, "it drains")
    registry.close()
    member.close()


def test_a_registry_that_is_closed_or_absent_is_peer_lost(coordinator: Process) -> None:
    registry = open_registry(coordinator.address, TIMES)
    registry.close()
    with pytest.raises(PeerLost, match="closed"):
        registry.watch(None, 1)
    nobody = open_registry("tcp://127.0.0.1:1", TIMES)
    with pytest.raises(PeerLost):
        nobody.watch(None, 1)
    nobody.close()
    with pytest.raises(ConfigError, match="is none of tcp://, ipc://, etcd://"):
        open_registry("http://127.0.0.1:1", TIMES)
