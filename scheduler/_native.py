"""The native parts of this room: the prompt tree's core, block keys and fast token lists."""

from poolweave._core import PromptTree as NativePromptTree
from poolweave._core import PromptTreeStats, block_keys, tokens_of_list

__all__ = ["NativePromptTree", "PromptTreeStats", "block_keys", "tokens_of_list"]
