"""MemServe's two figures that a simulation can draw: what each compares, over what. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poolweave.errors import ConfigError
from poolweave.serving.simulator.question import FLOWS, Question
from poolweave.serving.simulator.trace_choice import TraceChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """Settings of a Question and of a TraceChoice; `says`: what the paper reports."""

    question: Mapping[str, Any]
    choice: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""

    def question_with(self, **given: Any) -> Question:
        """What is given goes before the figure's own settings."""
        return Question(**{**self.question, **given})

    def choice_with(self, **given: Any) -> TraceChoice:
        """Likewise. Raises ConfigError."""
        settings = {**self.choice, **given}
        if "kind" not in settings:
            raise ConfigError("which kind of trace is it? Give a kind, or one of the paper's figures", setting="kind")
        other = settings["kind"] != self.choice.get("kind")
        kept = {name: value for name, value in settings.items() if name in given or not other or name not in _OF_KIND}
        return TraceChoice(**kept)


_OF_KIND = ("shares", "copies")  # settings that other kinds of trace do not have

NO_FIGURE = PaperFigure(
    question={"instances": "prefill=3,decode=1", "policies": "prompt_tree,session,least_load"},
)
FIGURES: Mapping[str, PaperFigure] = {
    "15": PaperFigure(
        question=NO_FIGURE.question,
        choice={
            "kind": "loogle",
            "copies": 3,  # fifteen documents: three prefill instances have room for them, one has not
            "shares": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
            "rates": (4.0, 8.0),  # below, and near the rate at which session routing queues
        },
        says="prompt trees against session routing: P99 TTFT -59% at best",
    ),
    "8": PaperFigure(
        question={"instances": "prefill=1,decode=1", "policies": "prompt_tree", "flows": ",".join(reversed(FLOWS))},
        choice={"kind": "sharegpt", "rates": (1.0, 2.0, 4.0, 6.0, 8.0, 12.0)},
        says="ShareGPT, means: disaggregation JCT -30%, caching on top of it JCT -17%, TTFT -58%",
    ),
}


def paper_figure(number: str | None) -> PaperFigure:
    """The figure of this number; None: the settings of no figure. Raises ConfigError."""
    if number is not None and number not in FIGURES:
        raise ConfigError(f"figure {number!r} is none of {', '.join(FIGURES)}", setting="figure", value=number)
    return NO_FIGURE if number is None else FIGURES[number]
