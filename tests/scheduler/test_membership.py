from __future__ import annotations

import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.configuration import Configuration, Departure, Member, Roster, State
from poolweave.scheduler.cost_model import ArchitectureModel
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.membership import Membership, MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Announce, Effect, Gone, Heartbeat, Join, Refusal, Refused
from poolweave.types import Role

CONFIG = MembershipConfig(ttl_s=9.0, heartbeat_s=2.0)


def join(name: str, epoch: int = 1, sequence: int = 0) -> Join:
    return Join(name=name, epoch=epoch, role=Role.PREFILL, addresses=(f"shm://{name}",), sequence=sequence)


def beat(name: str, sequence: int, epoch: int = 1) -> Heartbeat:
    return Heartbeat(name=name, epoch=epoch, sequence=sequence)


def states(membership: Membership) -> dict[str, State]:
    return {member.name: member.state for member in membership.configuration.members}


def gone(effects: tuple[Effect, ...]) -> list[tuple[str, int, Departure]]:
    return [(e.member.name, e.member.epoch, e.why) for e in effects if isinstance(e, Gone)]


def run(membership: Membership, start: float, end: float, step: float = 0.5) -> list[Effect]:
    """Ticks only, from `start` on and up to `end`."""
    effects: list[Effect] = []
    for i in range(1, round((end - start) / step) + 1):
        effects += membership.tick(start + i * step)
    return effects


def test_join_is_admitted_and_announced() -> None:
    membership = Membership(CONFIG, coordinator=7)
    first = membership.join(join("a"), 0.0)
    expected = Configuration(
        coordinator=7,
        version=1,
        members=(Member(name="a", epoch=1, role=Role.PREFILL, addresses=("shm://a",)),),
        complete=False,
    )
    assert first == (
        Admitted(name="a", epoch=1, new=True, configuration=expected),
        Announce(configuration=expected),
    )
    assert membership.join(join("a"), 0.1) == (Admitted(name="a", epoch=1, new=False, configuration=expected),)
    membership.join(join("b"), 0.2)
    assert membership.configuration.version == 2
    assert states(membership) == {"a": State.ACTIVE, "b": State.ACTIVE}
    membership.check()


@pytest.mark.parametrize("heartbeat_s", [3.0, 3.1, 0.0, -1.0, float("nan")])
def test_heartbeat_must_be_under_a_third_of_the_ttl(heartbeat_s: float) -> None:  # C32
    with pytest.raises(ConfigError, match="third of ttl_s=9") as error:
        MembershipConfig(ttl_s=9.0, heartbeat_s=heartbeat_s)
    assert (error.value.setting, error.value.limit) == ("heartbeat_s", 3.0)


def test_idle_but_live_member_stays_for_five_ttls() -> None:  # C32
    membership = Membership(CONFIG)
    membership.join(join("idle"), 0.0)
    for second in range(1, 46):
        if second % 2 == 0:
            assert membership.heartbeat(beat("idle", second), float(second)) == ()
        assert not gone(membership.tick(float(second)))
    assert states(membership) == {"idle": State.ACTIVE}
    assert membership.configuration.version == 2  # joined; complete after a TTL


def test_silent_member_is_suspected_then_gone() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a"), 0.0)
    assert run(membership, 0.0, 4.0) == []
    (announced,) = run(membership, 4.0, 4.5)
    assert isinstance(announced, Announce)
    assert announced.configuration.members[0].state is State.SUSPECT
    assert run(membership, 4.5, 8.5) == []
    effects = run(membership, 8.5, 9.0)
    assert gone(tuple(effects)) == [("a", 1, Departure.EXPIRED)]
    assert states(membership) == {}
    assert membership.stats().expired == 1


def test_heartbeat_lifts_a_suspicion() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a"), 0.0)
    run(membership, 0.0, 5.0)
    assert states(membership) == {"a": State.SUSPECT}
    (announced,) = membership.heartbeat(beat("a", 1), 5.0)
    assert isinstance(announced, Announce)
    assert states(membership) == {"a": State.ACTIVE}
    assert not gone(tuple(run(membership, 5.0, 13.5)))


def test_coordinator_paused_for_longer_than_the_ttl_loses_nobody() -> None:
    membership = Membership(CONFIG)
    names = [f"i{n}" for n in range(5)]
    for name in names:
        membership.join(join(name), 0.0)
    now = 2.0
    for pause in (9.5, 1000.0, 1e9):
        for n, name in enumerate(names):  # what was sent before it stopped
            membership.heartbeat(beat(name, int(now)), now + n / 10)
        now += pause
        assert not gone(membership.tick(now))  # wakes up: a tick before it has read a single message
        for name in names:
            membership.heartbeat(beat(name, int(now)), now)
        assert not gone(membership.tick(now))
        now += 2
    assert set(states(membership).values()) == {State.ACTIVE}
    assert len(gone(tuple(run(membership, now, now + 9)))) == 5  # and the dead are still found afterwards


def test_clock_set_back_or_forward_loses_nobody() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a"), 1e6)
    for sequence, now in enumerate([1e6 + 2, 5.0, 7.0, 1e9, 0.0, 2.0], start=1):
        assert not gone(membership.tick(now))
        membership.heartbeat(beat("a", sequence), now)
    assert states(membership) == {"a": State.ACTIVE}


def test_duplicate_and_overtaken_heartbeats_renew_nothing() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a"), 0.0)
    membership.heartbeat(beat("a", 5), 1.0)
    lost = []
    for now in range(2, 11):
        for sequence in (5, 4, 1):
            assert membership.heartbeat(beat("a", sequence), float(now)) == ()
        lost += gone(membership.tick(float(now)))
    assert lost == [("a", 1, Departure.EXPIRED)]
    assert membership.stats().repeated == 27


def test_ended_life_never_comes_back_and_a_new_epoch_does() -> None:  # C31
    membership = Membership(CONFIG)
    now = 0.0
    for life in range(1, 21):
        admitted = membership.join(join("node", epoch=life), now)[0]
        assert isinstance(admitted, Admitted)
        assert admitted.new
        effects = run(membership, now, now + 9)
        assert gone(tuple(effects)) == [("node", life, Departure.EXPIRED)]
        now += 9
        assert membership.stats().members == 0
        for late in (join("node", epoch=life, sequence=99), beat("node", 100, epoch=life)):
            (refused,) = membership.join(late, now) if isinstance(late, Join) else membership.heartbeat(late, now)
            assert refused == Refused(name="node", epoch=life, reason=Refusal.STALE_EPOCH)
    run(membership, now, now + 100)
    assert membership.stats().remembered == 0  # bounded


def test_what_twenty_killed_lives_had_put_is_forgotten_by_the_trees() -> None:  # C31
    membership, roster = Membership(CONFIG), Roster()
    scheduler = GlobalScheduler(ArchitectureModel(constant_s=0.01, linear_s=1e-4))
    now = 0.0
    for life in range(1, 21):
        membership.join(join("node", epoch=life), now)
        scheduler.update(roster.apply(membership.configuration))
        tokens = [life * 1000 + n for n in range(64)]  # what it puts, before it is killed
        scheduler.holdings.learned("node", scheduler.holdings.keys(tokens))
        assert sum(tree.entries for tree in scheduler.holdings.stats().values()) > 0
        run(membership, now, now + 9)
        now += 9
        assert scheduler.update(roster.apply(membership.configuration)) == ()
        scheduler.holdings.sweep()
        assert sum(tree.entries for tree in scheduler.holdings.stats().values()) == 0
        assert scheduler.stats().instances == ()
    scheduler.check()


def test_live_name_is_not_taken_over() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a", epoch=1), 0.0)
    (refused,) = membership.join(join("a", epoch=2), 1.0)
    assert refused == Refused(name="a", epoch=2, reason=Refusal.NAME_TAKEN, retry_after_s=CONFIG.heartbeat_s)
    membership.heartbeat(beat("a", 1), 2.0)
    run(membership, 2.0, 6.5)
    effects = membership.join(join("a", epoch=2), 6.5)
    assert gone(effects) == [("a", 1, Departure.REPLACED)]
    assert [type(effect) for effect in effects] == [Gone, Admitted, Announce]
    (refused,) = membership.heartbeat(beat("a", 9, epoch=1), 6.6)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.STALE_EPOCH


def test_the_name_of_who_hung_up_is_free_until_it_is_heard_again() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a", epoch=1), 0.0)
    membership.hung_up("a", 7, 0.5)  # another life's connection
    membership.hung_up("nobody", 1, 0.5)
    assert isinstance(membership.join(join("a", epoch=2), 0.5)[0], Refused)
    membership.hung_up("a", 1, 1.0)
    assert states(membership) == {"a": State.ACTIVE}, "it may call again"
    membership.heartbeat(beat("a", 1), 1.5)
    assert isinstance(membership.join(join("a", epoch=2), 1.6)[0], Refused)
    membership.hung_up("a", 1, 1.7)
    assert gone(membership.join(join("a", epoch=2), 1.8)) == [("a", 1, Departure.REPLACED)]
    (refused,) = membership.heartbeat(beat("a", 2, epoch=1), 1.9)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.STALE_EPOCH
    membership.check()


def test_drain_then_leave() -> None:
    membership = Membership(CONFIG)
    membership.join(join("a"), 0.0)
    assert membership.drain("nobody", 0.5) == ()
    assert len(membership.drain("a", 1.0)) == 1
    assert membership.drain("a", 1.0) == ()
    assert states(membership) == {"a": State.DRAINING}
    run(membership, 1.0, 5.0)
    assert states(membership) == {"a": State.SUSPECT}  # still draining when it is heard again
    membership.heartbeat(beat("a", 1), 5.0)
    assert states(membership) == {"a": State.DRAINING}
    assert membership.leave("a", 2, 5.5) == ()
    assert gone(membership.leave("a", 1, 6.0)) == [("a", 1, Departure.LEFT)]
    assert membership.leave("a", 1, 6.0) == ()


def test_restarted_coordinator_is_joined_again_with_the_same_epochs() -> None:  # C30, as far as pure
    before = Membership(CONFIG, coordinator=1)
    for name in ("a", "b"):
        before.join(join(name, epoch=5), 0.0)
    after = Membership(CONFIG, coordinator=2)
    (refused,) = after.heartbeat(beat("a", 7, epoch=5), 100.0)
    assert refused == Refused(name="a", epoch=5, reason=Refusal.UNKNOWN)
    admitted, _ = after.join(join("a", epoch=5, sequence=8), 100.1)
    assert isinstance(admitted, Admitted)
    assert admitted.new  # so it tells what it holds
    after.join(join("third", epoch=1), 100.2)
    assert not after.configuration.complete
    after.join(join("b", epoch=5, sequence=3), 101.0)
    assert [m.name for m in after.configuration.members] == ["a", "b", "third"]
    for now in range(102, 112):
        for name in ("a", "b"):
            after.heartbeat(beat(name, now, epoch=5), float(now))
        after.heartbeat(beat("third", now), float(now))
        assert not gone(after.tick(float(now)))
    assert after.configuration.complete


def test_full_house() -> None:
    membership = Membership(MembershipConfig(max_members=1))
    membership.join(join("a"), 0.0)
    (refused,) = membership.join(join("b"), 0.0)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.FULL
    membership.leave("a", 1, 1.0)
    assert isinstance(membership.join(join("b"), 1.0)[0], Admitted)
    with pytest.raises(ConfigError, match="max_members"):
        MembershipConfig(max_members=0)
