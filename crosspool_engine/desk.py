"""Requests on the board: seated, their tokens told as they come, their ends told once. Moves no batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.control import SeatFinish
from poolweave.crosspool_engine.kv_pool import KvPool
from poolweave.crosspool_engine.request import DecodeRequest, Emitted, FinishReason, Generation
from poolweave.crosspool_engine.running import Running
from poolweave.errors import NotFinite, PoolweaveError

_REASONS: dict[int, FinishReason] = {SeatFinish.STOP: "stop", SeatFinish.LENGTH: "length", SeatFinish.BROKEN: "error"}


class Desk:
    """Who sits where. `pools`: KV by attention rank. News gather until they are taken."""

    def __init__(self, board: Board, seats: int, pools: Sequence[KvPool]) -> None:
        self._board = board
        self._pools = pools
        self._free = list(range(seats))
        self._seats = seats
        self.running: dict[str, Running] = {}
        self.results: dict[str, Generation] = {}
        self._news: list[Emitted] = []

    def seat(self, request: DecodeRequest, ranks: Sequence[int]) -> Running | None:
        """Give a request a seat and all the KV it can need, on the one of `ranks` with the most free KV that has room.

        Among equally free ones that whose history has most of it. None where there is no room now. Raises WorkerLost.
        """
        if not self._free:
            return None
        pools = [self._pools[rank] for rank in ranks]
        for pool in sorted(pools, key=lambda each: (-each.free_bytes, -each.known_tokens(request), each.rank)):
            lease = pool.take(request)
            if lease is not None:
                break
        else:
            return None
        running = Running(request, pool.rank, self._free.pop(), lease, told=request.num_prompt)
        sampling = {
            "stops": list(request.stop_token_ids), "temperature": request.temperature, "top_p": request.top_p,
            "seed": request.seed,
        }  # fmt: skip
        tokens = np.asarray(request.tokens).tolist()
        self._board.set_seat(running.seat, tokens, lease.num_computed, request.end, list(lease.blocks), sampling)
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
        request, seat, pool = running.request, running.seat, self._pools[running.rank]
        reason: FinishReason = "error" if error else _REASONS.get(self._board.finish(seat), "cancelled")
        if reason == "error" and error is None:
            error = NotFinite(f"request {running.name} came to logits that are not finite")
        tokens, stamps, computed = self._board.tokens(seat), self._board.stamps(seat), self._board.position(seat)
        kv = None
        if request.return_kv and error is None:
            kv = pool.read(request.model, running.lease.blocks[: pool.num_blocks(request.model, computed)])
        first = request.num_prompt
        self.results[running.name] = Generation(
            running.name,
            tokens[first:].copy(),
            stamps[first:].copy(),
            reason,
            error,
            kv,
            running.lease.shared * pool.block_tokens,
        )
        self._news.append(Emitted(running.name, None, reason, error))
        del self.running[running.name]
        self._free.append(seat)
        pool.give(request.model, running.lease, None if error else tokens[:computed])

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
