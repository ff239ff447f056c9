"""Requests between their route and their end, and the load that each is to its instances."""

from __future__ import annotations

import msgspec

from poolweave.errors import RequestRefused
from poolweave.scheduler.fleet import Fleet
from poolweave.scheduler.routes import Prompt


class Flight(msgspec.Struct, kw_only=True, eq=False):
    """One request. Slots, not names: None once that instance is gone."""

    prompt: Prompt
    prefill: int | None
    decode: int | None  # None: decodes where it is prefilled
    queue_s: float  # its part of the prefill instance's queue
    prefilled: bool = False


class Flights:
    """Begins and ends loads in step: what was added to a fleet for a request is taken off once."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._flights

    def get(self, request_id: str) -> Flight | None:
        """The request, if it is in flight."""
        return self._flights.get(request_id)

    def begin(self, request_id: str, flight: Flight) -> None:
        """Count a request as its instances'. Raises RequestRefused when the id is in flight."""
        if request_id in self._flights:
            raise RequestRefused(f"request {request_id!r} is in flight; an id is used once at a time")
        self._flights[request_id] = flight
        if flight.prefill is not None:
            self._fleet.enqueue(flight.prefill, flight.queue_s)
        if flight.decode is not None:
            self._fleet.begin_decode(flight.decode, flight.prompt.num_tokens)

    def prefilled(self, request_id: str) -> Flight | None:
        """Take the prompt off its queue. None when it was already, or is not in flight."""
        flight = self._flights.get(request_id)
        if flight is None or flight.prefilled:
            return None
        flight.prefilled = True
        if flight.prefill is not None:
            self._fleet.dequeue(flight.prefill, flight.queue_s)
        return flight

    def end(self, request_id: str) -> Flight | None:
        """Take off all that is left of a request. None when it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is None:
            return None
        if not flight.prefilled:
            self.prefilled(request_id)
        del self._flights[request_id]
        if flight.decode is not None:
            self._fleet.end_decode(flight.decode, flight.prompt.num_tokens)
        return flight

    def lose(self, slot: int) -> tuple[str, ...]:
        """The instance on `slot` is gone: end what needs it, and return those ids."""
        lost = []
        for request_id, flight in list(self._flights.items()):
            at = flight.prefill if flight.decode is None or not flight.prefilled else flight.decode
            if slot in (at, flight.decode):
                lost.append(request_id)
                self.end(request_id)
            elif flight.prefill == slot:  # prefilled here, decodes elsewhere; the slot may soon be another's
                flight.prefill = None
        return tuple(lost)

    def check(self) -> None:
        """Assert that the fleet's loads are those of the flights."""
        fleet = self._fleet
        waiting = [f for f in self._flights.values() if not f.prefilled]
        assert sum(fleet.num_prefills) == len(waiting), "prefills are miscounted"
        decoding = [f for f in self._flights.values() if f.decode is not None]
        assert int(fleet.num_sequences.sum()) == len(decoding), "sequences are miscounted"
        assert int(fleet.kv_tokens.sum()) == sum(f.prompt.num_tokens for f in decoding), "KV tokens are miscounted"
        total = sum(f.queue_s for f in waiting)
        assert abs(sum(fleet.own_queued_s) - total) <= 1e-6 * (1 + total), "queues are miscounted"
