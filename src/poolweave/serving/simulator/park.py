"""The simulated instances by name: begins and ends their lives, queues attempts on them. Times nothing itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from poolweave.scheduler.routes import Replication, Route
from poolweave.serving.simulator._native import SimulatedFleet
from poolweave.serving.simulator.config import Flow, SimulationConfig
from poolweave.serving.simulator.traces import Trace
from poolweave.types import Role, UInt64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedReplica:
    """The first `blocks` of a request's prompt have come to an instance, which has not kept them yet."""

    name: str
    number: int
    blocks: int


class Park:
    """A native fleet with one seat a name. `fleet` tells what happens; see SimulatedFleet.next."""

    def __init__(self, config: SimulationConfig, trace: Trace) -> None:
        self._block_tokens = trace.block_tokens
        self._groups = config.names
        self.names = tuple(self._groups)
        self._seats = {name: seat for seat, name in enumerate(self.names)}
        self.fleet = SimulatedFleet(
            block_tokens=trace.block_tokens,
            kv_bytes_per_token=config.device.kv_link.bytes_per_token,
            prefill_keeps=config.flow.prefill_keeps,
            decode_keeps=config.flow.decode_keeps,
            returns=config.flow is Flow.PD_CACHING_3,
            horizon_s=math.inf if config.horizon_s is None else config.horizon_s,
        )
        for group in self._groups.values():
            self.fleet.add_seat(
                pauses=group.role is Role.COLOCATED,
                cache_blocks=group.cache_tokens // trace.block_tokens,
                kv_tokens=group.kv_tokens,
                slowness=group.slowness,
            )
        for request in trace.requests:
            self.fleet.add_request(
                request.answer_keys, request.cache_tokens, len(request.keys), request.num_tokens, request.output_tokens
            )

    def begin_life(self, name: str) -> None:
        """A new life of this instance, empty. What its last life had in hand comes back by the membership."""
        self.fleet.begin_life(self._seats[name])

    def end_life(self, name: str) -> None:
        """Silently: what is sent to it is lost until its lease has run out."""
        self.fleet.end_life(self._seats[name])

    def start(self, number: int, route: Route) -> int:
        """Queue an attempt at request `number`; returns the job's number."""
        seats = self._seats
        prefill = seats[route.prefill]
        decode = prefill if route.decode is None else seats[route.decode]
        fetch = route.fetch
        if fetch is None:
            return self.fleet.start(number, prefill, decode)
        return self.fleet.start(number, prefill, decode, seats[fetch.source], fetch.tokens // self._block_tokens)

    def replicate(self, number: int, wanted: Replication) -> None:
        """Send the beginning of a request's prompt, unless who should do so is dead."""
        seats = self._seats
        self.fleet.replicate(number, seats[wanted.source], seats[wanted.target], wanted.tokens // self._block_tokens)

    def arrived_replica(self, number: int) -> ArrivedReplica:
        """The replication of this number."""
        request, seat, blocks = self.fleet.replication(number)
        return ArrivedReplica(name=self.names[seat], number=request, blocks=blocks)

    def keep(self, replica: ArrivedReplica) -> UInt64Array | None:
        """Add it to the cache of its instance. Returns the keys given up for it."""
        return self.fleet.keep(self._seats[replica.name], replica.number, replica.blocks)

    def busy_s(self) -> dict[str, float]:
        """Prefill time by instance, of those that prefill, over all their lives."""
        return {
            name: self.fleet.busy_s(self._seats[name])
            for name, group in self._groups.items()
            if group.role is not Role.DECODE
        }
