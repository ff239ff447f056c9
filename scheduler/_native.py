"""The native parts of this room: the prompt tree's core, block keys, fast token lists and the choice of the lowest."""

from poolweave._core import CandidateTable, PromptTreeStats, block_keys, draw_lowest, tokens_of_list
from poolweave._core import PromptTree as NativePromptTree

__all__ = ["CandidateTable", "NativePromptTree", "PromptTreeStats", "block_keys", "draw_lowest", "tokens_of_list"]
