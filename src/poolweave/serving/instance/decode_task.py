"""What the decode instance does for one request: take the prompt's KV, or compute it again, and answer."""

from __future__ import annotations

import time

from poolweave.errors import PoolweaveError, TransferFailed
from poolweave.mempool import Blocks
from poolweave.serving.control.messages import Decode, ErrorInfo, Finished, Sent
from poolweave.serving.control.server import Caller
from poolweave.serving.engine.sequence import Sequence
from poolweave.serving.instance.tasks import Task, Workplace, tag_of


class DecodeTask(Task):
    """Go on after the first token with KV that came from the prefill instance; perhaps send the answer's back.

    Where the KV did not come, or came wrong, the prompt is computed here: slower, the same answer.
    """

    prefills = False

    def __init__(self, workplace: Workplace, caller: Caller, request: Decode) -> None:
        super().__init__(workplace, caller, request.job)
        self._first = request.first
        self._prefill = request.prefill
        self._lost = request.lost
        self._recomputes = workplace.recomputes
        self._given_up = False

    def begin(self) -> Sequence:
        prompt = self.job.prompt().tolist()
        blocks, num_computed = self._received(len(prompt))
        self.sequence = Sequence(
            request_id=self.job.request,
            tokens=[*prompt, self._first],
            model=self.model,
            salt=self.job.owner.salt,
            sampling=self.job.sampling,
            num_prompt=len(prompt),
            num_computed=num_computed,
            blocks=blocks,
            ns=self.ns,
        )
        if num_computed == len(prompt):
            self._check(len(blocks), self.pool.layout.num_blocks(len(prompt)))
        return self.sequence

    def give_up(self) -> None:
        self._given_up = True
        self.pool.discard(tag_of(self.job.request))

    def _received(self, num_prompt: int) -> tuple[Blocks, int]:
        """Blocks, and how many of the prompt's tokens they hold: all when its KV came, what is known here when not."""
        why = self._lost
        if why is None:
            try:
                with self.pool.receive(tag_of(self.job.request), timeout=self.patience()) as arrival:
                    return arrival.take(), num_prompt
            except TransferFailed as error:
                if self._given_up or self._time_is_over():
                    raise
                why = str(error)
        self._recomputes.note(self.job.request, why)
        blocks = self.flow.reuse(self.pool, self.job.prompt(), self.ns)
        return blocks, len(blocks) * self.block_tokens

    def _time_is_over(self) -> bool:
        return self.caller.deadline is not None and time.monotonic() >= self.caller.deadline

    def prompt_computed(self) -> None:
        """It came computed; what was computed again is remembered with the answer."""

    def end(self) -> Finished:
        reason = self.finished_sequence.finish_reason
        assert reason is not None, "a task ends with its sequence"
        if reason == "cancelled":
            return Finished(finish_reason=reason)
        kv = self.computed()
        self.flow.keep_answer(self.pool, kv)
        try:
            transfer = self.flow.give_back(self.pool, kv, self._prefill)
            sent = Sent() if transfer is None else self.wait(transfer)
        except PoolweaveError as error:  # the answer is whole: only the next turn is slower
            return Finished(finish_reason=reason, sent_error=ErrorInfo.of(error))
        return Finished(finish_reason=reason, sent=sent)

    def _check(self, num_blocks: int, expected: int) -> None:
        if num_blocks != expected:
            raise TransferFailed(
                f"{num_blocks} blocks arrived for request {self.job.request}, its prompt has {expected}; "
                "do both instances serve the same model?",
                peer=self._prefill,
                part="blocks",
                reason="length",
            )
