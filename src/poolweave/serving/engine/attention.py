"""Attention of `transformers` models over KV that lies in pool blocks.

A model calls `PoolCache.update` with a layer's new keys and values, then the attention function registered under
`ATTENTION`. The first writes the rows into the pool, the second reads them, and those cached before, from there:
KV exists once. Nothing here branches on a model; latent attention is a layout with one part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from poolweave.errors import ModelUnsupported
from poolweave.serving.engine.batch import Batch, DecodeGroup, Span

ATTENTION = "poolweave"

_UNSUPPORTED = (
    "sliding_window",
    "softcap",
    "s_aux",
)  # attention settings that would change scores: refused, not ignored


class PoolCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """What a model takes for its cache: write-only, for one step. It stores nothing and remembers no length."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are passed explicitly

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, Q, dim] keys and values (latent attention: latents and rotated keys) into the pool.

        `kwargs["kwargs"]` is the dict that the layer hands to the attention function next: the batch travels in it.
        Raises ModelUnsupported when a model passes none.
        """
        context = kwargs.get("kwargs")
        if context is None:
            raise ModelUnsupported("this model's attention passes no context to its cache", feature="cache.update")
        planes, rows = self._batch.planes, self._batch.write_rows
        if planes.num_parts == 1:
            planes.write(layer_idx, 0, rows, torch.cat((key_states, value_states), -1)[0, 0])
        else:
            planes.write(layer_idx, 0, rows, key_states[0].transpose(0, 1))
            planes.write(layer_idx, 1, rows, value_states[0].transpose(0, 1))
        context["pool_batch"] = self._batch
        return key_states, value_states


def pool_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, Q, D], key and value [1, Hkv, Q, D] of the new tokens -> [1, Q, H, Dv].

    The signature is `transformers`' own. `key` and `value` serve a chunk that starts at position 0; everything else
    is read from the pool. Raises ModelUnsupported for settings that it does not implement.
    """
    refused = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if refused:
        raise ModelUnsupported(f"attention with {refused[0]} is not supported", feature=refused[0])
    batch: Batch = kwargs["pool_batch"]
    attend = _LatentHeads if batch.planes.num_parts == 1 else _Heads
    heads = attend(module, batch, scaling if scaling is not None else query.shape[-1] ** -0.5)
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])  # [Q, H, Dv]
    for span in batch.spans:
        window = slice(span.begin, span.stop)
        out[window] = heads.prefill(span, query[:, :, window], key[:, :, window], value[:, :, window])
    for group in batch.groups:
        out[group.queries] = heads.decode(group, query[0, :, group.queries].transpose(0, 1))
    return out.unsqueeze(0), None


class _Heads:
    """Keys and values a head: MHA, GQA, MQA."""

    def __init__(self, module: Any, batch: Batch, scaling: float) -> None:
        self.module = module
        self.planes = batch.planes
        self.scaling = scaling

    def prefill(self, span: Span, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [1, H, q, D] of one sequence -> [q, H, Dv]."""
        if span.cached == 0:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
            return out[0].transpose(0, 1)
        key, value = self.context(span)  # [1, Hkv, context, D]
        grouped = query.reshape(key.shape[1], -1, query.shape[3]).unsqueeze(0)  # [1, Hkv, group * q, D]
        mask = torch.ones(span.length, span.context, dtype=torch.bool).tril(span.cached)
        mask = mask.repeat(query.shape[1] // key.shape[1], 1)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=self.scaling)
        return out.reshape(query.shape[1], span.length, -1).transpose(0, 1)

    def context(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a sequence up to the end of this chunk, out of the pool."""
        layer = self.module.layer_idx
        key, value = (self.planes.gather(layer, part, span.planes)[: span.context] for part in (0, 1))
        return key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)

    def decode(self, group: DecodeGroup, query: torch.Tensor) -> torch.Tensor:
        """query [n, H, D], one token of n sequences -> [n, H, Dv]. Query heads that share a key are its rows."""
        layer, n = self.module.layer_idx, len(group)
        key, value = (self.planes.gather(layer, part, group.planes) for part in (0, 1))
        key, value = (part.view(n, -1, *part.shape[1:]).transpose(1, 2) for part in (key, value))  # [n, Hkv, T, D]
        grouped = query.reshape(n, key.shape[1], -1, query.shape[2])  # [n, Hkv, H / Hkv, D]
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask, scale=self.scaling)
        return out.reshape(n, query.shape[1], -1)


class _LatentHeads(_Heads):
    """One latent and one rotated key a token, shared by all heads (MLA).

    Prefill expands the latents into keys and values; decode scores the latents themselves with the up-projections
    absorbed into query and output. Source: DeepSeek-V2 §2.1.
    """

    def context(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.planes.gather(self.module.layer_idx, 0, span.planes)[: span.context]  # [context, 1, rank + rope]
        rank = self.module.kv_lora_rank
        latent = latent.transpose(0, 1).unsqueeze(0)
        expanded: tuple[torch.Tensor, torch.Tensor] = self.module.expand_kv(latent[..., :rank], latent[..., rank:])
        return expanded

    def decode(self, group: DecodeGroup, query: torch.Tensor) -> torch.Tensor:
        module, (n, heads, _) = self.module, query.shape
        rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
        up = module.kv_b_proj.weight.view(heads, nope + module.v_head_dim, rank)
        latent = self.planes.gather(module.layer_idx, 0, group.planes).view(n, -1, rank + module.qk_rope_head_dim)
        absorbed = torch.einsum("bhn,hnr->bhr", query[..., :nope], up[:, :nope])
        scores = torch.cat((absorbed, query[..., nope:]), -1) @ latent.transpose(1, 2) * self.scaling  # [n, H, T]
        weights = scores.masked_fill(~group.mask[:, 0], float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.einsum("bhr,hvr->bhv", weights @ latent[..., :rank], up[:, nope:])


AttentionInterface.register(ATTENTION, pool_attention)
