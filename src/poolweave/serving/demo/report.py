"""What the demo showed of each model, and whether it is what it must be. Pure; draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poolweave.serving.checked import Checked
from poolweave.serving.demo.witness import Witness
from poolweave.serving.flow_comparison.report import Moved, Rounds, Times, Turn, surprises, turn_of

FLOW = "pd-caching-3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """All requests of one model. `surprises`: reuse that differs from what the token lists predict, in words."""

    name: str
    about: str
    requests: int
    answer_tokens: int
    turns: tuple[Turn, ...]
    to_decode: Moved
    to_prefill: Moved
    ttft: Times
    tbt: Times
    peak_pages: int
    checked: Checked
    surprises: tuple[str, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """`switches` of the prefill process between models; `peak_pages` of the KV pool that all models share at once."""

    models: tuple[ModelReport, ...]
    switches: int
    budget_pages: int
    peak_pages: int
    left_pages: int
    idle: tuple[str, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(f"{model.name}, {line}" for model in self.models for line in model.checked.wrong)

    @property
    def surprises(self) -> tuple[str, ...]:
        return tuple(f"{model.name}, {line}" for model in self.models for line in model.surprises)

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(f"{model.name}, {line}" for model in self.models for line in model.failures)

    @property
    def holds(self) -> bool:
        """Everything that the demo claims."""
        return not (self.wrong or self.surprises or self.failures or self.idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """What was run of one model. `block_bytes` of its KV."""

    name: str
    about: str
    rounds: Rounds
    block_tokens: int
    block_bytes: int
    checked: Checked


def make_report(runs: Sequence[ModelRun], witness: Witness, switches: int) -> DemoReport:
    """Figures by model, and what was not as it must be."""
    models = tuple(_model_report(run, witness) for run in runs)
    totals = [sum(look.pages.values()) for look in witness.looks]
    left = witness.looks[-1].pages if witness.looks else {}
    return DemoReport(
        models=models, switches=switches, budget_pages=witness.budget_pages, peak_pages=max(totals, default=0),
        left_pages=sum(left.values()), idle=_idle(models, left, switches),
    )  # fmt: skip


def _idle(models: Sequence[ModelReport], left: Mapping[str, int], switches: int) -> tuple[str, ...]:
    """What a run that shared one prefill process and one KV pool cannot be without."""
    found = [f"{name} holds {pages} pages when all is over" for name, pages in left.items() if pages > 1]
    found += [f"{model.name}'s KV was never sent back" for model in models if not model.to_prefill.blocks]
    found += [f"{model.name} found nothing in its second turn" for model in models
              if len(model.turns) > 1 and not model.turns[1].cached_tokens]  # fmt: skip
    if switches < len(models) - 1:
        found.append(f"the prefill process switched {switches} times among {len(models)} models")
    return tuple(found)


def _model_report(run: ModelRun, witness: Witness) -> ModelReport:
    results = [result for turn in run.rounds for result in turn]
    records = [result.record for result in results if result.record is not None]
    returns = [f"{r.session} turn {r.turn + 1}: its KV did not get back: {r.record.return_error}"
               for r in results if r.record is not None and r.record.return_error is not None]  # fmt: skip
    failed = [f"{r.session} turn {r.turn + 1}: {r.error}" for r in results if r.error is not None]
    return ModelReport(
        name=run.name, about=run.about, requests=len(results), answer_tokens=sum(len(r.answer) for r in records),
        turns=tuple(turn_of(turn) for turn in run.rounds),
        to_decode=Moved.of([record.to_decode for record in records]),
        to_prefill=Moved.of([record.to_prefill for record in records]),
        ttft=Times.of([record.ttft_s for record in records]), tbt=Times.of(witness.gaps_s(run.name)),
        peak_pages=max((look.pages.get(run.name, 0) for look in witness.looks), default=0), checked=run.checked,
        surprises=surprises(FLOW, run.rounds, run.block_tokens, run.block_bytes), failures=(*failed, *returns),
    )  # fmt: skip
