"""The worker processes of one engine: the attention worker and the FFN ranks, as one whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.worker_messages import Activate, Deactivate, Remote, WorkerSpec
from poolweave.crosspool_engine.worker_process import WorkerProcess
from poolweave.errors import WorkerLost
from poolweave.mempool import Arena


class Crew:
    """Starts all workers, or none. By place: `workers[r]` is attention rank r's, after them come the FFN ranks'.

    `arenas`: of the attention ranks' KV.
    """

    def __init__(self, config: EngineConfig, board: Board, arenas: Sequence[Arena]) -> None:
        self.config = config
        self._board = board
        self._arenas = arenas
        self.workers: list[WorkerProcess] = []
        try:
            for place in range(config.attention_ranks + config.ffn_ranks):
                self.workers.append(self._start(place))
            for worker in self.workers:
                worker.wait_until_up()
        except BaseException:
            self.close()
            raise

    def dead(self) -> list[int]:
        """Places of workers that died. One that a signal stopped for long is made one of them."""
        for worker in self.workers:
            worker.end_if_stopped()
        return [place for place, worker in enumerate(self.workers) if not worker.alive]

    def replace(self, places: Collection[int]) -> None:
        """Start new workers where some died, side by side. They serve nothing yet."""
        for place in places:
            self.workers[place].kill()
            self.workers[place] = self._start(place)
        for place in places:
            self.workers[place].wait_until_up()

    def activate(self, orders: Mapping[int, Activate]) -> None:
        """Have each named worker load its part, side by side: all, or none when one cannot. Raises what it raised."""
        asked: list[int] = []
        errors: list[Exception] = []
        for place, order in orders.items():
            try:
                self.workers[place].ask(order)
                asked.append(place)
            except WorkerLost as error:
                errors.append(error)
        for place in asked:
            try:
                self.workers[place].answer()
            except Exception as error:  # noqa: BLE001 - raised below, when the others have answered
                errors.append(error)
        if errors:
            self.deactivate(next(iter(orders.values())).index, list(orders))
            raise errors[0]

    def deactivate(self, index: int, places: Sequence[int] | None = None) -> None:
        """Have workers give a model back. Dead ones have."""
        for place in range(len(self.workers)) if places is None else places:
            try:
                self.workers[place].call(Deactivate(index))
            except WorkerLost:
                continue

    def close(self) -> None:
        """End them. Idempotent."""
        self._board.abort()
        for worker in self.workers:
            worker.close()
        self.workers.clear()

    def _start(self, place: int) -> WorkerProcess:
        config = self.config
        rank = place - config.attention_ranks
        away = rank - (config.ffn_ranks - len(config.ffn_hosts))
        spec = WorkerSpec(
            rank=place if rank < 0 else rank, board_fd=self._board.fd, channel_fd=-1,
            arena_fds=self._arenas[place].descriptors if rank < 0 else None, block_tokens=config.block_tokens,
            kernels=config.kernels, core=None if config.cores is None else config.cores[place],
            remote=Remote(config.ffn_hosts[away], config.board_sizes) if away >= 0 else None,
        )  # fmt: skip
        return WorkerProcess(f"attention-{place}" if rank < 0 else f"ffn-{rank}", spec)
