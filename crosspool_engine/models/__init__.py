"""Models of Hugging Face directories as two halves that run natively."""

from poolweave.crosspool_engine.models.attention_side import build_attention_stack
from poolweave.crosspool_engine.models.checkpoint import Checkpoint
from poolweave.crosspool_engine.models.ffn_side import build_ffn_stack

__all__ = ["Checkpoint", "build_attention_stack", "build_ffn_stack"]
