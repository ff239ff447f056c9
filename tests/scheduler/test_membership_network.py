"""Members and coordinator over a network that delays, repeats, overtakes and loses, with pauses, deaths and skew, and
connections that end."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from poolweave.scheduler.configuration import Roster, State
from poolweave.scheduler.enrolment import Enrolment
from poolweave.scheduler.membership import Membership, MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Announce, Effect, Gone, Heartbeat, Join, Refused
from poolweave.types import Role

CONFIG = MembershipConfig(ttl_s=9.0, heartbeat_s=2.0)
NAMES = ("a", "b", "c")


class Network(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs = count(1)
        self.coordinators = count(1)
        self.skew = {name: 0.0 for name in NAMES}
        self.alive: dict[str, Enrolment] = {}
        self.requests: list[Join | Heartbeat] = []
        self.answers: list[Admitted | Refused] = []
        self.roster = Roster()
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.membership = Membership(CONFIG, coordinator=next(self.coordinators))
        self.ended: set[tuple[str, int]] = set()
        self.fresh: dict[str, tuple[int, float, int]] = {}  # epoch, observed time, sequence of what was heard last
        self.hung_up: set[str] = set()  # and not heard since
        self.observed, self.last, self.version = 0.0, self.now, 0

    # -- the coordinator, with its observed time modelled here

    def call(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Gone):
                name, epoch = effect.member.name, effect.member.epoch
                heard_epoch, heard, _ = self.fresh.pop(name)
                assert heard_epoch == epoch
                self.ended.add((name, epoch))
                free = 0.0 if name in self.hung_up else CONFIG.suspect_s
                self.hung_up.discard(name)
                silent = CONFIG.ttl_s if effect.why.value == "expired" else free
                assert self.observed - heard >= silent - 1e-9, f"{name} was heard {self.observed - heard} s ago"
            elif isinstance(effect, Announce):
                assert effect.configuration.version > self.version
                self.version = effect.configuration.version
                self.roster.apply(effect.configuration)
            else:
                if isinstance(effect, Admitted):
                    assert (effect.name, effect.epoch) not in self.ended
                self.answers.append(effect)

    def observe(self) -> None:
        self.observed += min(max(self.now - self.last, 0.0), CONFIG.heartbeat_s)
        self.last = self.now

    def receive(self, message: Join | Heartbeat) -> None:
        self.observe()
        if isinstance(message, Join):
            effects = self.membership.join(message, self.now)
        else:
            effects = self.membership.heartbeat(message, self.now)
        self.call(effects)
        new = any(isinstance(e, Admitted) and e.new for e in effects)
        epoch, _, sequence = self.fresh.get(message.name, (None, 0.0, 0))
        if new or (epoch == message.epoch and message.sequence > sequence):
            self.fresh[message.name] = (message.epoch, self.observed, message.sequence)
            self.hung_up.discard(message.name)

    def tick(self) -> None:
        self.observe()
        self.call(self.membership.tick(self.now))
        for name, (_, heard, _) in self.fresh.items():
            assert self.observed - heard < CONFIG.ttl_s, f"{name} should have expired"

    # -- rules

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        if name not in self.alive:
            self.alive[name] = Enrolment(name, Role.PREFILL, lambda: next(self.epochs), (), CONFIG)

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        self.alive.pop(name, None)

    @rule(name=st.sampled_from(NAMES), stale=st.booleans())
    def hang_up(self, name: str, stale: bool) -> None:
        """The connection of the life that is known ends, or `stale`: that of one before."""
        self.observe()
        if name in self.fresh:
            self.membership.hung_up(name, self.fresh[name][0] - stale, self.now)
            if not stale:
                self.hung_up.add(name)

    @rule(name=st.sampled_from(NAMES), skew=st.sampled_from([-1e6, -3.0, 0.0, 5.0, 1e6]))
    def set_clock(self, name: str, skew: float) -> None:
        self.skew[name] = skew

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.0, 2.0, 8.0, 30.0]), ticks=st.booleans())
    def pass_time(self, seconds: float, ticks: bool) -> None:
        self.now += seconds
        if ticks:
            self.tick()

    @rule(copies=st.integers(0, 2))
    def members_send(self, copies: int) -> None:
        for name, member in self.alive.items():
            message = member.due(self.now + self.skew[name])
            if message is not None:
                self.requests += [message] * copies

    @rule(data=st.data())
    def deliver_request(self, data: st.DataObject) -> None:
        if self.requests:
            at = data.draw(st.integers(0, len(self.requests) - 1))
            self.receive(self.requests.pop(at))

    @rule(data=st.data(), again=st.booleans())
    def deliver_answer(self, data: st.DataObject, again: bool) -> None:
        if self.answers:
            answer = self.answers[data.draw(st.integers(0, len(self.answers) - 1))]
            if not again:
                self.answers.remove(answer)
            if answer.name in self.alive:
                self.alive[answer.name].answered(answer, self.now + self.skew[answer.name])

    @rule()
    def restart_coordinator(self) -> None:
        self.start_coordinator()

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        self.observe()
        self.call(self.membership.drain(name, self.now))

    @invariant()
    def whole(self) -> None:
        self.membership.check()
        known = {m.name: m.epoch for m in self.membership.configuration.members}
        assert known == {name: epoch for name, (epoch, _, _) in self.fresh.items()}

    def teardown(self) -> None:
        """The network heals: within two TTLs every live instance is a member, and nobody else is."""
        for _ in range(2 * 18 + 2):
            self.now += 0.5
            self.requests, late = [], self.requests
            for message in late:
                self.receive(message)
            for name, member in self.alive.items():
                message = member.due(self.now + self.skew[name])
                if message is not None:
                    self.receive(message)
            self.answers, answers = [], self.answers
            for answer in answers:
                if answer.name in self.alive:
                    self.alive[answer.name].answered(answer, self.now + self.skew[answer.name])
            self.tick()
        members = self.membership.configuration.members
        assert {m.name: m.epoch for m in members} == {name: member.epoch for name, member in self.alive.items()}
        assert all(m.state is not State.SUSPECT for m in members)
        assert self.roster.members == members


TestNetwork = Network.TestCase
TestNetwork.settings = settings(stateful_step_count=40)
