"""A seed's run is the same as ever, request by request: whoever makes the simulator faster sees here what changed.

All but the first four and the last digest were taken from an event loop in pure Python, before a native one took its
place. The last one is of lives that come back before their name is free: they ask
for it again each heartbeat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import xxhash

from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.simulator import (
    Faults,
    Flow,
    InstanceGroup,
    Simulation,
    SimulationConfig,
    SimulationReport,
    Trace,
    llama2_13b_on_two_h800,
)
from poolweave.serving.simulator.traces import SharedPrefixes
from poolweave.types import Role

PAIRS = (
    InstanceGroup(role=Role.PREFILL, count=3, cache_tokens=20_000),
    InstanceGroup(role=Role.DECODE, count=2, cache_tokens=20_000, kv_tokens=30_000),
)
COLOCATED = (InstanceGroup(role=Role.COLOCATED, count=4, cache_tokens=8_000, kv_tokens=20_000, slowness=1.5),)
DEATHS = Faults(deaths=((1.0, "prefill-1"), (3.0, "decode-0")), restart_s=5.0, message_loss=0.05, message_delay_s=0.2)


def trace() -> Trace:
    """Sessions that share beginnings, and cannot all be cached."""
    return SharedPrefixes(share=0.5, num_requests=240, prompt_tokens=1024, prefixes=24).trace().at_rate(40)


def digest(report: SimulationReport) -> str:
    """Of all figures, to a nanosecond and a billionth: libraries differ in the last bits."""
    flat: list[object] = []
    for value in report.as_dict().values():
        parts = value.values() if isinstance(value, dict) else [value]
        flat += [f"{part:.9f}" if isinstance(part, float) else part for part in parts]
    return xxhash.xxh3_64_hexdigest(repr(flat).encode())


@pytest.mark.parametrize(
    ("groups", "faults", "policy", "expected"),
    [
        (PAIRS, Faults(), "prompt_tree", "54451b39e2ba29a5"),
        (PAIRS, DEATHS, "prompt_tree", "e9cfd53b83278722"),
        (COLOCATED, Faults(), "prompt_tree", "d7de3cce653ef415"),
        (COLOCATED, Faults(), "power_of_two", "d8ce78d54a963646"),
    ],
)
def test_a_seed_gives_the_run_that_it_always_gave(
    groups: tuple[InstanceGroup, ...], faults: Faults, policy: str, expected: str
) -> None:
    config = SimulationConfig(device=llama2_13b_on_two_h800(), instances=groups, faults=faults)
    report = Simulation(replace(config, scheduler=SchedulerConfig(policy=policy)), trace()).run()
    assert report.answered == 240
    assert digest(report) == expected


DEVICE = llama2_13b_on_two_h800()
LINKED = SchedulerConfig(hot_load=0.05)
LEAST_LOAD = replace(LINKED, policy="least_load")
QUIET_DEATH = Faults(deaths=((2.0, "colocated-1"),), restart_s=None, message_delay_s=0.1)
MANY = Faults(
    deaths=((1.0, "colocated-1"), (1.5, "prefill-0"), (1.7, "decode-1")),
    restart_s=1.0,
    coordinator_pauses=((1.0, 4.0),),
)


@pytest.mark.parametrize(
    ("groups", "scheduler", "more", "expected"),
    [
        (PAIRS, LEAST_LOAD, {"flow": Flow.PD_BASIC}, "42a8427e3f3a0cac"),
        (PAIRS, LINKED, {"flow": Flow.PD_BASIC, "faults": DEATHS}, "8619ad9b03bf85fc"),
        (PAIRS, LEAST_LOAD, {"flow": Flow.PD_CACHING_1}, "38e019f3f3e82aa3"),
        (PAIRS, LINKED, {"flow": Flow.PD_CACHING_1, "faults": DEATHS}, "6bb45aec62e9d0a1"),
        (PAIRS, LEAST_LOAD, {"flow": Flow.PD_CACHING_2}, "e0bcd0acbf64cfba"),
        (PAIRS, LINKED, {"flow": Flow.PD_CACHING_2, "faults": DEATHS}, "6157c63b45805c26"),
        (PAIRS, LEAST_LOAD, {"flow": Flow.PD_CACHING_3}, "416cd422176d8342"),
        (PAIRS, LINKED, {"flow": Flow.PD_CACHING_3, "faults": DEATHS}, "d182b8bdb4fc1925"),
        (COLOCATED, replace(LINKED, policy="session"), {"faults": QUIET_DEATH}, "6cac5677d7e58e06"),
        (
            COLOCATED,
            replace(LINKED, policy="round_robin"),
            {"tells_evictions": False, "horizon_s": 6.0},
            "01a7a1a8c973e1a6",
        ),
        (PAIRS + COLOCATED, LINKED, {"faults": MANY}, "484698e6ba6d42b2"),
    ],
)
def test_flows_fetches_replicas_and_faults_give_what_they_always_gave(
    groups: tuple[InstanceGroup, ...], scheduler: SchedulerConfig, more: dict[str, Any], expected: str
) -> None:
    config = SimulationConfig(device=DEVICE, instances=groups, scheduler=scheduler, moves_kv=True, **more)
    assert digest(Simulation(config, trace()).run()) == expected
