"""From an engine's KV events to a prompt tree. The events are vLLM's and SGLang's, by their field names.

An engine names blocks by hashes of its own; the tokens that come with a stored block give ours. While anything is in
doubt (a parent that was never told, a gap in the stream) the source is degraded: what it holds is then credited with
less, and never with more, until it tells everything again. Knows no socket and no wire format.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from poolweave.errors import ConfigError
from poolweave.scheduler.prompt_tree import PromptTree, Source


class StoredBlocks(Protocol):
    """Blocks that an engine now holds: `token_ids` are those of all `block_hashes`, in order."""

    @property
    def block_hashes(self) -> Sequence[Hashable]: ...
    @property
    def parent_block_hash(self) -> Hashable | None: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def block_size(self) -> int: ...


class RemovedBlocks(Protocol):
    """Blocks of which an engine gave up one copy each."""

    @property
    def block_hashes(self) -> Sequence[Hashable]: ...


@dataclass(slots=True)
class _Known:
    first_key: int  # of our blocks within the engine's one
    last_key: int
    copies: int = 1


class TreeFeed:
    """One instance's events into one tree, in `ns` where an event's own is not given. Remembers one small record a
    block it was told of, at most `max_blocks`; what goes beyond is not credited."""

    def __init__(self, tree: PromptTree, instance: str, ns: int = 0, *, max_blocks: int = 1 << 20) -> None:
        self._tree = tree
        self._instance = instance
        self._ns = ns
        self._max_blocks = max_blocks
        self._known: dict[Hashable, _Known] = {}
        self.degraded = False

    def __len__(self) -> int:
        return len(self._known)

    def stored(self, event: StoredBlocks, ns: int | None = None) -> int:
        """Returns our blocks that were entered. Raises ConfigError when the block sizes do not fit together."""
        size, ours = event.block_size, self._tree.block_tokens
        if size < 1 or size % ours:
            raise ConfigError(
                f"{self._instance} has blocks of {size} tokens, the prompt tree of {ours}: block_tokens must divide it",
                setting="block_tokens",
                value=ours,
                limit=size,
            )
        hashes = list(event.block_hashes)
        parent = self._parent_of(event)
        if parent is _MISSING or len(event.token_ids) != len(hashes) * size:
            self.degraded = True
            return 0
        keys = self._tree.keys(event.token_ids, self._ns if ns is None else ns, parent=parent)
        told = keys.tolist()
        per_block = size // ours
        for i, name in enumerate(hashes):
            known = self._known.get(name)
            if known is not None:
                known.copies += 1
            elif len(self._known) < self._max_blocks:
                self._known[name] = _Known(told[i * per_block], told[(i + 1) * per_block - 1])
            else:
                self.degraded = True
                keys = keys[: i * per_block]
                break
        return self._tree.insert_keys(keys, self._instance, parent=parent, source=Source.EVENT)

    def removed(self, event: RemovedBlocks) -> int:
        """Returns the entries given up: those blocks of which no copy is left, and what continues them."""
        gone: list[int] = []
        for name in event.block_hashes:
            known = self._known.get(name)
            if known is None:  # stored while we were not listening: nothing was credited for it
                continue
            known.copies -= 1
            if known.copies == 0:
                del self._known[name]
                gone.append(known.first_key)
        return self._tree.remove_keys(np.array(gone, np.uint64), self._instance)

    def cleared(self) -> None:
        """The instance holds nothing: after its own reset, or before it tells everything again."""
        self._known.clear()
        self._tree.forget(self._instance)
        self.degraded = False

    def lost(self) -> None:
        """Events were lost: removals may be among them."""
        self.degraded = True

    def regained(self) -> None:
        """What was lost was told again."""
        self.degraded = False

    def _parent_of(self, event: StoredBlocks) -> Any:
        """The key before the event's blocks: None at a prompt's start, _MISSING where it is not known."""
        if event.parent_block_hash is None:
            return None
        known = self._known.get(event.parent_block_hash)
        return _MISSING if known is None else known.last_key


_MISSING = object()
