"""An instance without a model: the real protocol and membership, answers that are a function of the tokens before.

Each token depends on all tokens before it, so an answer that was put together wrongly (a retry that lost or repeated
a token) is another answer: `answer_of` tells what is right. Runs on a thread, or as a process like a real instance.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from poolweave.errors import PoolweaveError, TransferFailed
from poolweave.index import Identity
from poolweave.index.events import EventRecorder, KVEventPublisher
from poolweave.serving.control.messages import (
    Cancel,
    Complete,
    Copied,
    Copy,
    Counters,
    Decode,
    Discard,
    Done,
    Emit,
    ErrorInfo,
    Failure,
    Finished,
    Hello,
    Job,
    Prefill,
    Prefilled,
    Sent,
    Stats,
    Welcome,
)
from poolweave.serving.control.server import Caller, RpcServer
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.membership import InstanceMembership
from poolweave.serving.process.service import run_process
from poolweave.types import Tier

BLOCK = 16
FIRST = 40  # tokens of printable characters in the tests' tokenizer
_SPAN = 50
IDENTITY = Identity(model="fake")


def next_token(tokens: list[int]) -> int:
    """The token that follows these."""
    return FIRST + (sum(tokens) * 31 + len(tokens) * 7) % _SPAN


def answer_of(prompt: list[int], length: int) -> list[int]:
    """The right answer to `prompt`."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class NoPool:
    """What membership tells a pool, written down."""

    def __init__(self) -> None:
        self.peers: dict[str, Any] = {}

    def connect(self, peer: str, addresses: Any) -> None:
        self.peers[peer] = addresses

    def disconnect(self, peer: str) -> None:
        self.peers.pop(peer, None)


class FakeInstance:
    """Serves once `serve` runs. `token_s`: time of a token; `gate`: when set, each token waits for it to be open."""

    def __init__(self, config: InstanceConfig, token_s: float | None = None) -> None:
        self.config = config
        self.pool = NoPool()
        self.token_s = float(os.environ.get("FAKE_TOKEN_S", "0")) if token_s is None else token_s
        self.gate = threading.Event()
        self.gate.set()
        self.running: dict[str, threading.Event] = {}
        self.log: list[tuple[str, str]] = []
        self.handed_over: set[str] = set()
        self.failures: list[PoolweaveError] = []
        self.refuses_copies = False
        self.stops_after = 0  # tokens of a phase, of which the last ends the answer; 0: never
        self.mute = False  # the end of an answer is not told
        self.copying: Callable[[], None] = lambda: None  # called when a copy is asked for, before it is made
        self._seen: list[tuple[bytes, list[int]]] = []
        self._membership: InstanceMembership | None = None
        self.publisher = KVEventPublisher(BLOCK)
        self._recorder = EventRecorder(self.publisher)
        self._blocks = 0
        self.server = RpcServer(config.listen, secrets.randbits(62) | 1, name=config.name)

    @property
    def address(self) -> str:
        return self.server.address

    def serve(self) -> int:
        if self.config.registry is not None:
            self._membership = InstanceMembership(self.config, self.pool, (self.address, "shm://none"))  # type: ignore[arg-type]
        self.server.serve(self._handle, on_gone=lambda client: self._cancel_client(client))
        return 0

    def stop(self) -> None:
        self.server.stop()

    def close(self) -> None:
        if self._membership is not None:
            self._membership.close()
        for cancelled in list(self.running.values()):
            cancelled.set()
        self.server.close()
        self.publisher.close()

    def hold(self, tokens: list[int], salt: bytes = b"") -> None:
        """Say that these tokens' whole blocks are held, as a pool's index does."""
        count = len(tokens) // BLOCK
        payloads = np.arange(self._blocks, self._blocks + count, dtype=np.uint64)
        self._blocks += count
        digest = dataclasses.replace(IDENTITY, salt=salt).digest
        self._recorder.stored(np.array(tokens[: count * BLOCK], np.int32), payloads, [Tier.HBM] * count, digest)

    def _handle(self, caller: Caller, request: Any) -> None:
        name = type(request).__name__
        if isinstance(request, Hello):
            caller.reply(self._welcome())
        elif isinstance(request, Stats):
            caller.reply(Counters(pool={"hbm": {"active": len(self.running), "total": 100}}, jobs=len(self.running)))
        elif isinstance(request, (Cancel, Discard)):
            self.log.append((name, request.request))
            self.handed_over.discard(request.request)
            if isinstance(request, Cancel) and request.request in self.running:
                self.running[request.request].set()
            caller.reply(Done())
        elif isinstance(request, Copy):
            self.log.append((name, request.peer))
            self.copying()
            refused = Failure(ErrorInfo.of(TransferFailed("no copies here")))
            caller.reply(refused if self.refuses_copies else Copied(len(request.tokens) // 4))
        else:
            self.log.append((name, request.job.request))
            self._start(caller, request)

    def _start(self, caller: Caller, request: Any) -> None:
        if self.failures:
            caller.reply(Failure(ErrorInfo.of(self.failures.pop(0))))
            return
        cancelled = self.running[request.job.request] = threading.Event()
        cancelled.client = caller.client  # type: ignore[attr-defined]
        steps: dict[type, Callable[..., None]] = {
            Prefill: self._prefill,
            Decode: self._decode,
            Complete: self._complete,
        }
        if not self.token_s and self.gate.is_set():
            steps[type(request)](caller, request, cancelled)
        else:
            threading.Thread(target=steps[type(request)], args=(caller, request, cancelled), daemon=True).start()

    def _prefill(self, caller: Caller, request: Prefill, cancelled: threading.Event) -> None:
        cached = self._cached(request.job)
        reason = self._emit(caller, request.job, list(request.job.prompt()), 1, cancelled)
        if request.job.sampling.max_new_tokens > 1 and reason != "cancelled":
            reason = None  # type: ignore[assignment]
        self.running.pop(request.job.request, None)
        caller.reply(Prefilled(cached_tokens=cached, sent=Sent(), finish_reason=reason))

    def _decode(self, caller: Caller, request: Decode, cancelled: threading.Event) -> None:
        tokens = [*request.job.prompt(), request.first]
        reason = self._emit(caller, request.job, tokens, request.job.sampling.max_new_tokens - 1, cancelled)
        self._finish(caller, request.job, Finished(finish_reason=reason))

    def _complete(self, caller: Caller, request: Complete, cancelled: threading.Event) -> None:
        cached = self._cached(request.job)
        tokens = list(request.job.prompt())
        reason = self._emit(caller, request.job, tokens, request.job.sampling.max_new_tokens, cancelled)
        self._finish(caller, request.job, Finished(finish_reason=reason, cached_tokens=cached))

    def _finish(self, caller: Caller, job: Job, end: Finished) -> None:
        self.running.pop(job.request, None)
        if not self.mute:
            caller.reply(end)

    def _emit(self, caller: Caller, job: Job, tokens: list[int], count: int, cancelled: threading.Event) -> str:
        tokens = [int(token) for token in tokens]
        total, length = sum(tokens), len(tokens)
        for number in range(1, count + 1):
            while not cancelled.is_set() and not self.gate.wait(0.005):
                pass
            if self.token_s:
                cancelled.wait(self.token_s)
            if cancelled.is_set():
                return "cancelled"
            token = FIRST + (total * 31 + length * 7) % _SPAN
            total, length = total + token, length + 1
            reason = "stop" if number == self.stops_after else "length" if number == count else None
            caller.reply(Emit([token], reason))
            if reason is not None:
                return reason
        return "length"

    def _cached(self, job: Job) -> int:
        """Tokens of the longest prompt known that begins as this one, in whole blocks."""
        prompt = [int(token) for token in job.prompt()]
        best = 0
        for tenant, known in self._seen:
            if tenant == job.owner.salt:
                same = next((n for n, (a, b) in enumerate(zip(prompt, known, strict=False)) if a != b), None)
                best = max(best, min(len(prompt), len(known)) if same is None else same)
        self._seen = [*self._seen[-200:], (job.owner.salt, prompt)]
        return min(best, len(prompt) - 1) // BLOCK * BLOCK

    def _cancel_client(self, client: bytes) -> None:
        for cancelled in list(self.running.values()):
            if cancelled.client == client:  # type: ignore[attr-defined]
                cancelled.set()

    def _welcome(self) -> Welcome:
        return Welcome(
            model=self.config.name.partition(".")[2],
            instance=self.config.name,
            role=self.config.role.value,
            pid=os.getpid(),
            identity=IDENTITY,
            block_tokens=BLOCK,
            block_bytes=1024,
            pool_blocks=10_000,
            max_positions=4096,
            addresses={},
            events=self.publisher.endpoint,
            replay=self.publisher.replay_endpoint,
        )


class Thread:
    """A fake instance on a thread of this process, up once constructed."""

    def __init__(self, config: InstanceConfig, token_s: float = 0.0) -> None:
        self.instance = FakeInstance(config, token_s)
        self._thread = threading.Thread(target=self.instance.serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.instance.stop()
        self._thread.join()
        self.instance.close()


def quick(config: InstanceConfig, **changes: Any) -> InstanceConfig:
    return dataclasses.replace(config, **changes)


def spoken(config: InstanceConfig) -> FakeInstance:
    """One that prints a line."""
    sys.stderr.write(f"{config.name} is a fake\n")
    return FakeInstance(config)


if __name__ == "__main__":
    sys.exit(run_process(InstanceConfig, spoken, "ref_instance"))
