"""EarlySender: KV of prompts goes to a peer while it is computed, layer by layer and step by step.

One growing transfer a prompt. Workers write into a shared word how far a step has come; a thread seals and tells what
is new. A step's last layer is told only when the step has gone well: what a failed step computed is never whole at the
peer, which drops it. Source: MemServe §5.2 (by-layer transfer).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from poolweave.errors import PoolweaveError
from poolweave.integrations.vllm.progress_word import ProgressMemory, ProgressWord
from poolweave.integrations.vllm.track import Track, Write
from poolweave.mempool import Blocks, MemPool, TierWindow
from poolweave.transfer import Transfer
from poolweave.types import Int32Array

logger = logging.getLogger(__name__)

_LOOK_S = 5e-4  # while a step computes what a peer gets


@dataclass(slots=True)
class _Stretch:
    """Blocks [first, end) of a prompt, which step `step` writes: how many of their layers are sealed, and told."""

    step: int
    first: int
    end: int
    sealed: int = 0
    told: int = 0


@dataclass(slots=True)
class _Prompt:
    transfer: Transfer
    blocks: Blocks
    written: list[_Stretch] = field(default_factory=list)
    num_good: int = 0


class EarlySender:
    """Called from the scheduler's thread. Its own starts with the first prompt."""

    def __init__(self, pool: MemPool) -> None:
        self._pool = pool
        self._layers = pool.layout.num_layers
        self._lock = threading.Lock()
        self._prompts: dict[str, _Prompt] = {}
        self._busy = threading.Event()  # a step is under way that writes for one
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._memory = ProgressMemory()
        self._word = ProgressWord(self._memory.window)

    @property
    def window(self) -> TierWindow:
        """Where workers write how far they are."""
        return self._memory.window

    def begin(self, track: Track, blocks: Blocks, tokens: Int32Array) -> Transfer | None:
        """All `blocks` of its prompt's `tokens` go to its receiver, as they are sealed; those that it holds are.

        None when that peer takes nothing now: it is offered all at the end.
        """
        peer, held = track.receiver, len(track.held)
        assert peer is not None
        transfer = None
        try:
            transfer = self._pool.transfer_with_insert(peer, blocks, tokens, track.ns, growing=True)
            transfer.ready(None, held)
        except PoolweaveError as error:
            if transfer is not None:
                transfer.cancel()
            logger.debug("nothing goes to %s while it is computed: %s", peer, error)
            return None
        with self._lock:
            self._prompts[track.request.request_id] = _Prompt(transfer, blocks, num_good=held)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="poolweave-early", daemon=True)
            self._thread.start()
        return transfer

    def writes(self, step: int, write: Write) -> bool:
        """Step `step` is about to write these blocks. False when none of them goes anywhere now."""
        first, end = write.first, write.first + len(write.blocks)
        with self._lock:
            prompt = self._prompts.get(write.track.request.request_id)
            if prompt is None or first >= len(prompt.blocks) or prompt.transfer.done():
                return False
            prompt.written.append(_Stretch(step, first, min(end, len(prompt.blocks))))
        self._busy.set()
        return True

    def settle(self, track: Track, first: int) -> None:
        """The step that wrote from block `first` on is over; call this before its blocks are sealed, or freed."""
        with self._lock:
            prompt = self._prompts.get(track.request.request_id)
            if prompt is not None:
                prompt.written = [one for one in prompt.written if one.first != first]

    def good(self, track: Track) -> None:
        """All that it holds is sealed."""
        with self._lock:
            prompt = self._prompts.get(track.request.request_id)
            if prompt is None:
                return
            prompt.num_good = min(len(track.held), len(prompt.blocks))
            try:
                prompt.transfer.ready(None, prompt.num_good)
                return
            except PoolweaveError as error:  # more stretches than a transfer takes, say
                logger.warning("KV for %s goes there at the end: %s", prompt.transfer.peer, error)
        self.drop(track)

    def drop(self, track: Track) -> None:
        """What it has computed is not to be had: the peer gets none of it. Idempotent."""
        with self._lock:
            prompt = self._prompts.pop(track.request.request_id, None)
        if prompt is not None:
            prompt.transfer.cancel()

    def take(self, track: Track) -> Transfer | None:
        """The request has ended: its transfer, if all of the prompt was sealed."""
        with self._lock:
            prompt = self._prompts.pop(track.request.request_id, None)
        if prompt is None:
            return None
        if prompt.num_good < len(prompt.blocks):
            prompt.transfer.cancel()
            return None
        return prompt.transfer

    def close(self) -> None:
        """Idempotent; the pool is closed later."""
        self._stop.set()
        self._busy.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for prompt in self._prompts.values():
            prompt.transfer.cancel()
        self._prompts.clear()
        self._memory.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._busy.wait()
            self._stop.wait(_LOOK_S)
            step, layers = self._word.read()
            with self._lock:
                for prompt in self._prompts.values():
                    self._tell(prompt, step, layers)
                if not any(prompt.written for prompt in self._prompts.values()) and not self._stop.is_set():
                    self._busy.clear()

    def _tell(self, prompt: _Prompt, step: int, layers: int) -> None:
        """Under the lock."""
        reach = prompt.num_good
        for one in prompt.written:
            done = min(self._layers if one.step < step else layers if one.step == step else 0, self._layers - 1)
            try:
                if done > one.sealed:
                    self._pool.seal(prompt.blocks[one.first : one.end], range(one.sealed, done))
                    one.sealed = done
                if one.first > reach:  # the step before is being settled
                    return
                if one.sealed > one.told:
                    prompt.transfer.ready(one.sealed, one.end)
                    one.told = one.sealed
            except PoolweaveError as error:
                logger.warning("what is computed for %s goes there step by step: %s", prompt.transfer.peer, error)
                prompt.written.clear()
                return
            reach = one.end
