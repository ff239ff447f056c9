from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from poolweave.errors import ConfigError, NoInstance, RequestRefused, UnknownPeer
from poolweave.index.events.wire import BlockRemoved, BlockStored
from poolweave.scheduler.configuration import Difference, Member
from poolweave.scheduler.cost_model import ArchitectureModel, DecodeStep, KVLink, Link
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.policies import Candidates
from poolweave.scheduler.routes import Fetch, Replication, SchedulerConfig
from poolweave.types import Role

MODEL = ArchitectureModel(
    constant_s=0.01, linear_s=1e-4, decode=DecodeStep(constant_s=0.01, per_sequence_s=1e-3, per_kv_token_s=1e-6)
)  # 1,000 new tokens: 0.11 s


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32_000, length, dtype=np.int32)


def colocated(count: int, **config: object) -> GlobalScheduler:
    scheduler = GlobalScheduler(MODEL, SchedulerConfig(**config), clock=Clock())  # type: ignore[arg-type]
    for i in range(count):
        scheduler.add(f"i{i}", Role.COLOCATED)
    return scheduler


def test_prompt_follows_its_prefix() -> None:
    scheduler = colocated(4)
    tokens = prompt(2000)
    first = scheduler.route(tokens)
    assert (first.cached_tokens, first.decode) == (0, None)
    assert first.own_s == pytest.approx(0.21)
    scheduler.finished(first.request_id)
    again = scheduler.route(np.concatenate([tokens[:1600], prompt(400, 1)]))
    assert (again.prefill, again.cached_tokens) == (first.prefill, 1600)
    assert again.predicted_s == pytest.approx(0.05)
    assert scheduler.stats().hit_ratio == pytest.approx(1600 / 4000)
    scheduler.check()


def test_queue_outweighs_a_match_exactly_where_it_costs_more() -> None:
    """argmin of queued + own: the holder is left once its queue is longer than the match saves."""
    scheduler = colocated(2)
    tokens = prompt(1600)
    holder = scheduler.route(tokens).prefill
    scheduler.finished("r1")
    saved_s = 1584 * 1e-4  # one block less than all is reused: a token must be computed
    for queued_s, there in ((saved_s - 1e-3, True), (saved_s + 1e-3, False)):
        scheduler.report(holder, queued_s)
        route = scheduler.route(tokens)
        assert (route.prefill == holder) is there
        scheduler.failed(route.request_id)


def test_at_least_one_token_is_computed() -> None:
    scheduler = colocated(1)
    tokens = prompt(64)
    scheduler.finished(scheduler.route(tokens).request_id)
    assert scheduler.route(tokens).cached_tokens == 48
    assert scheduler.route(tokens[:1]).cached_tokens == 0


def test_prefixes_that_no_longer_fit_an_instance_are_not_believed() -> None:
    scheduler = colocated(1)
    scheduler.describe("i0", cache_tokens=3200)
    for seed in range(4):
        scheduler.finished(scheduler.route(prompt(1600, seed)).request_id)
    assert scheduler.route(prompt(1600, 0)).cached_tokens == 0
    assert scheduler.route(prompt(1600, 3)).cached_tokens == 1584


def test_another_identity_finds_nothing() -> None:
    scheduler = colocated(1)
    ns = scheduler.holdings.namespace_of(b"0123456789abcdef")
    scheduler.finished(scheduler.route(prompt(64), ns=ns).request_id)
    assert scheduler.route(prompt(64)).cached_tokens == 0
    assert scheduler.route(prompt(64), ns=ns).cached_tokens == 48


def test_load_lasts_until_the_first_token() -> None:
    scheduler = colocated(2)
    one, two = scheduler.route(prompt(1000)), scheduler.route(prompt(1000, 1))
    assert {one.prefill, two.prefill} == {"i0", "i1"}
    three = scheduler.route(prompt(1000, 2))
    assert three.queued_s == pytest.approx(0.11)
    scheduler.prefilled(one.request_id)
    scheduler.prefilled(one.request_id)
    assert scheduler.route(prompt(1000, 3)).prefill == one.prefill or three.prefill == one.prefill
    for request_id in ("r1", "r2", "r3", "r4", "r4", "nobody"):
        scheduler.finished(request_id)
    assert [load.queued_s for load in scheduler.stats().instances] == [0.0, 0.0]
    assert scheduler.stats().in_flight == 0
    scheduler.check()


def test_pair_of_prefill_and_decode() -> None:
    config = SchedulerConfig(kv_link=KVLink(link=Link(bytes_per_s=1e9), bytes_per_token=100_000), returns_answers=True)
    scheduler = GlobalScheduler(MODEL, config, clock=Clock())
    for i in range(2):
        scheduler.add(f"p{i}", Role.PREFILL)
        scheduler.add(f"d{i}", Role.DECODE)
    tokens, answer = prompt(1600), prompt(320, 9)
    first = scheduler.route(tokens, output_tokens=100)
    assert first.decode in {"d0", "d1"}
    whole = np.concatenate([tokens, answer])
    scheduler.finished(first.request_id, whole)
    turn = scheduler.route(np.concatenate([whole, prompt(64, 3)]), output_tokens=100)
    assert (turn.prefill, turn.decode) == (first.prefill, first.decode)
    assert (turn.cached_tokens, turn.decode_cached_tokens) == (1920, 1920)
    # Its decode instance fills up: after enough sequences there, sending all the KV elsewhere is faster.
    others = [scheduler.route(np.concatenate([whole, prompt(64, 10 + i)]), output_tokens=100) for i in range(6)]
    assert {route.decode for route in others} == {"d0", "d1"}
    loads = {load.name: load.num_sequences for load in scheduler.stats().instances}
    assert loads["d0"] + loads["d1"] == 7
    scheduler.check()


def test_without_returned_answers_the_prefill_instance_knows_only_prompts() -> None:
    scheduler = GlobalScheduler(MODEL, SchedulerConfig(), clock=Clock())
    scheduler.add("p", Role.PREFILL)
    scheduler.add("d", Role.DECODE)
    whole = prompt(1920)
    scheduler.finished(scheduler.route(whole[:1600]).request_id, whole)
    turn = scheduler.route(np.concatenate([whole, prompt(64, 3)]))
    assert (turn.cached_tokens, turn.decode_cached_tokens) == (1600, 1920)


def test_decode_memory_is_not_overrun() -> None:
    scheduler = GlobalScheduler(MODEL, clock=Clock())
    scheduler.add("p", Role.PREFILL)
    scheduler.add("small", Role.DECODE)
    scheduler.describe("small", kv_tokens=2000)
    scheduler.add("large", Role.DECODE)
    scheduler.describe("large", kv_tokens=20_000, slowness=5.0)
    routes = [scheduler.route(prompt(800, i), output_tokens=100).decode for i in range(8)]
    assert routes.count("small") == 2
    assert routes.count("large") == 6
    huge = scheduler.route(prompt(30_000, 99), output_tokens=1)
    assert huge.decode == "large"  # fits nowhere: where there is most room


def test_kv_is_fetched_when_that_is_faster() -> None:
    config = SchedulerConfig(
        kv_link=KVLink(link=Link(bytes_per_s=1e9), bytes_per_token=10_000)
    )  # 10 us a token; computing: 100 us
    scheduler = GlobalScheduler(MODEL, config, clock=Clock())
    for name in ("a", "b"):
        scheduler.add(name, Role.COLOCATED)
    tokens = prompt(1600)
    holder = scheduler.route(tokens).prefill
    other = "b" if holder == "a" else "a"
    scheduler.finished("r1")
    scheduler.report(holder, 1.0)
    route = scheduler.route(tokens)
    assert route.prefill == other
    assert route.fetch == Fetch(source=holder, tokens=1584)
    assert route.cached_tokens == 1584
    assert route.own_s == pytest.approx(0.01 + 16 * 1e-4 + 1584 * 1e-5)
    slow = GlobalScheduler(
        MODEL, SchedulerConfig(kv_link=KVLink(link=Link(bytes_per_s=1e7), bytes_per_token=10_000)), clock=Clock()
    )
    slow.add("a", Role.COLOCATED)
    slow.add("b", Role.COLOCATED)
    holder = slow.route(tokens).prefill
    slow.finished("r1")
    slow.report(holder, 1.0)
    assert slow.route(tokens).fetch is None  # 1 ms a token: computing it is faster


def test_hot_prefix_is_replicated_before_its_holder_is_overrun() -> None:
    clock = Clock()
    scheduler = GlobalScheduler(MODEL, SchedulerConfig(hot_load=0.5), clock=clock)
    for i in range(4):
        scheduler.add(f"i{i}", Role.COLOCATED)
    shared = prompt(1600)
    holder = scheduler.route(shared).prefill
    scheduler.finished("r1")
    asked: list[Replication] = []
    for i in range(400):  # 50 ms of work each 80 ms: under capacity, so the queue alone would never spread it
        clock.now += 0.08
        route = scheduler.route(np.concatenate([shared, prompt(400, i + 1)]))
        scheduler.finished(route.request_id)
        if route.replicate is not None:
            assert route.replicate.tokens == 1600
            assert route.replicate.source in {holder, *(r.target for r in asked)}
            asked.append(route.replicate)
            scheduler.holdings.learned(route.replicate.target, scheduler.holdings.keys(shared))
    assert len(asked) == 1  # two holders at 31% each
    assert asked[0].target != holder
    assert scheduler.stats().replications == 1


def test_without_hot_load_nothing_is_replicated() -> None:
    scheduler = colocated(2, hot_load=None)
    for _ in range(200):
        route = scheduler.route(prompt(1600))
        scheduler.finished(route.request_id)
        assert route.replicate is None


def test_dead_instance_is_forgotten_and_its_requests_are_named() -> None:
    scheduler = GlobalScheduler(MODEL, clock=Clock())
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        scheduler.add(name, role)
    tokens = prompt(1600)
    routes = [scheduler.route(prompt(1600, seed)) for seed in range(6)]
    dead = routes[0].prefill
    moved_on = next(r for r in routes if r.prefill == dead)
    scheduler.prefilled(moved_on.request_id)  # its KV is at the decode instance already
    expected = [r.request_id for r in routes if r.prefill == dead and r is not moved_on]
    assert list(scheduler.remove(dead)) == expected
    assert scheduler.remove(dead) == ()
    scheduler.check()
    scheduler.add("newborn", Role.PREFILL)  # takes over the slot, not the load and not the prefixes
    assert {load.name: load.queued_s for load in scheduler.stats().instances}["newborn"] == 0.0
    scheduler.finished(moved_on.request_id, np.concatenate([tokens, prompt(64, 5)]))
    assert scheduler.route(prompt(1600, 0)).cached_tokens == 0
    scheduler.check()
    lost = scheduler.remove("d0")
    assert set(lost) <= {r.request_id for r in routes if r.decode == "d0"} | {"r7"}
    scheduler.check()


def test_the_end_of_what_is_not_there_changes_nothing() -> None:
    """A request's end and its instance's death are heard in any order, and more than once."""
    scheduler = GlobalScheduler(MODEL, clock=Clock())
    scheduler.add("one", Role.COLOCATED)
    route = scheduler.route(prompt(64, 0))
    before = scheduler.stats()
    scheduler.finished("nope", prompt(64, 1))
    scheduler.failed("nope")
    scheduler.prefilled("nope")
    assert scheduler.remove("zz") == ()
    assert scheduler.stats() == before
    assert scheduler.remove("one") == (route.request_id,)
    after = scheduler.stats()
    scheduler.finished(route.request_id, prompt(96, 0))
    assert (scheduler.remove("one"), scheduler.stats()) == ((), after)
    scheduler.check()


def test_draining_and_suspect_members_get_nothing_new() -> None:
    scheduler = GlobalScheduler(MODEL, clock=Clock())
    a, b = (Member(name=name, epoch=1, role=Role.COLOCATED) for name in "ab")
    assert scheduler.update(Difference(joined=(a, b))) == ()
    suspect = Member(name="a", epoch=1, role=Role.COLOCATED, suspect=True)
    scheduler.update(Difference(changed=(suspect,)))
    assert {scheduler.route(prompt(64, i)).prefill for i in range(10)} == {"b"}
    scheduler.update(Difference(changed=(a,)))
    assert {scheduler.route(prompt(64, i)).prefill for i in range(10, 30)} == {"a", "b"}
    reborn = Member(name="a", epoch=2, role=Role.COLOCATED)
    lost = scheduler.update(Difference(gone=(a,), joined=(reborn,)))
    assert len(lost) > 0
    scheduler.check()


def test_refusals() -> None:
    scheduler = GlobalScheduler(ArchitectureModel(constant_s=1.0, linear_s=0.0), clock=Clock())
    with pytest.raises(NoInstance) as error:
        scheduler.route(prompt(16))
    assert (error.value.role, error.value.known) == ("prefill", 0)
    with pytest.raises(ConfigError, match="no decode part"):
        scheduler.add("d", Role.DECODE)
    scheduler.add("p", Role.PREFILL)
    with pytest.raises(NoInstance, match="role decode"):
        scheduler.route(prompt(16))
    assert scheduler.stats().in_flight == 0
    scheduler.add("c", Role.COLOCATED)
    scheduler.describe("c", slowness=0.001)
    with pytest.raises(RequestRefused, match="empty"):
        scheduler.route([])
    scheduler.route(prompt(16), request_id="mine")
    with pytest.raises(RequestRefused, match="in flight"):
        scheduler.route(prompt(16), request_id="mine")
    with pytest.raises(UnknownPeer):
        scheduler.report("nobody", 1.0)
    for wrong in ({"policy": "fastest"}, {"degraded_credit": 2.0}, {"hot_load": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SchedulerConfig(**wrong)


def test_policy_of_ones_own() -> None:
    class Last:
        def choose(self, candidates: Candidates) -> int:
            return len(candidates.slots) - 1

    scheduler = GlobalScheduler(MODEL, policy=Last(), clock=Clock())
    for name in "abc":
        scheduler.add(name, Role.COLOCATED)
    assert {scheduler.route(prompt(64, i)).prefill for i in range(5)} == {"c"}


def stored(hashes: list[int], tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=16, lora_id=None, medium="GPU",
        lora_name=None,
    )  # fmt: skip


def test_kv_events_lead_prompts_and_doubt_lowers_the_credit() -> None:
    scheduler = colocated(3)
    tokens = prompt(640)
    scheduler.holdings.stored("i2", stored(list(range(40)), tokens.tolist()))
    route = scheduler.route(tokens)
    assert (route.prefill, route.cached_tokens) == ("i2", 624)
    scheduler.failed(route.request_id)
    scheduler.holdings.lost_events("i2")
    assert scheduler.route(tokens, request_id="doubt").cached_tokens == 304
    scheduler.failed("doubt")
    scheduler.holdings.cleared("i2")
    scheduler.holdings.stored("i2", stored(list(range(40)), tokens.tolist()))
    scheduler.holdings.removed("i2", BlockRemoved(block_hashes=[20], medium="GPU"))
    route = scheduler.route(tokens)
    assert (route.prefill, route.cached_tokens) == ("i2", 320)
    with pytest.raises(UnknownPeer):
        scheduler.holdings.stored("nobody", stored([1], tokens[:16].tolist()))


class Life(RuleBasedStateMachine):
    """Any order of routes, answers, failures, deaths and rejoins keeps loads and trees whole."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.scheduler = GlobalScheduler(MODEL, SchedulerConfig(returns_answers=True), clock=self.clock)
        self.routes: dict[str, tuple[np.ndarray, str, str | None]] = {}
        self.names: set[str] = set()

    @rule(n=st.integers(0, 2), role=st.sampled_from(list(Role)))
    def add(self, n: int, role: Role) -> None:
        name = f"{role.value}-{n}"
        if name not in self.names:
            self.scheduler.add(name, role)
            self.names.add(name)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.names:
            name = data.draw(st.sampled_from(sorted(self.names)))
            self.names.remove(name)
            for request_id in self.scheduler.remove(name):
                _, prefill, decode = self.routes.pop(request_id)
                assert name in (prefill, decode)

    @rule(seed=st.integers(0, 3), blocks=st.integers(1, 8))
    def route(self, seed: int, blocks: int) -> None:
        tokens = prompt(128, seed)[: blocks * 16]
        try:
            route = self.scheduler.route(tokens)
        except NoInstance:
            return
        assert {route.prefill, route.decode or route.prefill} <= self.names
        assert 0 <= route.cached_tokens < len(tokens)
        self.routes[route.request_id] = (tokens, route.prefill, route.decode)

    @rule(data=st.data(), how=st.sampled_from(["prefilled", "finished", "failed"]))
    def proceed(self, data: st.DataObject, how: str) -> None:
        if self.routes:
            request_id = data.draw(st.sampled_from(sorted(self.routes)))
            getattr(self.scheduler, how)(request_id)
            if how != "prefilled":
                del self.routes[request_id]

    @rule(seconds=st.sampled_from([1.0, 100.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def whole(self) -> None:
        self.scheduler.check()
        assert self.scheduler.stats().in_flight == len(self.routes)


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=40)
