"""One rank's part of a model's attention: an equal share of its KV heads, and of the queries that read them."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.crosspool_engine.attention_shape import Attention
from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Share `number` of `width` equal ones. The first has what is no head's too: embedding, head, output biases."""

    number: int
    width: int

    @property
    def first(self) -> bool:
        return self.number == 0

    def rows(self, heads: int, dim: int) -> range:
        """Of a projection to `heads` heads of `dim` numbers, those of this share."""
        each = heads // self.width * dim
        return range(self.number * each, (self.number + 1) * each)

    def check(self, attention: Attention) -> None:
        """Raises ConfigError for KV that does not divide into `width`: a second rank would keep a copy of it."""
        if attention.kv_shards % self.width:
            raise ConfigError(
                f"{attention.kv_shards} KV heads do not divide over {self.width} attention ranks", setting="replicas",
                value=self.width, limit=attention.kv_shards,
            )  # fmt: skip


WHOLE = HeadShard(0, 1)
