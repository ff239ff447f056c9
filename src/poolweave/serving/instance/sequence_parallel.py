"""One long prompt computed by several prefill instances, each a part of its tokens.

    instance 0   | tokens [0, b) |--- KV, layer by layer ---+----------------------.
    instance 1                      | tokens [b, n) attend to all before them |    |--- decode instance: [0, b) while it
                                                                              '----'    is computed, then the rest

Each instance pulls the KV that its part attends to while it computes, a layer ahead of its own attention; at the end
the last one has the whole prompt's KV, indexed, and so has the decode instance. Nothing here but pool calls.
Source: MemServe §5 (third scenario).
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

from poolweave.errors import ConfigError, TransferFailed
from poolweave.mempool import Blocks, Following, MemPool
from poolweave.serving.engine.sequence import SamplingParams, Sequence
from poolweave.serving.instance.early_hand_over import EarlyHandOver
from poolweave.serving.instance.granularity import HandOverPolicy
from poolweave.transfer import Transfer
from poolweave.types import Int32Array


def split_prompt(num_tokens: int, num_parts: int, block_tokens: int) -> tuple[range, ...]:
    """Parts of whole blocks, as even as can be; the last one has the tokens left over.

    Raises ConfigError for fewer blocks than parts.
    """
    blocks = -(-num_tokens // block_tokens)
    if not 1 <= num_parts <= blocks:
        raise ConfigError(
            f"a prompt of {blocks} blocks cannot be split into {num_parts} parts", setting="num_parts",
            value=num_parts, limit=blocks,
        )  # fmt: skip
    edges = [blocks * part // num_parts * block_tokens for part in range(num_parts)]
    return tuple(range(low, high) for low, high in zip(edges, [*edges[1:], num_tokens], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPrompt:
    """What all instances of one prompt know. `instances[i]` computes `parts[i]`; `decode` gets the whole.

    `tag` names it everywhere: the decode instance receives it by that, `wait_s` bounds every wait for another.
    """

    tokens: Int32Array
    parts: tuple[range, ...]
    instances: tuple[str, ...]
    decode: str
    tag: bytes
    ns: int | None = None
    wait_s: float = 60.0

    def tag_of(self, part: int, target: str) -> bytes:
        """Under which the KV of one part reaches another instance."""
        return b"%s/%d/%s" % (self.tag, part, target.encode())


class PromptPart:
    """One instance's part: the LayerHook of its sequence. begin(), then the engine's steps, then end(), and close().

    All of one thread. close() gives back every block; idempotent.
    """

    def __init__(self, pool: MemPool, prompt: SplitPrompt, index: int) -> None:
        self._pool = pool
        self._prompt = prompt
        self._index = index
        self._part = prompt.parts[index]
        self._policy = HandOverPolicy(pool.layout, "by-layer")
        self._earlier: list[Following] = []
        self._outgoing: list[EarlyHandOver] = []
        self._sequence: Sequence | None = None

    @property
    def is_last(self) -> bool:
        return self._index == len(self._prompt.parts) - 1

    def begin(self, sampling: SamplingParams | None = None) -> Sequence:
        """What the engine is to run: this part after the blocks of those before, which need not be there yet.

        The last part's first token is the answer's; the others' are dropped. Raises TransferTimeout when an earlier
        instance does not begin in time.
        """
        pool, prompt = self._pool, self._prompt
        here = pool.instance
        for part in range(self._index):
            self._earlier.append(pool.follow(prompt.tag_of(part, here), prompt.wait_s))
        blocks = Blocks.empty()
        for following in self._earlier:
            pool.retain(following.blocks)  # the sequence's own; the follower's go with it
            blocks = blocks + following.blocks
        self._sequence = Sequence(
            request_id=f"{prompt.tag!r}/{self._index}",
            tokens=prompt.tokens[: self._part.stop].tolist(),
            sampling=sampling if sampling is not None and self.is_last else SamplingParams(max_new_tokens=1),
            num_computed=self._part.start,
            blocks=blocks,
            hook=self,
        )
        first = self._part.start // pool.layout.block_tokens
        for target, tag in self._targets():
            begin = functools.partial(self._send, target, tag)
            self._outgoing.append(EarlyHandOver(pool, self._sequence, self._policy, range(first, first), begin))
        return self._sequence

    def written(self, layer: int, num_tokens: int) -> None:
        """This part's KV goes out to all who attend to it."""
        if num_tokens <= self._part.stop:
            for outgoing in self._outgoing:
                outgoing.written(layer, num_tokens)

    def needed(self, layer: int) -> None:
        """Until the earlier parts' KV of this layer is here. Raises what their transfers failed with."""
        for following in self._earlier:
            following.wait(layer + 1, timeout=self._prompt.wait_s)

    def end(self) -> None:
        """The sequence has finished: wait for what is on its way, index the KV, hand the whole to the decode instance.

        Raises what failed: the engine's error, TransferFailed and its kinds.
        """
        sequence, pool, prompt = self._sequence, self._pool, self._prompt
        assert sequence is not None, "a part ends after it began"
        if sequence.error is not None:
            raise sequence.error
        deadline = time.monotonic() + prompt.wait_s
        for part in range(self._index):
            pool.receive(prompt.tag_of(part, pool.instance), max(0.0, deadline - time.monotonic())).close()
        for outgoing in self._outgoing:
            transfer = outgoing.take()
            if transfer is None:
                raise TransferFailed(f"part {self._index} of {prompt.tag!r} could not be sent", reason="part")
            transfer.result(max(0.0, deadline - time.monotonic()))
        tokens = prompt.tokens[: self._part.stop]
        blocks = sequence.blocks[: pool.layout.num_blocks(len(tokens))]
        pool.seal(blocks)
        pool.insert(tokens, blocks, prompt.ns)
        if self.is_last:
            sent = pool.transfer_with_insert(prompt.decode, blocks, tokens, prompt.ns, tag=prompt.tag)
            sent.result(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End what goes on, give back every block."""
        for outgoing in self._outgoing:
            outgoing.abandon()
        for following in self._earlier:
            following.close()
        self._outgoing, self._earlier = [], []
        if self._sequence is not None:
            sequence, self._sequence = self._sequence, None
            blocks, sequence.blocks, sequence.hook = sequence.blocks, Blocks.empty(), None
            self._pool.free(blocks)

    def _targets(self) -> list[tuple[str, bytes]]:
        """Who gets this part while it is computed: all later instances; of the first one also the decode instance."""
        prompt = self._prompt
        later = [(name, prompt.tag_of(self._index, name)) for name in prompt.instances[self._index + 1 :]]
        return [*later, (prompt.decode, b"")] if self._index == 0 and not self.is_last else later

    def _send(self, target: str, tag: bytes) -> Transfer:
        """Offer this part's blocks; to the decode instance with the tokens, so that it need not be sent them again."""
        sequence, pool, prompt = self._sequence, self._pool, self._prompt
        assert sequence is not None, "its hook is called"
        tokens = prompt.tokens[: self._part.stop]
        first, end = self._part.start // pool.layout.block_tokens, pool.layout.num_blocks(len(tokens))
        blocks = sequence.blocks[first:end]
        if tag:
            return pool.transfer(target, blocks, tag=tag, num_tokens=len(self._part), growing=True)
        return pool.transfer_with_insert(target, blocks, tokens, prompt.ns, growing=True)
