"""What a request's owner may do between the layers of its forward: wait for KV, and send what was just written.

Knows no transfer; the engine calls, whoever owns the sequence listens.
"""

from __future__ import annotations

from typing import Protocol

from poolweave.errors import PoolweaveError


class LayerHook(Protocol):
    """Called on the engine's thread, layer by layer, in every step that computes tokens of its sequence.

    An error of poolweave.errors ends this request alone.
    """

    def written(self, layer: int, num_tokens: int) -> None:
        """The KV of `layer` of the sequence's first `num_tokens` tokens is in its blocks. Must not wait."""
        ...

    def needed(self, layer: int) -> None:
        """Attention of `layer` is about to read the sequence's earlier KV: return when it is in the blocks."""
        ...


class HookCall:
    """The hook of one sequence in one step, and what went wrong with it."""

    def __init__(self, request_id: str, hook: LayerHook, num_tokens: int) -> None:
        self.request_id = request_id
        self.error: PoolweaveError | None = None
        self._hook = hook
        self._num_tokens = num_tokens

    def at(self, layer: int) -> None:
        """The step's KV of `layer` was written and is read next. After an error nothing is called any more."""
        if self.error is not None:
            return
        try:
            self._hook.written(layer, self._num_tokens)
            self._hook.needed(layer)
        except PoolweaveError as error:
            self.error = error
