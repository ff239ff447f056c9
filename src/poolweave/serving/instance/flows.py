"""The flows of MemServe: what an instance does with a request's KV before, between and after its two phases.

Each flow is the one before it with one step changed. A step gets the pool of the instance it runs on and works on
blocks that the caller owns; it never frees them. Knows no engine, process or message. Source: MemServe §5.1.

    step           runs at                 PDBasic    PDCaching1   PDCaching2                  PDCaching3
    reuse          P, before prefill       nothing    match        .                           .
    keep_prompt    P, after prefill        nothing    insert       .                           .
    hand_over      P -> D                  transfer   .            transfer_with_insert        .
    keep_answer    D, at the end           nothing    .            insert                      .
    give_back      D -> P                  nothing    .            .                           transfer_with_insert
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from poolweave.errors import ConfigError
from poolweave.mempool import Blocks, MemPool
from poolweave.transfer import Transfer
from poolweave.types import Int32Array


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """A run of tokens whose KV lies in `blocks`, in order; the last block may be partial. `ns`: whose prefix it is."""

    tokens: Int32Array
    blocks: Blocks
    ns: int

    def whole(self, block_tokens: int) -> CachedTokens:
        """Without the partial last block: what can be indexed."""
        count = len(self.tokens) // block_tokens
        return CachedTokens(self.tokens[: count * block_tokens], self.blocks[:count], self.ns)


@dataclass(frozen=True, slots=True)
class Receiver:
    """Who gets a prompt's KV, and under which tag. `growing`: it is still computed; its owner says what is ready."""

    instance: str
    tag: bytes
    growing: bool = False


class PDBasic:
    """Disaggregation alone: KV is computed, moved and forgotten."""

    name: ClassVar[str] = "pd-basic"
    disaggregated: ClassVar[bool] = True

    def reuse(self, pool: MemPool, prompt: Int32Array, ns: int) -> Blocks:
        """Blocks that hold the KV of a prefix of `prompt`; the caller owns a reference on each.

        At least one token of the prompt is left to compute: its output is the first token of the answer.
        """
        return Blocks.empty()

    def keep_prompt(self, pool: MemPool, kv: CachedTokens) -> None:
        """The prompt's KV is computed: active becomes historical, where the flow remembers it."""

    def hand_over(self, pool: MemPool, kv: CachedTokens, to: Receiver) -> Transfer:
        """Send the prompt's KV, a partial last block included, to the decode instance, which claims it by the tag."""
        if not to.growing:
            pool.seal(kv.blocks)
        return pool.transfer(to.instance, kv.blocks, tag=to.tag, num_tokens=len(kv.tokens), growing=to.growing)

    def keep_answer(self, pool: MemPool, kv: CachedTokens) -> None:
        """The answer is complete, `kv` is all of prompt and answer: active becomes historical."""

    def give_back(self, pool: MemPool, kv: CachedTokens, prefill: str) -> Transfer | None:
        """Send the answer's KV to the prefill instance, for the next turn; None when the flow does not."""
        return None


class PDCaching1(PDBasic):
    """Context caching at the prefill instance: prompts are matched before and indexed after prefill."""

    name = "pd-caching-1"

    def reuse(self, pool: MemPool, prompt: Int32Array, ns: int) -> Blocks:
        return _match(pool, prompt, ns)

    def keep_prompt(self, pool: MemPool, kv: CachedTokens) -> None:
        _index(pool, kv)


class PDCaching2(PDCaching1):
    """Caching at the decode instance too: it is sent only what it lacks."""

    name = "pd-caching-2"

    def hand_over(self, pool: MemPool, kv: CachedTokens, to: Receiver) -> Transfer:
        if not to.growing:
            pool.seal(kv.blocks)
        return pool.transfer_with_insert(to.instance, kv.blocks, kv.tokens, kv.ns, tag=to.tag, growing=to.growing)

    def keep_answer(self, pool: MemPool, kv: CachedTokens) -> None:
        _index(pool, kv)


class PDCaching3(PDCaching2):
    """The decode instance sends its answers' KV back: the next turn finds the whole history at the prefill instance."""

    name = "pd-caching-3"

    def give_back(self, pool: MemPool, kv: CachedTokens, prefill: str) -> Transfer | None:
        kv = kv.whole(pool.layout.block_tokens)
        return pool.transfer_with_insert(prefill, kv.blocks, kv.tokens, kv.ns)


class Colocated(PDBasic):
    """Both phases on one instance, with context caching; nothing is sent."""

    name = "colocated"
    disaggregated = False

    def reuse(self, pool: MemPool, prompt: Int32Array, ns: int) -> Blocks:
        return _match(pool, prompt, ns)

    def keep_prompt(self, pool: MemPool, kv: CachedTokens) -> None:
        _index(pool, kv)

    def keep_answer(self, pool: MemPool, kv: CachedTokens) -> None:
        _index(pool, kv)


FLOWS: Mapping[str, PDBasic] = {
    flow.name: flow for flow in (PDBasic(), PDCaching1(), PDCaching2(), PDCaching3(), Colocated())
}


def flow_named(name: str) -> PDBasic:
    """The flow of that name. Raises ConfigError listing the names there are."""
    if name not in FLOWS:
        raise ConfigError(f"flow {name!r} is not one of {', '.join(FLOWS)}", setting="flow", value=name)
    return FLOWS[name]


def _match(pool: MemPool, prompt: Int32Array, ns: int) -> Blocks:
    reusable = (len(prompt) - 1) // pool.layout.block_tokens * pool.layout.block_tokens
    with pool.match(prompt[:reusable], ns) as hit:
        return hit.take()


def _index(pool: MemPool, kv: CachedTokens) -> None:
    whole = kv.whole(pool.layout.block_tokens)
    pool.seal(whole.blocks)
    pool.insert(whole.tokens, whole.blocks, whole.ns)
