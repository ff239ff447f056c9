"""What an instance does for one request, phase by phase. A task owns its sequence's blocks until `release`.

`begin` and `end` may wait for a peer and run on a worker; `prompt_computed` runs between two steps of the engine and
must not. Knows no thread: JobRunner does.
"""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar

import numpy as np

from poolweave.errors import OutOfBlocks, PeerLost, PoolweaveError, TransferFailed, TransferTimeout, UnknownPeer
from poolweave.index import Identity
from poolweave.mempool import Blocks, MemPool
from poolweave.serving.control.messages import ErrorInfo, Finished, Job, Prefilled, Reply, Sent
from poolweave.serving.control.server import Caller
from poolweave.serving.engine.sequence import Sequence
from poolweave.serving.instance.early_hand_over import EarlyHandOver
from poolweave.serving.instance.flows import CachedTokens, Receiver, flow_named
from poolweave.serving.instance.granularity import HandOverPolicy
from poolweave.serving.instance.recompute import Recomputes
from poolweave.transfer import Transfer


@dataclasses.dataclass(frozen=True, slots=True)
class Workplace:
    """What all tasks of an instance share. `wait_s` bounds every wait for a peer that has no deadline of its own."""

    pool: MemPool
    identity: Identity
    wait_s: float
    hand_over: HandOverPolicy
    model: str = ""  # its name, where the instance has several
    recomputes: Recomputes = dataclasses.field(default_factory=Recomputes)


class Task:
    """One request on one instance, as JobRunner drives it: begin, steps of the engine, end, release."""

    prefills: ClassVar[bool] = True  # it computes a prompt, so it takes its turn at that

    def __init__(self, workplace: Workplace, caller: Caller, job: Job) -> None:
        self.caller = caller
        self.job = job
        self.pool = workplace.pool
        self.flow = flow_named(job.flow)
        self.ns = self.pool.namespace(job.owner.identity(workplace.identity))
        self.block_tokens = self.pool.layout.block_tokens
        self.cached_tokens = 0
        self.sequence: Sequence | None = None
        self.model = workplace.model
        self._wait_s = workplace.wait_s
        self._policy = workplace.hand_over

    def begin(self) -> Sequence:
        """What the engine is to run, prefix and all. May wait; raises what makes the request impossible."""
        prompt = self.job.prompt()
        blocks = self.flow.reuse(self.pool, prompt, self.ns)
        self.cached_tokens = len(blocks) * self.block_tokens
        self.sequence = Sequence(
            request_id=self.job.request,
            tokens=prompt.tolist(),
            model=self.model,
            salt=self.job.owner.salt,
            sampling=self.job.sampling,
            num_computed=self.cached_tokens,
            blocks=blocks,
            ns=self.ns,
        )
        return self.sequence

    def prompt_computed(self) -> None:
        """All of the prompt's KV is in blocks: the first token is about to go out. Does not wait."""
        self.flow.keep_prompt(self.pool, self.computed(len(self.job.tokens) // 4))

    def end(self) -> Reply:
        """The sequence is finished: remember and send its KV as the flow wants. May wait; raises what failed."""
        raise NotImplementedError

    def cancelled(self) -> Reply:
        """The last reply to a request that was cancelled before it began."""
        return Finished(finish_reason="cancelled")

    def give_up(self) -> None:
        """It was cancelled: end what it waits for, where the answer needs that. Any thread; harmless twice."""

    def release(self) -> None:
        """Give back every block; idempotent."""
        if self.sequence is not None:
            blocks, self.sequence.blocks = self.sequence.blocks, Blocks.empty()
            self.pool.free(blocks)

    def computed(self, num_tokens: int | None = None) -> CachedTokens:
        """The sequence's tokens whose KV is in blocks, or the first `num_tokens` of them."""
        sequence = self.finished_sequence
        count = sequence.num_computed if num_tokens is None else num_tokens
        tokens = np.array(sequence.tokens[:count], np.int32)
        return CachedTokens(tokens, sequence.blocks[: self.pool.layout.num_blocks(count)], self.ns)

    @property
    def finished_sequence(self) -> Sequence:
        """The sequence; raises what it ended with when that was an error."""
        assert self.sequence is not None, "a task ends after it began"
        if self.sequence.error is not None:
            raise self.sequence.error
        return self.sequence

    def wait(self, transfer: Transfer) -> Sent:
        """Until the transfer is confirmed. Raises TransferFailed and its kinds, TransferTimeout among them."""
        try:
            report = transfer.result(self.patience())
        except BaseException:
            transfer.cancel()
            raise
        self._policy.observe_transfer(report)
        return Sent(
            num_blocks=report.num_blocks,
            pulled_blocks=report.pulled_blocks,
            nbytes=report.nbytes,
            calls=report.calls,
            seconds=report.seconds,
            early_nbytes=report.early_nbytes,
            steps=report.steps,
        )

    def patience(self) -> float:
        """Seconds that a peer may still take."""
        if self.caller.deadline is None:
            return self._wait_s
        return max(0.0, min(self._wait_s, self.caller.deadline - time.monotonic()))


class PrefillTask(Task):
    """Compute a prompt and its first token, hand the KV to the decode instance."""

    def __init__(self, workplace: Workplace, caller: Caller, job: Job, decode: str) -> None:
        super().__init__(workplace, caller, job)
        self._decode = decode
        self._transfer: Transfer | None = None
        self._early: EarlyHandOver | None = None
        self._given_up = False

    def begin(self) -> Sequence:
        sequence = super().begin()
        sequence.sampling = dataclasses.replace(self.job.sampling, max_new_tokens=1)
        if self._policy.is_early and self.job.sampling.max_new_tokens > 1:
            cached = range(len(sequence.blocks))
            self._early = EarlyHandOver(self.pool, sequence, self._policy, cached, self._begin_early)
            sequence.hook = self._early
        return sequence

    def end(self) -> Prefilled:
        reason = "cancelled" if self._given_up else self._reason(self.finished_sequence)
        if reason is not None:
            return Prefilled(cached_tokens=self.cached_tokens, sent=Sent(), finish_reason=reason)
        try:
            sent = self._hand_over()
        except PoolweaveError as error:
            if self._given_up:
                return self.cancelled()
            if not isinstance(error, (TransferFailed, UnknownPeer)):  # membership may tell the door of a peer first
                raise
            return Prefilled(cached_tokens=self.cached_tokens, sent=Sent(), sent_error=ErrorInfo.of(error))
        return Prefilled(cached_tokens=self.cached_tokens, sent=sent)

    def release(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.abandon()
        if self.sequence is not None:
            self.sequence.hook = None
        super().release()

    def _begin_early(self) -> Transfer:
        sequence = self.sequence
        assert sequence is not None, "its hook is called"
        kv = self.computed(sequence.num_prompt)
        return self.flow.hand_over(self.pool, kv, Receiver(self._decode, tag_of(self.job.request), growing=True))

    def _hand_over(self) -> Sent:
        """Wait for the hand-over that began early; send all when there was none, or when it did not end well."""
        early = self._early.take() if self._early is not None else None
        if early is not None:
            self._send(early)
            try:
                return self.wait(early)
            except (TransferFailed, OutOfBlocks) as error:
                if self._given_up or isinstance(error, (TransferTimeout, PeerLost)):
                    raise
        to = Receiver(self._decode, tag_of(self.job.request))
        return self.wait(self._send(self.flow.hand_over(self.pool, self.computed(), to)))

    def _send(self, transfer: Transfer) -> Transfer:
        self._transfer = transfer
        if self._given_up:  # just now: one of the two sees the other
            transfer.cancel()
        return transfer

    def give_up(self) -> None:
        self._given_up = True
        if self._transfer is not None:
            self._transfer.cancel()

    def cancelled(self) -> Prefilled:
        return Prefilled(cached_tokens=0, sent=Sent(), finish_reason="cancelled")

    def _reason(self, sequence: Sequence) -> str | None:
        """Why the whole answer is over; None when only this instance's one token is."""
        if sequence.finish_reason == "length" and self.job.sampling.max_new_tokens > 1:
            return None
        return sequence.finish_reason


class CompleteTask(Task):
    """Both phases here."""

    def end(self) -> Finished:
        reason = self.finished_sequence.finish_reason
        assert reason is not None, "a task ends with its sequence"
        if reason != "cancelled":
            self.flow.keep_answer(self.pool, self.computed())
        return Finished(finish_reason=reason, cached_tokens=self.cached_tokens)


def tag_of(request: str) -> bytes:
    """Under which the prompt's KV crosses; a request's name is unique, so its tag is."""
    return request.encode()
