"""A plan in words: what was asked, what was chosen, and why, for a person to read."""

from __future__ import annotations

from collections.abc import Sequence

from poolweave.crosspool_engine.planner.plan import FfnPiece, ModelPlan, Plan
from poolweave.types import format_bytes


def explain(plan: Plan) -> str:
    """Several lines of plain text, ending with a newline."""
    lines = [
        f"Devices: {' '.join(plan.roles)}",
        f"KV demand: {format_bytes(plan.percentile_bytes)} at percentile {100 * plan.percentile:g} "
        f"({100 * plan.confidence:g}% interval {format_bytes(plan.low_bytes)} to {format_bytes(plan.high_bytes)}); "
        f"mean {format_bytes(plan.mean_bytes)}, by Little's law {format_bytes(plan.little_bytes)}.",
        f"Pool: {plan.total_pages} pages of {format_bytes(plan.page_bytes)} on "
        + ", ".join(f"rank {r}: {n}" for r, n in zip(plan.kv_ranks, plan.pages_per_rank, strict=True))
        + f" ({format_bytes(plan.total_pages * plan.page_bytes)}).",
    ]
    lines += [_model(plan, model) for model in plan.models]
    lines += [
        f"Weights rank {rank}: {format_bytes(plan.rank_ffn_bytes(rank))} of FFN weights." for rank in plan.weights_ranks
    ]
    return "\n".join(lines) + "\n"


def _model(plan: Plan, model: ModelPlan) -> str:
    width, replicas = len(model.attention_ranks[0]), len(model.attention_ranks)
    spread = f"tensor parallel over {width} ranks" if width > 1 else "on one rank"
    ranks = " and ".join(str(list(replica)) for replica in model.attention_ranks)
    pieces = "; ".join(f"rank {piece.rank}: {_piece(piece)}" for piece in model.ffn)
    return (
        f"{model.name} ({model.architecture}): {model.kv_bytes_per_token:,} KV bytes a token, its own percentile "
        f"{model.percentile_pages} pages, largest request {model.largest_request_pages}. Attention {spread}, "
        f"{replicas} replica{'s' if replicas > 1 else ''} on {ranks}: one request reaches "
        f"{100 * model.pool_share:g}% of the pool. FFN layer {1e6 * model.ffn_layer_s:.1f} us at batch 1; {pieces}."
    )


def _piece(piece: FfnPiece) -> str:
    if piece.experts is None:
        return f"layers {_spans(piece.layers)}"
    return f"experts {_spans(piece.experts)}" if piece.experts else "routers, shared experts and dense layers"


def _spans(members: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for member in members:
        if spans and member == spans[-1][1] + 1:
            spans[-1][1] = member
        else:
            spans.append([member, member])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
