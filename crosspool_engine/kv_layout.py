"""The KV layout of a model, from its sizes; the same one that a prefill instance of it uses."""

from __future__ import annotations

from poolweave.crosspool_engine.attention_shape import GroupedAttention
from poolweave.crosspool_engine.head_shard import WHOLE, HeadShard
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.transfer.layout import KVLayout


def kv_layout(
    shape: ModelShape, *, block_tokens: int = 16, dtype: str = "float32", shard: HeadShard = WHOLE
) -> KVLayout:
    """Aggregated blocks: K and V parts for grouped attention, of a shard's heads; one latent part for MLA."""
    attention = shape.attention
    if isinstance(attention, GroupedAttention):
        return KVLayout(
            num_layers=shape.num_layers, kv_heads=attention.kv_heads // shard.width, head_dim=attention.head_dim,
            block_tokens=block_tokens, dtype=dtype,
        )  # fmt: skip
    return KVLayout.mla(
        num_layers=shape.num_layers, rank=attention.kv_rank, rope=attention.rope, block_tokens=block_tokens, dtype=dtype
    )
