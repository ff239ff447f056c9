"""Runs the parts of the transfer study one after the other, telling how far it is."""

from __future__ import annotations

from collections.abc import Callable

from poolweave.serving.bench import connection_study, granularity_study, layout_study
from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.peer import Peer
from poolweave.serving.bench.points import ConnectionPoint, GranularityPoint, LayoutPoint, Study

Advance = Callable[[str], None]  # what was just measured


def num_points(config: StudyConfig) -> int:
    """How often run() will say that it got on."""
    counts = {
        "layout": layout_study.count,
        "granularity": granularity_study.count,
        "connections": connection_study.count,
    }
    return sum(counts[name](config) for name in config.studies)


def run(config: StudyConfig, advance: Advance = lambda _: None) -> Study:
    """Measure everything. Raises what a transfer or the other process failed with; both are gone then."""
    layout: list[LayoutPoint] = []
    granularity: list[GranularityPoint] = []
    connections: list[ConnectionPoint] = []
    with Peer() as peer:
        if "layout" in config.studies:
            for point in layout_study.measure(config, peer):
                layout.append(point)
                advance(f"{point.transport}, {point.blocks}, {point.tokens} tokens")
        if "granularity" in config.studies:
            for step in granularity_study.measure(config, peer):
                granularity.append(step)
                advance(f"{step.transport}, {step.granularity}, load {step.load:g}")
        if "connections" in config.studies:
            for one in connection_study.measure(config, peer):
                connections.append(one)
                advance(f"{one.transport}, {one.direction}")
    return Study(config=config, layout=tuple(layout), granularity=tuple(granularity), connections=tuple(connections))
