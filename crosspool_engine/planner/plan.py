"""The plan file: what the engine enforces. Values only, checked when built and when read.

JSON with every field named; an unknown or missing one is refused. Source: CrossPool planner's output (pool page
budget, each model's parallelism and rank assignment).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from poolweave.errors import ConfigError

Split = Literal["layer", "expert"]
VERSION = 1


class FfnPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FFN weights of one model on one weights rank.

    `experts` None: whole layers. A list: these routed experts of each of `layers`. An empty list: what no router
    chooses in these layers: the router itself, shared experts, and dense FFNs.
    """

    rank: int
    layers: tuple[int, ...]
    experts: tuple[int, ...] | None
    nbytes: int


class ModelPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: where its attention runs, where its FFN lies, and how much of the pool it may need."""

    name: str
    architecture: str
    num_layers: int
    dense_layers: tuple[int, ...]
    num_experts: int
    kv_bytes_per_token: int
    attention_ranks: tuple[tuple[int, ...], ...]  # one tuple a replica: the ranks its tensor parallelism spans
    pool_share: float  # of all KV pages, what a single request can reach
    percentile_pages: int
    largest_request_pages: int
    ffn_layer_s: float  # at batch 1: what groups models of like layer time
    ffn: tuple[FfnPiece, ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices' roles, the pool's budget and every model's place.

    Raises ConfigError where it contradicts itself: a rank of the wrong role, an FFN layer or expert placed twice or
    not at all, pages that do not add up.
    """

    version: int
    page_bytes: int
    block_tokens: int
    dtype_bytes: int
    split: Split
    kv_ranks: tuple[int, ...]
    weights_ranks: tuple[int, ...]
    pages_per_rank: tuple[int, ...]  # of kv_ranks, in order: the budget
    percentile: float
    confidence: float
    percentile_bytes: int
    low_bytes: int
    high_bytes: int
    mean_bytes: int
    little_bytes: int
    models: tuple[ModelPlan, ...]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"plan version {self.version}, this poolweave reads {VERSION}", setting="version", value=self.version
            )
        _check(not set(self.kv_ranks) & set(self.weights_ranks), "a rank is either KV or weights", "kv_ranks")
        _check(bool(self.kv_ranks and self.weights_ranks), "a plan has KV and weights ranks", "kv_ranks")
        _check(len(self.pages_per_rank) == len(self.kv_ranks), "one page budget a KV rank", "pages_per_rank")
        _check(min(self.pages_per_rank) > 0, "a KV rank has pages", "pages_per_rank")
        _check(self.low_bytes <= self.percentile_bytes <= self.high_bytes, "low <= percentile <= high", "low_bytes")
        names = [model.name for model in self.models]
        _check(bool(names) and len(set(names)) == len(names), f"models are named once each, got {names}", "models")
        for model in self.models:
            self._check_model(model)

    @property
    def total_pages(self) -> int:
        return sum(self.pages_per_rank)

    @property
    def roles(self) -> tuple[str, ...]:
        """Of each rank in order, "KV" or "W": the row of the paper's placement table."""
        kinds = {**dict.fromkeys(self.kv_ranks, "KV"), **dict.fromkeys(self.weights_ranks, "W")}
        return tuple(kinds[rank] for rank in sorted(kinds))

    def rank_ffn_bytes(self, rank: int) -> int:
        return sum(piece.nbytes for model in self.models for piece in model.ffn if piece.rank == rank)

    def _check_model(self, model: ModelPlan) -> None:
        ranks = [rank for replica in model.attention_ranks for rank in replica]
        _check(
            bool(ranks) and set(ranks) <= set(self.kv_ranks) and len(set(ranks)) == len(ranks),
            f"attention of {model.name} runs once on KV ranks {self.kv_ranks}, got {ranks}", "attention_ranks",
        )  # fmt: skip
        wrong = {piece.rank for piece in model.ffn} - set(self.weights_ranks)
        _check(not wrong, f"FFN of {model.name} lies on {sorted(wrong)}, which are no weights ranks", "ffn")
        _check(
            sorted(_placed(model)) == sorted(_whole(model)),
            f"the {self.split} split of {model.name} must place each FFN layer and expert exactly once", "ffn",
        )  # fmt: skip


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` as indented JSON, whole or not at all."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
    partial.replace(target)


def load_plan(path: str | Path) -> Plan:
    """Read and check a plan file. Raises ConfigError naming the file and what is wrong in it."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError) as error:  # a ConfigError from the checks is a ValueError: wrapped by msgspec
        raise ConfigError(f"{path} is no plan: {error}", setting="plan", value=str(path)) from error


def _check(holds: bool, message: str, setting: str) -> None:
    if not holds:
        raise ConfigError(f"plan contradicts itself: {message}", setting=setting)


def _placed(model: ModelPlan) -> list[tuple[int, int]]:
    """(layer, expert) of everything placed; expert -1 is what no router chooses."""
    found: list[tuple[int, int]] = []
    for piece in model.ffn:
        for layer in piece.layers:
            if piece.experts is None:
                found += _layer(model, layer)
            else:
                found += [(layer, expert) for expert in piece.experts or (-1,)]
    return found


def _whole(model: ModelPlan) -> list[tuple[int, int]]:
    return [pair for layer in range(model.num_layers) for pair in _layer(model, layer)]


def _layer(model: ModelPlan, layer: int) -> list[tuple[int, int]]:
    routed = 0 if layer in model.dense_layers else model.num_experts
    return [(layer, expert) for expert in range(-1, routed)]
