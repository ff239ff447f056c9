"""Which instance a request goes to: prompt trees, cost model, policies, membership. Pure: no I/O."""

from poolweave.scheduler.prompt_tree import PromptTree, Source
from poolweave.scheduler.slots import Slots

__all__ = ["PromptTree", "Slots", "Source"]
