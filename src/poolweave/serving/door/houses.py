"""All models behind one door, each in a house of its own, with one gate and one set of counters for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.failure import Failure, Refusal
from poolweave.serving.door.house import House


class Houses:
    """`first` stands for what all share: the gate, and who is turned away. Made on one event loop; raises as House."""

    def __init__(self, config: DoorConfig) -> None:
        first, *others = config.models or (None,)
        self.first = House(config, first)
        self.all: Sequence[House] = (self.first, *(House(config, named, self.first) for named in others))

    def of(self, model: str) -> House:
        """The house of a model, as requests name it. Raises Refusal."""
        for house in self.all:
            if house.model == model:
                return house
        there = ", ".join(repr(house.model) for house in self.all)
        message = f"the model {model[:100]!r} is not served here; there is {there}"
        raise Refusal(Failure(status=404, message=message, code="model_not_found", param="model"))

    @property
    def missing(self) -> str:
        """Why requests cannot be answered yet; empty when those for every model can."""
        lacking = [house for house in self.all if not house.links.ready]
        if not lacking:
            return ""
        links = lacking[0].links
        of = f" of {lacking[0].model}" if len(self.all) > 1 else ""
        return f"{len(links.linked)} of {len(links.members)} instances{of} are up, which is not enough"

    def metrics_text(self) -> bytes:
        """All counters, and the state now."""
        return [house.metrics_text() for house in self.all][-1]

    def deployment(self) -> dict[str, Any]:
        """Members, loads and totals of all models, as plain values."""
        parts = [house.deployment() for house in self.all]
        routed = sum(part["routed"] for part in parts)
        return parts[0] | {
            "model": ", ".join(part["model"] for part in parts),
            "routed": routed,
            "retried": sum(part["retried"] for part in parts),
            "hit_ratio": sum(part["hit_ratio"] * part["routed"] for part in parts) / max(1, routed),
            "instances": [instance for part in parts for instance in part["instances"]],
        }
