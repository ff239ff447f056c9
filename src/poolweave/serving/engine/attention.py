"""Attention of `transformers` models over KV that lies in pool blocks.

A model calls `PoolCache.update` with a layer's new keys and values, then the attention function registered under
`ATTENTION`. The first writes the rows into the pool, the second reads them, and those cached before, from there:
KV exists once. Nothing here branches on a model; latent attention is a layout with one part.
"""

from __future__ import annotations

from collections.abc import Callable
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


class StepUnwanted(Exception):
    """All sequences of the step were cancelled while it was computed."""


class PoolCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """What a model takes for its cache: write-only, for one step. It stores nothing and remembers no length."""

    def __init__(self, batch: Batch, unwanted: Callable[[], bool] = lambda: False) -> None:
        """`unwanted`: asked in every layer; once nobody wants the step any more, it is broken off by StepUnwanted."""
        super().__init__(layers=[])
        self._batch = batch
        self._unwanted = unwanted

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are passed explicitly

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, Q, dim] keys and values (latent attention: latents and rotated keys) into the pool.

        `kwargs["kwargs"]` is the dict that the layer hands to the attention function next: the batch travels in it.
        Raises ModelUnsupported when a model passes none, StepUnwanted.
        """
        context = kwargs.get("kwargs")
        if self._unwanted():
            raise StepUnwanted
        if context is None:
            raise ModelUnsupported("this model's attention passes no context to its cache", feature="cache.update")
        planes = self._batch.planes
        both = (key_states, value_states)
        rows = torch.cat(both, -1) if planes.num_parts == 1 else torch.cat(both)  # [parts, heads, Q, dim]
        planes.write(self._batch.write_rows[layer_idx], rows.transpose(1, 2))
        for hook in self._batch.hooks:
            hook.at(layer_idx)
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
    query = query[0]
    pieces = [heads.decode(group, query[:, group.begin : group.stop].transpose(0, 1)) for group in batch.groups]
    for span in batch.spans:
        window = slice(span.begin, span.stop)
        pieces.append(heads.prefill(span, query[None, :, window], key[:, :, window], value[:, :, window]))
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # [Q, H, Dv]
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
        both = self.planes.read(self.module.layer_idx, span.places)[:, : span.context]  # [2, context, Hkv, D]
        key, value = both.transpose(1, 2).unsqueeze(1)
        return key, value

    def decode(self, group: DecodeGroup, query: torch.Tensor) -> torch.Tensor:
        """query [n, H, D], one token of n sequences -> [n, H, Dv]. Query heads that share a key are its rows."""
        n, num_heads, dim = query.shape
        both = self.planes.read(self.module.layer_idx, group.places)  # [2, n * T, Hkv, D], T >= context
        both = both.view(2, n, -1, *both.shape[2:])[:, :, : group.context].transpose(2, 3)
        key, value = both.unbind()  # [n, Hkv, context, D]
        grouped = query.reshape(n, key.shape[1], -1, dim)  # [n, Hkv, H / Hkv, D]
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask, scale=self.scaling)
        return out.reshape(n, num_heads, -1)


class _LatentHeads(_Heads):
    """One latent and one rotated key a token, shared by all heads (MLA).

    Prefill expands the latents into keys and values; decode scores the latents themselves with the up-projections
    absorbed into query and output. Source: DeepSeek-V2 §2.1.
    """

    def context(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.planes.read(self.module.layer_idx, span.places)[:, : span.context]  # [1, context, 1, rank + rope]
        rank = self.module.kv_lora_rank
        latent = latent.transpose(1, 2)
        expanded: tuple[torch.Tensor, torch.Tensor] = self.module.expand_kv(latent[..., :rank], latent[..., rank:])
        return expanded

    def decode(self, group: DecodeGroup, query: torch.Tensor) -> torch.Tensor:
        module, (n, heads, _) = self.module, query.shape
        rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
        up = module.kv_b_proj.weight.view(heads, nope + module.v_head_dim, rank)
        latent = self.planes.read(module.layer_idx, group.places).view(n, -1, rank + module.qk_rope_head_dim)
        latent = latent[:, : group.context]  # [n, T, rank + rope]
        absorbed = torch.einsum("bhn,hnr->bhr", query[..., :nope], up[:, :nope])
        scores = torch.cat((absorbed, query[..., nope:]), -1) @ latent.transpose(1, 2) * self.scaling  # [n, H, T]
        if group.mask is not None:
            scores = scores + group.mask[:, 0]
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.einsum("bhr,hvr->bhv", weights @ latent[..., :rank], up[:, nope:])


AttentionInterface.register(ATTENTION, pool_attention)
