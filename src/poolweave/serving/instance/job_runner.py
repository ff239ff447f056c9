"""Runs an instance's tasks: one thread drives the engine, a few workers wait for peers in its place.

    submit -> [turn at prefill] -> worker: begin -> engine thread: steps -> worker: end, release, last reply

Whatever a task raises fails that request alone.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from poolweave.errors import DuplicateTransfer, InstanceClosed, PoolweaveError, TransferFailed
from poolweave.serving.control.messages import Emit, ErrorInfo, Failure, Reply
from poolweave.serving.engine.sequence import Emitted, Sequence
from poolweave.serving.instance.tasks import Task

logger = logging.getLogger(__name__)

_WORKERS = 32  # each waits for one peer; threads are made as they are needed
_STALLED_WAIT_S = 0.002  # the engine waits for blocks that transfers still hold
_MAX_FAILED_STEPS = 3  # in a row: then the engine is beyond use


class Engine(Protocol):
    """What computes: TorchEngine, several of them in turns, or CrossPool's. One thread adds and steps, any cancels."""

    @property
    def stalled(self) -> bool:
        """The last step could do nothing until somebody else frees blocks."""

    def add(self, sequence: Sequence) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def step(self) -> list[Emitted]: ...


@dataclass(slots=True)
class _Run:
    """A task in the engine."""

    task: Task
    sequence: Sequence
    answering: bool = False  # its first token is out
    error: Exception | None = None  # what ended it from outside the engine


class JobRunner:
    """Owns the engine from construction to `stop`. `submit` and the cancels may come from any thread.

    Prompts are computed one request at a time, in order of arrival: each finds what the one before it left in the
    index, and computing two at once would finish neither sooner. Answers are decoded together.
    """

    def __init__(self, engine: Engine, *, on_broken: Callable[[], None] = lambda: None) -> None:
        """`on_broken` is called, from the engine's thread, when that ends by itself: step after step failed, or what
        nobody expected came. The instance should end."""
        self._engine = engine
        self._on_broken = on_broken
        self._lock = threading.Lock()  # guards _tasks, _queued, _prefilling, _cancelled, _closed, _broken
        self._tasks: dict[str, Task] = {}
        self._queued: collections.deque[Task] = collections.deque()
        self._prefilling: Task | None = None
        self._cancelled: set[str] = set()
        self._closed = False
        self._broken = False  # the engine's thread gave up
        self._begun: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._running: dict[str, _Run] = {}  # the engine thread's
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="prefill")  # never waits for a peer
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="task")
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def submit(self, task: Task) -> None:
        """Take over `task`: from now on it is answered and released here. Raises InstanceClosed, DuplicateTransfer."""
        request = task.job.request
        with self._lock:
            if self._closed or self._broken:
                raise InstanceClosed("the instance is stopping; send the request to another one")
            if request in self._tasks:
                raise DuplicateTransfer(f"request {request} runs here already; give each its own name", tag=request)
            self._tasks[request] = task
            if not task.prefills:
                self._workers.submit(self._begin, task)
                return
            self._queued.append(task)
        self._next_prefill()

    def cancel(self, request: str) -> None:
        """End a request: it finishes as "cancelled" as soon as the engine has looked. No-op when it is not here."""
        with self._lock:
            task = self._tasks.get(request)
            if task is None:
                return
            self._cancelled.add(request)
            if task in self._queued:
                self._queued.remove(task)
                self._workers.submit(self._answer, task, task.cancelled())
        self._engine.cancel(request)
        task.give_up()

    def cancel_client(self, client: bytes) -> None:
        """End all requests of a client that has gone."""
        with self._lock:
            requests = [request for request, task in self._tasks.items() if task.caller.client == client]
        for request in requests:
            self.cancel(request)

    def stop(self) -> None:
        """Fail what has not finished with InstanceClosed and end the engine's thread. Idempotent.

        Workers may still wait for peers: close the pool, which ends their waits, then `join` them.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._queued = list(self._queued), collections.deque()
        for task in waiting:
            self._fail(task, InstanceClosed("the instance stopped before this request began"))
        self._begun.put(None)
        self._thread.join()

    def join(self) -> None:
        """Wait for the workers' last answers, after `stop`."""
        self._opener.shutdown(wait=True)
        self._workers.shutdown(wait=True)
        while not self._begun.empty():
            task = self._begun.get()
            if task is not None:
                self._fail(task, InstanceClosed("the instance stopped during this request"))

    # --- before the engine --------------------------------------------------------------------------------------

    def _next_prefill(self) -> None:
        with self._lock:
            if self._prefilling is not None or not self._queued or self._closed:
                return
            task = self._prefilling = self._queued.popleft()
            self._opener.submit(self._begin, task)

    def _prefill_done(self, task: Task) -> None:
        with self._lock:
            if self._prefilling is not task:
                return
            self._prefilling = None
        self._next_prefill()

    def _begin(self, task: Task) -> None:
        try:
            sequence = task.begin()
        except Exception as error:  # noqa: BLE001 - the request boundary
            if (
                isinstance(error, TransferFailed)
                and error.reason == "cancelled"
                and task.job.request in self._cancelled
            ):
                self._prefill_done(task)
                self._answer(task, task.cancelled())
            else:
                self._fail(task, error)
            return
        with self._lock:
            sequence.cancelled = task.job.request in self._cancelled
        self._begun.put(task)

    # --- the engine's thread ------------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            usable = self._compute()
        except Exception:
            logger.exception("the engine's thread broke")
            usable = False
        if not usable:  # whoever is asked here would wait for ever
            with self._lock:
                self._broken = True
            self._on_broken()
        for run in self._running.values():
            self._fail(run.task, run.error or InstanceClosed("the instance stopped during this request"))
        self._running.clear()

    def _compute(self) -> bool:
        """Until the runner closes; false when the engine is beyond use."""
        failures = 0
        while self._admit():
            try:
                emitted = self._engine.step()
            except Exception as error:
                logger.exception("a step of the engine failed")
                failures += 1
                self._cancel_running(error)
                if failures == _MAX_FAILED_STEPS:
                    return False
                continue
            failures = 0
            for event in emitted:
                self._handle(event)
        return True

    def _admit(self) -> bool:
        """Give the engine what has begun; wait while there is nothing to do. False when the runner closes."""
        while True:
            try:
                task = self._next_begun()
            except queue.Empty:
                return True
            if task is None:
                return False
            self._add(task)

    def _next_begun(self) -> Task | None:
        if not self._running:
            return self._begun.get()
        if self._engine.stalled:
            return self._begun.get(timeout=_STALLED_WAIT_S)
        return self._begun.get_nowait()

    def _add(self, task: Task) -> None:
        sequence = task.sequence
        assert sequence is not None, "a task comes here begun"
        try:
            self._engine.add(sequence)
        except Exception as error:  # noqa: BLE001 - the request boundary
            self._fail(task, error)
            return
        self._running[sequence.request_id] = _Run(task, sequence)
        if task.job.request in self._cancelled:
            sequence.cancelled = True

    def _handle(self, event: Emitted) -> None:
        run = self._running[event.request_id]
        if event.token is not None and run.error is None:
            self._emit(run, event)
        if event.finish_reason is not None:
            del self._running[event.request_id]
            self._prefill_done(run.task)
            self._workers.submit(self._end, run)

    def _emit(self, run: _Run, event: Emitted) -> None:
        assert event.token is not None
        if not run.answering:
            run.answering = True
            try:
                run.task.prompt_computed()
            except Exception as error:  # noqa: BLE001 - the request boundary
                run.error = error
                run.sequence.cancelled = True
                return
            if event.finish_reason is None:
                self._prefill_done(run.task)
        run.task.caller.reply(Emit([event.token], event.finish_reason))

    def _cancel_running(self, error: Exception) -> None:
        for run in self._running.values():
            run.error = error
            run.sequence.cancelled = True

    # --- after the engine ---------------------------------------------------------------------------------------

    def _end(self, run: _Run) -> None:
        try:
            if run.error is not None:
                raise run.error
            reply = run.task.end()
        except Exception as error:  # noqa: BLE001 - the request boundary
            self._fail(run.task, error)
            return
        self._answer(run.task, reply)

    def _fail(self, task: Task, error: Exception) -> None:
        if isinstance(error, PoolweaveError):
            logger.info("request %s failed: %s", task.job.request, error)
        else:
            logger.error("request %s failed", task.job.request, exc_info=error)
        self._prefill_done(task)
        self._answer(task, Failure(ErrorInfo.of(error)))

    def _answer(self, task: Task, reply: Reply) -> None:
        """The last word on a request: its blocks are free before the caller hears it."""
        try:
            task.release()
        except InstanceClosed:  # the pool is gone, and all its blocks with it
            pass
        except Exception:
            logger.exception("request %s could not give back its blocks", task.job.request)
        with self._lock:
            self._tasks.pop(task.job.request, None)
            self._cancelled.discard(task.job.request)
        task.caller.reply(reply)
