from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import ArchitectureModel, DecodeStep, KVLink, Link
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.simulator import (
    Device,
    Faults,
    Flow,
    InstanceGroup,
    Simulation,
    SimulationConfig,
    Trace,
    compare_policies,
    llama2_13b_on_two_h800,
)
from poolweave.serving.simulator.traces import SharedPrefixes, TokenSource
from poolweave.types import Role

SIMPLE = Device(
    model=ArchitectureModel(constant_s=0.0, linear_s=1e-3, decode=DecodeStep(constant_s=0.01)),
    kv_link=KVLink(link=Link(bytes_per_s=1e6), bytes_per_token=100),
)  # a token: 1 ms to prefill, 10 ms to decode, 0.1 ms to send
SOURCE = TokenSource(16)


def one_by_one(*requests: tuple[float, str, int, int]) -> Trace:
    """(arrival, label, prompt tokens, output tokens): equal labels are equal prompts."""
    made = [
        SOURCE.request(at, [SOURCE.tokens(label, prompt)], SOURCE.tokens(f"{label}-answer", out))
        for at, label, prompt, out in requests
    ]
    return Trace(name="test", block_tokens=16, requests=tuple(made))


def colocated(count: int = 1, device: Device = SIMPLE, **config: object) -> SimulationConfig:
    groups = (InstanceGroup(role=Role.COLOCATED, count=count),)
    return SimulationConfig(device=device, instances=groups, **config)  # type: ignore[arg-type]


def pairs(prefill: int, decode: int, **config: object) -> SimulationConfig:
    groups = (InstanceGroup(role=Role.PREFILL, count=prefill), InstanceGroup(role=Role.DECODE, count=decode))
    return SimulationConfig(device=SIMPLE, instances=groups, **config)  # type: ignore[arg-type]


def test_one_request_alone_takes_prefill_and_decode() -> None:
    report = Simulation(colocated(), one_by_one((1.0, "a", 100, 11))).run()
    assert report.ttft.p50 == pytest.approx(0.1)
    assert report.jct.p50 == pytest.approx(0.1 + 10 * 0.01)
    assert report.tpot.p50 == pytest.approx(0.01)
    assert (report.answered, report.unfinished, report.retried, report.hit_ratio) == (1, 0, 0, 0.0)


def test_second_of_equal_prompts_reuses_whole_blocks_but_one_token() -> None:
    report = Simulation(colocated(), one_by_one((0.0, "a", 160, 1), (1.0, "a", 160, 1))).run()
    assert report.hit_ratio == pytest.approx(144 / 320)
    assert report.believed_hit_ratio == report.hit_ratio
    assert report.ttft.mean == pytest.approx((0.16 + 0.016) / 2)


def test_prefills_wait_for_each_other_and_stop_a_colocated_decode() -> None:
    report = Simulation(colocated(), one_by_one((0.0, "a", 100, 11), (0.15, "b", 200, 1))).run()
    # a: prefill [0, 0.1), decode [0.1, 0.15), stopped while b prefills [0.15, 0.35), decode until 0.4
    assert report.jct.mean == pytest.approx((0.4 + 0.2) / 2)
    report = Simulation(pairs(1, 1), one_by_one((0.0, "a", 100, 11), (0.15, "b", 200, 1))).run()
    # a: prefill [0, 0.1), sent in 10 ms, decode [0.11, 0.21): b does not disturb it
    assert report.jct.mean == pytest.approx((0.21 + 0.2) / 2)


def test_decode_waits_for_memory() -> None:
    groups = (InstanceGroup(role=Role.COLOCATED, kv_tokens=150),)
    config = SimulationConfig(device=SIMPLE, instances=groups)
    report = Simulation(config, one_by_one((0.0, "a", 100, 11), (0.0, "b", 100, 11))).run()
    # Prefills end at 0.1 and 0.2; b's 111 tokens fit only when a's are gone, at 0.3.
    assert report.jct.mean == pytest.approx((0.3 + 0.4) / 2)


@pytest.mark.parametrize(
    ("flow", "hit", "moved_tokens"),
    [
        (Flow.PD_BASIC, 0.0, 160 + 384),
        (Flow.PD_CACHING_1, 160 / 544, 160 + 384),
        (Flow.PD_CACHING_2, 160 / 544, 160 + 384 - 320),
        (Flow.PD_CACHING_3, 320 / 544, 160 + 384 - 320 + 160 + 16),
    ],
)
def test_flows_reuse_and_send_what_they_should(flow: Flow, hit: float, moved_tokens: int) -> None:
    """Two turns: 160 + 160 tokens, then those, 64 new ones and an answer of 16."""
    first, answer, question = SOURCE.tokens("q", 160), SOURCE.tokens("a", 160), SOURCE.tokens("q2", 64)
    turns = (
        SOURCE.request(0.0, [first], answer, "s"),
        SOURCE.request(9.0, [first, answer, question], SOURCE.tokens("a2", 16), "s"),
    )
    report = Simulation(pairs(1, 1, flow=flow), Trace(name="turns", block_tokens=16, requests=turns)).run()
    assert report.answered == 2
    assert report.hit_ratio == pytest.approx(hit)
    assert report.moved_bytes == moved_tokens * 100


def test_turns_of_a_session_wait_for_the_answer_before() -> None:
    first, answer = SOURCE.tokens("q", 160), SOURCE.tokens("a", 11)
    turns = tuple(
        SOURCE.request(0.0, [first] * n, answer, "s")  # all arrive at once
        for n in (1, 2, 3)
    )
    report = Simulation(colocated(4), Trace(name="turns", block_tokens=16, requests=turns)).run()
    assert report.simulated_s == pytest.approx(3 * 0.16 + 3 * 0.1)
    assert report.ttft.p50 < 0.2  # counted from when a turn is sent


def test_same_seed_same_report_and_other_seed_another() -> None:
    trace = SharedPrefixes(share=0.5, num_requests=120, prompt_tokens=256).trace().at_rate(30)
    config = colocated(4, scheduler=SchedulerConfig(policy="power_of_two"))
    one, again = Simulation(config, trace).run(), Simulation(config, trace).run()
    assert one == again
    other = Simulation(replace(config, scheduler=SchedulerConfig(policy="power_of_two", seed=1)), trace).run()
    assert other.ttft != one.ttft


def test_silent_death_loses_no_request() -> None:
    trace = SharedPrefixes(share=0.5, num_requests=150, prompt_tokens=512).trace().at_rate(4)
    deaths = ((5.0, "colocated-0"), (12.0, "colocated-1"), (13.0, "colocated-0"))
    membership = MembershipConfig(ttl_s=4.0, heartbeat_s=1.0)
    faults = Faults(deaths=deaths, restart_s=6.0)
    simulation = Simulation(colocated(3, faults=faults, membership=membership), trace)
    report = simulation.run()
    assert report.answered == 150
    assert report.retried > 0
    assert report.expired_members == 3
    assert report.jct.p50 < 2.0 < report.jct.p99 < 4.0 + 1.0 + 5.0  # those on the dead wait for the TTL
    simulation.scheduler.check()
    assert {load.name for load in simulation.scheduler.stats().instances} <= {f"colocated-{i}" for i in range(3)}


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_death_on_either_side_of_a_pair(victim: str) -> None:
    trace = SharedPrefixes(share=0.5, num_requests=200, prompt_tokens=512, output_tokens=50).trace().at_rate(6)
    faults = Faults(deaths=((8.0, victim),), restart_s=None)
    membership = MembershipConfig(ttl_s=4.0, heartbeat_s=1.0)
    simulation = Simulation(pairs(2, 2, faults=faults, membership=membership), trace)
    report = simulation.run()
    assert report.answered == 200
    assert report.retried > 0
    assert victim not in {load.name for load in simulation.scheduler.stats().instances}
    simulation.scheduler.check()


def test_nobody_left_waits_for_a_restart() -> None:
    faults = Faults(deaths=((0.5, "colocated-0"),), restart_s=20.0)
    membership = MembershipConfig(ttl_s=4.0, heartbeat_s=1.0)
    report = Simulation(
        colocated(1, faults=faults, membership=membership), one_by_one((0.45, "a", 100, 2), (8.0, "b", 100, 2))
    ).run()
    assert report.answered == 2
    assert report.simulated_s > 20.5


def test_paused_coordinator_and_lost_messages_kill_nobody() -> None:
    trace = SharedPrefixes(share=0.5, num_requests=400, prompt_tokens=256).trace().at_rate(5)
    faults = Faults(coordinator_pauses=((10.0, 25.0), (50.0, 9.0)), message_loss=0.1, message_delay_s=0.5)
    report = Simulation(colocated(4, faults=faults), trace).run()
    assert (report.expired_members, report.retried, report.answered) == (0, 0, 400)


def test_stale_knowledge_costs_hits_not_answers() -> None:
    """A small cache: with eviction events what is believed is what is held; without them it is more."""
    groups = (InstanceGroup(role=Role.COLOCATED, count=4, cache_tokens=4096),)
    trace = SharedPrefixes(share=0.75, num_requests=400, prompt_tokens=1024, prefixes=24).trace().at_rate(3)
    told = Simulation(SimulationConfig(device=SIMPLE, instances=groups), trace).run()
    silent = Simulation(SimulationConfig(device=SIMPLE, instances=groups, tells_evictions=False), trace).run()
    assert told.answered == silent.answered == 400
    assert told.believed_hit_ratio - told.hit_ratio < 0.05
    assert silent.believed_hit_ratio - silent.hit_ratio > told.believed_hit_ratio - told.hit_ratio


def test_horizon_ends_the_run() -> None:
    report = Simulation(colocated(horizon_s=1.0), one_by_one((0.0, "a", 100, 2), (0.5, "b", 5000, 2))).run()
    assert (report.answered, report.unfinished) == (1, 1)


def test_prompt_tree_is_never_worse_at_the_tail_than_the_others() -> None:
    """Fig. 15's shape: three prefill and one decode instance, over the share that prompts have in common."""
    groups = (
        InstanceGroup(role=Role.PREFILL, count=3, cache_tokens=40_000),
        InstanceGroup(role=Role.DECODE, cache_tokens=40_000),
    )
    config = SimulationConfig(device=llama2_13b_on_two_h800(), instances=groups)
    gains = []
    for share in (0.25, 0.75, 0.9):
        trace = SharedPrefixes(share=share, num_requests=180, prefixes=24).trace().at_rate(22)
        reports = compare_policies(config, trace, ["prompt_tree", "session", "least_load"])
        tree, session, load = (reports[name].ttft.p99 for name in ("prompt_tree", "session", "least_load"))
        assert tree <= session * 1.001
        assert tree <= load * 1.02
        gains.append(1 - tree / session)
    assert max(gains) > 0.4  # the paper: 0.59


def test_colocated_decode_suffers_from_prefills_and_pairs_do_not() -> None:
    """Fig. 8's shape at one rate: disaggregation shortens the gaps between tokens, caching the first token."""
    device = llama2_13b_on_two_h800()
    trace = SharedPrefixes(share=0.75, num_requests=300, output_tokens=100).trace().at_rate(12)
    both = SimulationConfig(device=device, instances=(InstanceGroup(role=Role.COLOCATED, count=2),))
    pair = SimulationConfig(
        device=device, instances=(InstanceGroup(role=Role.PREFILL), InstanceGroup(role=Role.DECODE))
    )
    colocated_report = Simulation(replace(both, flow=Flow.PD_BASIC), trace).run()
    basic = Simulation(replace(pair, flow=Flow.PD_BASIC), trace).run()
    caching = Simulation(replace(pair, flow=Flow.PD_CACHING_3), trace).run()
    assert basic.tpot.p99 < colocated_report.tpot.p99
    assert caching.ttft.p99 < 0.5 * basic.ttft.p99


def test_512_instances() -> None:
    trace = SharedPrefixes(share=0.5, num_requests=200, prompt_tokens=512).trace().at_rate(300)
    report = Simulation(colocated(512), trace).run()
    assert report.answered == 200
    assert report.ttft.p99 == pytest.approx(0.512, abs=0.02)  # nobody ever waits


def test_refusals() -> None:
    for groups in (
        (),
        (InstanceGroup(role=Role.DECODE),),
        (InstanceGroup(role=Role.PREFILL),),
        (InstanceGroup(role=Role.COLOCATED), InstanceGroup(role=Role.DECODE)),
    ):
        with pytest.raises(ConfigError, match=r"instances|prefill"):
            SimulationConfig(device=SIMPLE, instances=groups)
    with pytest.raises(ConfigError, match="instance group"):
        InstanceGroup(role=Role.PREFILL, count=0)
    with pytest.raises(ConfigError, match="message_loss"):
        Faults(message_loss=1.0)
    with pytest.raises(ConfigError, match="set moves_kv"):
        colocated(scheduler=SchedulerConfig(kv_link=SIMPLE.kv_link))
    names = colocated(2).names
    assert list(names) == ["colocated-0", "colocated-1"]
    two = SimulationConfig(device=SIMPLE, instances=(*colocated(2).instances, *colocated(1).instances))
    assert list(two.names) == ["colocated-0", "colocated-1", "colocated-2"]


def test_report_is_plain_numbers() -> None:
    report = Simulation(colocated(), one_by_one((0.0, "a", 16, 1))).run()
    assert report.as_dict()["ttft"]["p50"] == pytest.approx(0.016)
    assert np.isnan(report.tpot.p50)  # one token has no gap
