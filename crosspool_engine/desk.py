"""Requests on the board: seated, their tokens told as they come, their ends told once. Moves no batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.control import SeatFinish
from poolweave.crosspool_engine.replica import Replica
from poolweave.crosspool_engine.request import DecodeRequest, Emitted, FinishReason, Generation
from poolweave.crosspool_engine.running import Running
from poolweave.errors import NotFinite, PoolweaveError

_REASONS: dict[int, FinishReason] = {SeatFinish.STOP: "stop", SeatFinish.LENGTH: "length", SeatFinish.BROKEN: "error"}


class Desk:
    """Who sits where. News gather until they are taken."""

    def __init__(self, board: Board, seats: int) -> None:
        self._board = board
        self._free = list(range(seats))
        self._seats = seats
        self.running: dict[str, Running] = {}
        self.results: dict[str, Generation] = {}
        self._news: list[Emitted] = []

    def seat(self, request: DecodeRequest, replicas: Sequence[Replica]) -> Running | None:
        """Give a request a seat and all the KV it can need, on that of `replicas` with the most free KV that has room.

        Among equally free ones that whose history has most of it. None where there is no room now. Raises WorkerLost.
        """
        if not self._free:
            return None
        for replica in sorted(replicas, key=lambda one: (-one.free_bytes, -one.known_tokens(request), one.ranks)):
            leases = replica.take(request)
            if leases is not None:
                break
        else:
            return None
        running = Running(request, replica, self._free.pop(), leases, told=request.num_prompt)
        sampling = {
            "stops": list(request.stop_token_ids), "temperature": request.temperature, "top_p": request.top_p,
            "seed": request.seed,
        }  # fmt: skip
        tokens = np.asarray(request.tokens).tolist()
        tables = [list(lease.blocks) for lease in leases]
        self._board.set_seat(running.seat, tokens, leases[0].num_computed, request.end, tables, sampling)
        self.running[running.name] = running
        return running

    def tell(self, running: Running) -> None:
        """News of tokens that came since the last time."""
        known = self._board.position(running.seat) + 1
        if known > running.told:
            for token in self._board.tokens(running.seat)[running.told : known].tolist():
                self._news.append(Emitted(running.name, token))
            running.told = known

    def end(self, running: Running, error: PoolweaveError | None = None) -> None:
        """A request that takes part no more: tell its end, keep its result, give seat and blocks back."""
        self.tell(running)
        request, seat, replica = running.request, running.seat, running.replica
        reason: FinishReason = "error" if error else _REASONS.get(self._board.finish(seat), "cancelled")
        if reason == "error" and error is None:
            error = NotFinite(f"request {running.name} came to logits that are not finite")
        tokens, stamps, computed = self._board.tokens(seat), self._board.stamps(seat), self._board.position(seat)
        kv = None
        if request.return_kv and error is None:
            kv = replica.read(request.model, running.leases, request.known_blocks, computed)
        first = request.num_prompt
        self.results[running.name] = Generation(
            running.name,
            tokens[first:].copy(),
            stamps[first:].copy(),
            reason,
            error,
            kv,
            running.leases[0].reused_tokens,
        )
        self._news.append(Emitted(running.name, None, reason, error))
        del self.running[running.name]
        self._free.append(seat)
        replica.give(request.model, running.leases, None if error else tokens[:computed])

    def end_unseated(self, request: DecodeRequest, reason: FinishReason, error: PoolweaveError | None) -> None:
        """The end of a request that never got a seat."""
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        self.results[request.request_id] = Generation(request.request_id, *nothing, reason, error)
        self._news.append(Emitted(request.request_id, None, reason, error))

    def take_news(self) -> list[Emitted]:
        """Tell all that run, and hand over what was gathered."""
        for each in self.running.values():
            self.tell(each)
        news, self._news = self._news, []
        return news

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def check(self) -> None:
        """Assert that each seat is free or taken, once; for tests."""
        assert sorted(self._free + [running.seat for running in self.running.values()]) == list(range(self._seats))
