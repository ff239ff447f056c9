"""PoolClient: the engine's connection to a pool process. It comes back by itself when that process does."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from poolweave.errors import DeadlineExceeded, LayoutMismatch, PeerLost, PoolweaveError
from poolweave.integrations.vllm.question import Question
from poolweave.mempool import MemPool
from poolweave.serving.control.client import RpcClient
from poolweave.serving.pool_process.messages import (
    Attach,
    Attached,
    Fetch,
    PoolFigures,
    PoolReply,
    PoolState,
    Sending,
    pool_address,
)
from poolweave.types import Int32Array

logger = logging.getLogger(__name__)

_CALL_S = 5.0
_RETRY_S = 0.25  # how often a pool process that is gone is looked for
_ASKERS = 2


class PoolClient:
    """`peer`: the name of the process's pool while this engine is attached to it. A thread of its own keeps it up.

    A process that ended is not `present` until it is back. One that is there and slow to answer is, whether this
    engine has attached yet or not, until it has been silent for all of a request's wait: from then on nobody waits for
    it until it answers again.
    """

    def __init__(self, name: str, pool: MemPool, wait_s: float = 10.0) -> None:
        """`wait_s`: how long a request waits. Raises LayoutMismatch when the process keeps KV of another layout."""
        self.name = name
        self.peer: str | None = None
        self._pool = pool
        self._wait_s = wait_s
        self._client: RpcClient | None = None
        self._lives = 0  # that this engine attached to
        self._losing = threading.Lock()
        self._wake = threading.Event()
        self._settled = threading.Event()  # attached, or known to be gone
        self._silent = False
        self._stop = threading.Event()
        self._askers = ThreadPoolExecutor(_ASKERS, thread_name_prefix=f"pool-{name}")
        try:
            self._attach()
        except LayoutMismatch:
            self._askers.shutdown()
            raise
        except PoolweaveError as error:
            logger.warning("the pool process %s is not reachable yet, it will be looked for: %s", name, error)
        self._thread = threading.Thread(target=self._keep_up, name=f"pool-{name}", daemon=True)
        self._thread.start()

    @property
    def present(self) -> bool:
        """Whether it is worth waiting for."""
        return not self._silent and (self.peer is not None or not self._settled.is_set())

    def ask(self, tag: bytes, tokens: Int32Array, have: int, identity: bytes) -> Question:
        """Let it send what it has of `tokens` under `tag`, if that is more than `have` tokens."""
        request = Fetch(tag, identity, tokens.astype("<i4").tobytes(), have, self._pool.instance)
        future = self._askers.submit(self._ask, request, time.monotonic() + self._wait_s)
        return Question(future, lambda: self._lives if self.present else None)

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self._lose(self._client)
        self._settled.set()  # what is asked ends at once
        self._askers.shutdown(cancel_futures=True)

    def _ask(self, request: Fetch, until: float) -> tuple[int, int]:
        while self._settled.wait(until - time.monotonic()):
            client, life = self._client, self._lives
            left_s = until - time.monotonic()
            if client is None or self._stop.is_set() or left_s <= 0:  # its turn came too late, which tells nothing
                return 0, life
            try:
                answer = client.call(request, Sending, timeout_s=left_s)
                return answer.num_tokens, life
            except PeerLost:
                self._lose(client)
            except DeadlineExceeded:
                break
        self._silent = True
        logger.warning("the pool process %s said nothing for %g s; nobody waits until it does", self.name, self._wait_s)
        return 0, 0

    def _attach(self) -> None:
        request = Attach(self._pool.layout, self._pool.instance, self._pool.addresses)
        client = None
        try:
            client = RpcClient(pool_address(self.name), peer=self.name, replies=PoolReply)
            attached = client.greet(request, Attached, timeout_s=_CALL_S)
            self._pool.connect(attached.instance, attached.addresses)
        except DeadlineExceeded:
            raise  # somebody listens there: the next one is answered, or finds nobody
        except BaseException:
            if client is not None:
                client.close()
            self._settled.set()
            raise
        self._lives += 1
        self._client, self.peer, self._silent = client, attached.instance, False
        self._settled.set()

    def _keep_up(self) -> None:
        while not self._stop.is_set():
            if self._settled.is_set():
                self._wake.wait(_RETRY_S)
                self._wake.clear()
            client = self._client  # an asker may let go of it at any time
            if client is not None and client.lost:
                self._lose(client)
                client = None
            try:
                if client is None:
                    self._attach()
                    logger.info("the pool process %s is there", self.name)
                elif self._silent:
                    client.call(PoolState(), PoolFigures, timeout_s=_CALL_S)
                    self._silent = False
            except PoolweaveError as error:
                logger.debug("pool process %s: %s", self.name, error)

    def _lose(self, client: RpcClient | None) -> None:
        """Let go of it, once. Whether the process has ended, or only stood still for long, the next attach tells."""
        with self._losing:
            if client is None or client is not self._client:
                return
            self._settled.clear()
            if self.peer is not None:
                self._pool.disconnect(self.peer)  # before the next attach, which connects it
            self.peer = self._client = None
        if not self._stop.is_set():
            logger.warning("lost the pool process %s; prompts are computed until it is back", self.name)
        client.close()
        self._wake.set()
