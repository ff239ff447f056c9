"""Models of Hugging Face directories as two halves that run natively; needs torch and transformers."""

from poolweave.crosspool_engine.models.attention_side import build_attention_stack
from poolweave.crosspool_engine.models.ffn_side import build_ffn_stack
from poolweave.crosspool_engine.models.split import load_attention, load_ffn

__all__ = ["build_attention_stack", "build_ffn_stack", "load_attention", "load_ffn"]
