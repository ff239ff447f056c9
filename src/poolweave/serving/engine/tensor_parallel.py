"""One rank's share of a loaded model: attention heads and FFN columns split, partial sums added over the ranks.

Every rank runs its own TorchEngine over its own pool, with the same requests in the same order; only hidden states
cross, at the end of each attention and FFN. Source: Megatron-LM §3; MemServe §4.4 for the KV's way between cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from poolweave.errors import ConfigError, ModelUnsupported, PeerLost
from poolweave.serving.engine.models import LoadedModel
from poolweave.transfer import Shard

AddUp = Callable[[torch.Tensor], None]  # in place, over all ranks

_BY_HEADS = ("q_proj", "q_b_proj", "kv_b_proj")  # rows of all query heads
_BY_KV_HEADS = ("k_proj", "v_proj")
_FFN = ("gate_proj", "up_proj", "down_proj")


class RankGroup:
    """The ranks of one model, as processes that add tensors up. A context manager.

    They find each other by `rendezvous`, a file that does not exist yet, on a disk that all see. Raises PeerLost when
    one does not come, or goes, within `timeout_s`.
    """

    def __init__(self, rendezvous: Path, rank: int, size: int, timeout_s: float = 60.0) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is none of {size}", setting="rank", value=rank, limit=size)
        store = torch.distributed.FileStore(str(rendezvous), size)
        try:
            torch.distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise PeerLost(f"the {size} ranks did not meet within {timeout_s} s: {error}", reason="connect") from error
        self._open = True

    def add_up(self, tensor: torch.Tensor) -> None:
        """The sum over all ranks, in place; every rank calls it, in the same order."""
        try:
            torch.distributed.all_reduce(tensor)
        except RuntimeError as error:
            raise PeerLost(f"a rank of this model is gone: {error}", reason="lost") from error

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """To one rank, which calls `receive`."""
        try:
            torch.distributed.send(tensor, rank)
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} of this model is gone: {error}", reason="lost") from error

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """What that rank sends, in place of what `tensor` holds."""
        try:
            torch.distributed.recv(tensor, rank)
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} of this model is gone: {error}", reason="lost") from error

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            torch.distributed.destroy_process_group()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shard_model(model: LoadedModel, shard: Shard, add_up: AddUp) -> LoadedModel:
    """`model` cut down, in place, to what `shard` holds of it; its layout is the shard's, its identity the whole one's.

    FFNs of another shape than gate, up and down (mixtures of experts) stay whole at every rank. Raises ConfigError for
    query heads or FFN columns that the ranks do not divide, pipeline stages, and a shard of another
    model's KV, ModelUnsupported for attention that is not cut here.
    """
    cut, config = shard.cut, model.model.config.get_text_config()
    if cut.layout.fingerprint() != model.layout.fingerprint() or cut.pp > 1:
        raise ConfigError(
            f"this shard is of {cut.layout.fingerprint()} in {cut.pp} stages; the model is "
            f"{model.layout.fingerprint()} and is cut by tensor ranks only",
            setting="shard", value=str(shard.seat),
        )  # fmt: skip
    heads = _share("attention heads", config.num_attention_heads, shard)
    for layer in model.model.get_decoder().layers:
        _cut_attention(layer.self_attn, shard, heads, config.num_attention_heads, add_up)
        if all(isinstance(getattr(layer.mlp, name, None), torch.nn.Linear) for name in _FFN):
            _cut_ffn(layer.mlp, shard, add_up)
    return replace(model, layout=shard.layout)


def _share(what: str, total: int, shard: Shard) -> range:
    tp = shard.cut.tp
    if total % tp:
        raise ConfigError(f"{total} {what} cannot be cut for tp={tp}", setting="tp", value=tp, limit=total)
    return range(shard.rank * total // tp, (shard.rank + 1) * total // tp)


def _cut_attention(attention: Any, shard: Shard, heads: range, num_heads: int, add_up: AddUp) -> None:
    kv_heads = shard.cut.layout.kv_heads
    names = [name for name in (*_BY_HEADS, *_BY_KV_HEADS) if getattr(attention, name, None) is not None]
    if not names or getattr(attention, "o_proj", None) is None:
        kind = type(attention).__name__
        raise ModelUnsupported(f"{kind} has no projections that are cut here", model=kind, feature="tensor parallel")
    for name in names:
        whole, kept = (num_heads, heads) if name in _BY_HEADS else (kv_heads, shard.heads)
        _keep_rows(getattr(attention, name), whole, kept)
    _keep_columns(attention.o_proj, num_heads, heads, shard.rank, add_up)


def _cut_ffn(ffn: Any, shard: Shard, add_up: AddUp) -> None:
    columns = ffn.gate_proj.out_features
    kept = _share("FFN columns", columns, shard)
    _keep_rows(ffn.gate_proj, columns, kept)
    _keep_rows(ffn.up_proj, columns, kept)
    _keep_columns(ffn.down_proj, columns, kept, shard.rank, add_up)


def _keep_rows(linear: Any, groups: int, kept: range) -> None:
    """Of the outputs, `groups` runs of rows, those of `kept`."""
    size = linear.out_features // groups
    rows = slice(kept.start * size, kept.stop * size)
    linear.weight = torch.nn.Parameter(linear.weight[rows].clone(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias[rows].clone(), requires_grad=False)
    linear.out_features = linear.weight.shape[0]


def _keep_columns(linear: Any, groups: int, kept: range, rank: int, add_up: AddUp) -> None:
    """Of the inputs, `groups` runs of columns, those of `kept`. Outputs are added up, a bias by rank 0 alone."""
    size = linear.in_features // groups
    columns = slice(kept.start * size, kept.stop * size)
    linear.weight = torch.nn.Parameter(linear.weight[:, columns].clone(), requires_grad=False)
    if linear.bias is not None and rank:
        linear.bias = None
    linear.in_features = linear.weight.shape[1]

    def summed(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        add_up(output)
        return output

    linear.register_forward_hook(summed)
