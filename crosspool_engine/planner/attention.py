"""How each model's attention spreads over the KV ranks: tensor parallel where its heads allow, else few replicas.

Pure arithmetic over sizes. Source: CrossPool Fig. 2: replicas beyond need cut the pool that one request can reach to
a half or a quarter; MLA and MQA keep one head, which tensor parallelism could only copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poolweave.errors import PlanInfeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed:
    """One model's claim on the KV side, in bytes; `own_bytes` is its own percentile of KV.

    Of `resident_bytes`, `ends_bytes` (embedding and head) lie on a replica's first rank, the rest is shared by all.
    """

    name: str
    kv_shards: int
    resident_bytes: int
    own_bytes: int
    largest_request_bytes: int
    ends_bytes: int = 0

    def weights_bytes(self, place: int, width: int) -> float:
        """On the rank at `place` of a replica `width` wide."""
        return (self.resident_bytes - self.ends_bytes) / width + (self.ends_bytes if place == 0 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlace:
    """Ranks of each replica, and the part of all pool pages that one request can reach."""

    replicas: tuple[tuple[int, ...], ...]
    pool_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Places in the order of the needs, and the bytes left for KV on each rank once weights are in."""

    places: tuple[AttentionPlace, ...]
    kv_capacity: tuple[int, ...]
    kv_demand: tuple[int, ...]  # the total, shared out by the models' own demands


def lay_out_attention(
    needs: Sequence[AttentionNeed], *, ranks: int, capacity_bytes: int, total_bytes: int
) -> AttentionLayout:
    """Spread `needs` over `ranks` KV ranks of `capacity_bytes` each, so that `total_bytes` of KV fit.

    Widest first: a model whose KV heads divide over all ranks spans them all and sees the whole pool. Others get the
    widest group their heads fill and as few replicas as their own demand needs, each where most room is left.
    Some replica of each model can hold its largest request, whatever the percentile says.
    Raises PlanInfeasible naming the rank or the request that does not fit.
    """
    room = [float(capacity_bytes)] * ranks
    used = [0.0] * ranks
    places: dict[str, AttentionPlace] = {}
    whole = sum(need.own_bytes for need in needs) or 1  # 0: nothing is held by percentile, only by largest request
    weights = [0.0] * ranks
    for need in sorted(needs, key=lambda n: (-_width(n.kv_shards, ranks), -n.own_bytes, n.name)):
        width = _width(need.kv_shards, ranks)
        share = total_bytes * need.own_bytes / whole
        replicas = _replicas(need, width, share, room, ranks)
        for place, rank in ((place, rank) for replica in replicas for place, rank in enumerate(replica)):
            own = need.weights_bytes(place, width)
            weights[rank] += own
            used[rank] += share / (width * len(replicas))
            room[rank] -= own + share / (width * len(replicas))
        places[need.name] = AttentionPlace(replicas=replicas, pool_share=width / ranks)
    for need in needs:
        replica = places[need.name].replicas[0]
        missing = max(need.largest_request_bytes - sum(used[rank] for rank in replica), 0)
        for rank in replica:
            used[rank] += missing / len(replica)
    left = tuple(int(capacity_bytes - w) for w in weights)
    demand = tuple(math.ceil(u) for u in used)
    _check_requests(needs, places, left)
    _check_ranks(left, demand)
    return AttentionLayout(places=tuple(places[n.name] for n in needs), kv_capacity=left, kv_demand=demand)


def _width(shards: int, ranks: int) -> int:
    """The widest tensor parallelism that splits the KV heads evenly and keeps none twice."""
    return max(width for width in range(1, min(shards, ranks) + 1) if shards % width == 0 and ranks % width == 0)


def _replicas(
    need: AttentionNeed, width: int, share: float, room: Sequence[float], ranks: int
) -> tuple[tuple[int, ...], ...]:
    groups = [tuple(range(first, first + width)) for first in range(0, ranks, width)]
    groups.sort(key=lambda group: (-min(room[rank] for rank in group), group))
    for count in range(1, len(groups) + 1):
        chosen = groups[:count]
        kv = share / (width * count)
        places = [(place, rank) for group in chosen for place, rank in enumerate(group)]
        if all(room[rank] >= need.weights_bytes(place, width) + kv for place, rank in places):
            return tuple(sorted(chosen))
    return tuple(sorted(groups))


def _check_ranks(left: Sequence[int], demand: Sequence[int]) -> None:
    for rank, (free, wanted) in enumerate(zip(left, demand, strict=True)):
        if wanted > free:
            raise PlanInfeasible(
                f"KV rank {rank} is to hold {wanted:,} bytes of KV, {max(free, 0):,} are left beside the non-FFN "
                "weights: add devices or memory, lower the rates or the percentile",
                part="kv", needed_bytes=wanted, available_bytes=max(free, 0),
            )  # fmt: skip


def _check_requests(needs: Sequence[AttentionNeed], places: dict[str, AttentionPlace], left: Sequence[int]) -> None:
    for need in needs:
        replica = places[need.name].replicas[0]
        reach = len(replica) * max(min(left[rank] for rank in replica), 0)  # each holds an equal part of a request
        if need.largest_request_bytes > reach:
            raise PlanInfeasible(
                f"the largest request of {need.name} needs {need.largest_request_bytes:,} bytes of KV, its ranks reach "
                f"{reach:,}: shorten max request length or add memory a rank",
                part="request", needed_bytes=need.largest_request_bytes, available_bytes=reach,
            )  # fmt: skip
