"""JobRunner over an engine and tasks that do as a test says: order, failures, cancels, the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ref_waiting import until

from poolweave.errors import DuplicateTransfer, InstanceClosed, OutOfBlocks, RequestRefused, TransferFailed
from poolweave.serving.control.messages import Emit, Failure, Finished, Job
from poolweave.serving.engine.sequence import Sequence
from poolweave.serving.instance.job_runner import JobRunner


@dataclass(frozen=True)
class Emitted:
    request_id: str
    token: int | None
    finish_reason: str | None


class Engine:
    """Gives every sequence a token a step until it has `length`; steps only when a test lets it."""

    def __init__(self) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.allowed = threading.Semaphore(0)
        self.stalled = False
        self.length = 3
        self.failures: list[Exception] = []
        self.added: list[str] = []

    def add(self, sequence: Sequence) -> None:
        if not sequence.tokens:
            raise RequestRefused("the prompt is empty")
        self.added.append(sequence.request_id)
        self.sequences[sequence.request_id] = sequence

    def cancel(self, request_id: str) -> bool:
        if request_id in self.sequences:
            self.sequences[request_id].cancelled = True
        return request_id in self.sequences

    def step(self) -> list[Emitted]:
        assert self.allowed.acquire(timeout=30)
        if self.failures:
            raise self.failures.pop(0)
        return [self._advance(sequence) for sequence in list(self.sequences.values())]

    def _advance(self, sequence: Sequence) -> Emitted:
        if sequence.cancelled:
            del self.sequences[sequence.request_id]
            return Emitted(sequence.request_id, None, "cancelled")
        sequence.tokens.append(7)
        done = sequence.num_answer >= self.length
        if done:
            del self.sequences[sequence.request_id]
        return Emitted(sequence.request_id, 7, "length" if done else None)


class Caller:
    def __init__(self, client: bytes) -> None:
        self.client = client
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def reply(self, message: Any) -> None:
        self.replies.put(message)

    def last(self) -> Any:
        """The final reply; tokens before it are passed over."""
        while True:
            message = self.replies.get(timeout=30)
            if not isinstance(message, Emit):
                return message


class Task:
    """Counts what happens to it; `hooks` are called in place of doing nothing."""

    def __init__(self, name: str, prefills: bool = True, client: bytes = b"c", **hooks: Callable[[], None]) -> None:
        self.job = Job(request=name, tokens=b"", flow="colocated", sampling=None)  # type: ignore[arg-type]
        self.prefills = prefills
        self.caller = Caller(client)
        self.sequence: Sequence | None = None
        self.released = 0
        self.began = threading.Event()
        self._hooks = hooks

    def begin(self) -> Sequence:
        self.began.set()
        self._call("begin")
        self.sequence = Sequence(request_id=self.job.request, tokens=[1, 2] if "empty" not in self._hooks else [])
        return self.sequence

    def prompt_computed(self) -> None:
        self._call("prompt_computed")

    def give_up(self) -> None:
        self._call("give_up")

    def end(self) -> Finished:
        self._call("end")
        assert self.sequence is not None
        reason = "cancelled" if self.sequence.cancelled else "length"
        return Finished(finish_reason=reason)

    def cancelled(self) -> Finished:
        return Finished(finish_reason="cancelled")

    def release(self) -> None:
        self.released += 1
        self._call("release")

    def _call(self, hook: str) -> None:
        if hook in self._hooks:
            self._hooks[hook]()


def fail(error: Exception) -> Callable[[], None]:
    def hook() -> None:
        raise error

    return hook


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def broken() -> list[bool]:
    return []


@pytest.fixture
def runner(engine: Engine, broken: list[bool]) -> Iterator[JobRunner]:
    runner = JobRunner(engine, on_broken=lambda: broken.append(True))  # type: ignore[arg-type]
    yield runner
    engine.allowed.release(1000)
    runner.stop()
    runner.join()


def submit(runner: JobRunner, *tasks: Task) -> None:
    for task in tasks:
        runner.submit(task)  # type: ignore[arg-type]


def test_a_task_gives_its_tokens_then_its_last_reply_and_is_released_before_it(
    runner: JobRunner, engine: Engine
) -> None:
    task = Task("a")
    submit(runner, task)
    engine.allowed.release(3)
    replies = [task.caller.replies.get(timeout=30) for _ in range(4)]
    assert replies == [Emit([7]), Emit([7]), Emit([7], "length"), Finished(finish_reason="length")]
    assert task.released == 1
    assert runner.num_tasks == 0


def test_prompts_are_computed_one_at_a_time_and_answers_together(runner: JobRunner, engine: Engine) -> None:
    first, second, decode = Task("first"), Task("second"), Task("decode", prefills=False)
    submit(runner, first, second)
    until(lambda: engine.added == ["first"])
    submit(runner, decode)
    assert not second.began.is_set()
    engine.allowed.release(1)
    assert second.began.wait(30), "the first token is out: the next prompt's turn"
    engine.allowed.release(20)
    assert [task.caller.last().finish_reason for task in (first, second, decode)] == ["length"] * 3


@pytest.mark.parametrize("hook", ["begin", "prompt_computed", "end"])
@pytest.mark.parametrize("error", [OutOfBlocks("none left", needed=3), ZeroDivisionError("a bug")])
def test_what_a_task_raises_fails_it_alone(runner: JobRunner, engine: Engine, hook: str, error: Exception) -> None:
    bad, good = Task("bad", **{hook: fail(error)}), Task("good")
    submit(runner, bad, good)
    engine.allowed.release(20)
    failure = bad.caller.last()
    assert isinstance(failure, Failure)
    assert str(error) in failure.error.message
    assert bad.released == 1
    assert good.caller.last() == Finished(finish_reason="length")


def test_a_request_whose_blocks_cannot_be_given_back_is_answered(runner: JobRunner, engine: Engine) -> None:
    task = Task("a", release=fail(ZeroDivisionError("a bug")))
    submit(runner, task)
    engine.allowed.release(20)
    assert task.caller.last() == Finished(finish_reason="length")
    assert runner.num_tasks == 0


def test_what_the_engine_refuses_fails_alone(runner: JobRunner, engine: Engine) -> None:
    bad, good = Task("bad", empty=lambda: None), Task("good")
    submit(runner, bad, good)
    engine.allowed.release(20)
    assert bad.caller.last().error.kind == "RequestRefused"
    assert good.caller.last() == Finished(finish_reason="length")


def test_a_step_that_fails_takes_its_batch_and_not_the_instance(
    runner: JobRunner, engine: Engine, broken: list[bool]
) -> None:
    running = Task("running")
    submit(runner, running)
    until(lambda: engine.added == ["running"])
    engine.failures.append(RuntimeError("out of luck"))
    engine.allowed.release(20)
    assert "RuntimeError: out of luck" in running.caller.last().error.message
    later = Task("later")
    submit(runner, later)
    assert later.caller.last() == Finished(finish_reason="length")
    assert broken == []


def test_an_engine_that_fails_again_and_again_is_given_up(
    runner: JobRunner, engine: Engine, broken: list[bool]
) -> None:
    task = Task("a")
    submit(runner, task)
    until(lambda: engine.added == ["a"])
    engine.failures += [RuntimeError("beyond use")] * 3
    engine.allowed.release(20)
    assert "beyond use" in task.caller.last().error.message
    until(lambda: broken == [True])
    with pytest.raises(InstanceClosed):
        runner.submit(Task("b"))


def test_an_engine_that_tells_of_a_request_it_was_never_given_is_given_up(
    runner: JobRunner, engine: Engine, broken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends: an instance that lived on without it would keep everybody waiting."""
    task = Task("a")
    submit(runner, task)
    until(lambda: engine.added == ["a"])
    monkeypatch.setattr(engine, "_advance", lambda sequence: Emitted("nobody", 7, None))
    engine.allowed.release(1)
    assert task.caller.last().error.kind == "InstanceClosed"
    until(lambda: broken == [True])
    with pytest.raises(InstanceClosed):
        runner.submit(Task("b"))


def test_the_same_request_twice_is_refused(runner: JobRunner, engine: Engine) -> None:
    submit(runner, Task("a", prefills=False))
    with pytest.raises(DuplicateTransfer, match="request a runs here already"):
        submit(runner, Task("a"))


def test_cancelling_ends_a_running_and_a_queued_task(runner: JobRunner, engine: Engine) -> None:
    running, queued = Task("running"), Task("queued")
    submit(runner, running, queued)
    until(lambda: engine.added == ["running"])
    runner.cancel("queued")
    assert queued.caller.last() == Finished(finish_reason="cancelled")
    assert not queued.began.is_set()
    runner.cancel("running")
    runner.cancel("unknown")
    engine.allowed.release(20)
    assert running.caller.last() == Finished(finish_reason="cancelled")
    assert (running.released, queued.released) == (1, 1)


def test_a_cancel_during_begin_is_not_lost(runner: JobRunner, engine: Engine) -> None:
    go_on = threading.Event()
    task = Task("a", begin=lambda: [None, go_on.wait(30)][0])
    submit(runner, task)
    assert task.began.wait(30)
    runner.cancel("a")
    go_on.set()
    engine.allowed.release(20)
    assert task.caller.last() == Finished(finish_reason="cancelled")


def test_a_cancel_ends_what_begin_waits_for(runner: JobRunner, engine: Engine) -> None:
    given_up = threading.Event()

    def begin() -> None:
        assert given_up.wait(60)
        raise TransferFailed("nobody receives it", reason="cancelled")

    task = Task("1", prefills=False, begin=begin, give_up=given_up.set)
    submit(runner, task)
    assert task.began.wait(60)
    runner.cancel("1")
    assert task.caller.last() == Finished(finish_reason="cancelled")
    assert task.released == 1


def test_a_client_that_has_gone_loses_its_tasks_only(runner: JobRunner, engine: Engine) -> None:
    engine.length = 10**9
    engine.allowed.release(10**7)
    gone, stays = Task("gone", False, b"gone"), Task("stays", False, b"stays")
    submit(runner, gone, stays)
    until(lambda: len(engine.added) == 2)
    runner.cancel_client(b"gone")
    assert gone.caller.last() == Finished(finish_reason="cancelled")
    engine.length = 3
    assert stays.caller.last() == Finished(finish_reason="length")


def test_waits_for_a_peer_do_not_hold_up_other_prompts(runner: JobRunner, engine: Engine) -> None:
    """Many hand-overs to a peer that says nothing: the next prompt is computed all the same."""
    answered = threading.Event()
    stuck = [Task(f"stuck-{n}", end=lambda: [None, answered.wait(30)][0]) for n in range(12)]
    engine.allowed.release(1000)
    submit(runner, *stuck)
    free = Task("free")
    submit(runner, free)
    assert free.began.wait(30)
    answered.set()
    assert free.caller.last() == Finished(finish_reason="length")
    assert all(task.caller.last() == Finished(finish_reason="length") for task in stuck)


def test_stopping_fails_what_is_left_and_refuses_more(runner: JobRunner, engine: Engine) -> None:
    running, queued = Task("running"), Task("queued")
    submit(runner, running, queued)
    until(lambda: engine.added == ["running"])
    engine.allowed.release(1000)
    runner.stop()
    runner.stop()
    runner.join()
    outcomes = [task.caller.last() for task in (running, queued)]
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].error.kind == "InstanceClosed"
    assert isinstance(outcomes[0], (Failure, Finished))
    assert (running.released, queued.released) == (1, 1)
    with pytest.raises(InstanceClosed, match="send the request to another one"):
        submit(runner, Task("late"))
