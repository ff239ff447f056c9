"""A seed's run is the same as ever, request by request: whoever makes the simulator faster sees here what changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash

from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.simulator import (
    Faults,
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
