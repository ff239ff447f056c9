"""What an engine refuses at the door: requests that could never run, or would take others down with them."""

from __future__ import annotations

from typing import Protocol

from poolweave.errors import RequestRefused
from poolweave.mempool import MemPool
from poolweave.serving.engine.sequence import Sequence
from poolweave.types import Tier


class Limits(Protocol):
    """What a model takes."""

    @property
    def max_positions(self) -> int: ...
    @property
    def vocab(self) -> int: ...


def refuse_impossible(sequence: Sequence, model: Limits, pool: MemPool) -> None:
    """Raises RequestRefused with the number that does not fit; UnknownBlock or StaleHandle for blocks not held."""
    length, room = len(sequence.tokens), model.max_positions
    if sequence.num_prompt < 1:
        raise RequestRefused("an empty prompt has no next token", needed=1, limit=0)
    if length >= room:
        message = f"{length} tokens leave no room for an answer: the model has {room} positions"
        raise RequestRefused(message, needed=length + 1, limit=room)
    needed, capacity = pool.layout.num_blocks(length), pool.stats().tiers[Tier.HBM].total
    if needed > capacity:
        message = f"{length} tokens need {needed} blocks and the pool has {capacity}; raise hbm"
        raise RequestRefused(message, needed=needed, limit=capacity)
    _refuse_prefix(sequence, pool)
    _refuse_answer(sequence)
    _refuse_foreign([*sequence.tokens, *(sequence.forced or ())], model)


def _refuse_prefix(sequence: Sequence, pool: MemPool) -> None:
    """The KV it starts from: some of its tokens, in blocks of this pool."""
    pool.tiers(sequence.blocks)
    held, length = len(sequence.blocks) * pool.layout.block_tokens, len(sequence.tokens)
    if not 0 <= sequence.num_computed < length or sequence.num_computed > held:
        message = f"num_computed={sequence.num_computed} of {length} tokens with {held} tokens' worth of blocks"
        raise RequestRefused(
            f"{message}: at least one must be left to compute", needed=sequence.num_computed, limit=held
        )


def _refuse_answer(sequence: Sequence) -> None:
    end = sequence.sampling.max_new_tokens
    if sequence.forced is not None:
        end = min(end, len(sequence.forced))
    if sequence.num_answer >= end:
        raise RequestRefused(f"the answer has all its {end} tokens already", needed=sequence.num_answer, limit=end)


def _refuse_foreign(tokens: list[int], model: Limits) -> None:
    """A token that the model has no embedding for would fail the whole batch."""
    known = model.vocab
    foreign = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < known), None)
    if foreign is not None:
        message = f"token {foreign} is none of the model's {known}; was the prompt made with its tokenizer?"
        raise RequestRefused(message, needed=foreign, limit=known - 1)
