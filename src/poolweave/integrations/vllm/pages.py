"""vLLM's KV pages as blocks of a pool: their layout, and what cannot be kept in one. Knows no engine object by class.

A page is one layer of a block, as vLLM's attention backend lays it out inside; it is copied as it is, never
interpreted. So the layout has one part, whose name says how the inside lies: pools of other insides refuse each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poolweave.errors import ModelUnsupported
from poolweave.transfer import KVLayout
from poolweave.transfer.layout import Part

_SPECS = ("FullAttentionSpec",)
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What an engine says of its KV cache. `kinds`: the class of each cache group's spec, by name.

    `inside`: how a page lies inside, in words; `width`: numbers a token and head, keys and values together.
    """

    model: str
    device: str
    kinds: tuple[str, ...]
    layers: int
    heads: int
    width: int
    block_tokens: int
    dtype: str
    page_bytes: int
    inside: str
    window: int | None = None
    ranks: int = 1
    speculative: bool = False
    encoder: bool = False

    def layout(self) -> KVLayout:
        """Raises ModelUnsupported naming the feature that keeps this engine from using a pool."""
        for feature in self._unsupported():
            raise ModelUnsupported(
                f"{self.model}: {feature}; run this engine without PoolConnector", model=self.model, feature=feature
            )
        part = Part(f"page-{self.inside}", self.heads, self.width, "replicate")
        return KVLayout(
            num_layers=self.layers, kv_heads=self.heads, head_dim=self.width, block_tokens=self.block_tokens,
            dtype=self.dtype, parts=(part,),
        )  # fmt: skip

    def _unsupported(self) -> Sequence[str]:
        expected = self.heads * self.width * self.block_tokens * (4 if self.dtype == "float32" else 2)
        checks = {
            f"KV on device {self.device!r} is not supported, only 'cpu'": self.device != "cpu",
            "hybrid KV cache groups (" + ", ".join(self.kinds) + ") are not supported": len(self.kinds) != 1,
            f"KV of kind {self.kinds[0] if self.kinds else None} is not supported": self.kinds[:1] not in (_SPECS,),
            f"a sliding or chunked window of {self.window} tokens is not supported": self.window is not None,
            f"KV of type {self.dtype} is not supported": self.dtype not in _DTYPES,
            f"an engine cut over {self.ranks} ranks is not supported": self.ranks != 1,
            "speculative decoding is not supported": self.speculative,
            "encoder-decoder attention is not supported": self.encoder,
            f"pages of {self.page_bytes} bytes where {expected} hold the KV (padded or packed)": (
                self.page_bytes != expected
            ),
        }
        return [feature for feature, found in checks.items() if found]
