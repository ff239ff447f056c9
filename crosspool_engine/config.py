"""How a decode engine is set up. Values only, checked when built."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.errors import ConfigError
from poolweave.types import parse_bytes

_MAX_ROWS, _MAX_RANKS = 16, 8  # of the native board


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`kv_budget` bytes of KV over all models; `lowered`: workers hand batches on without the host.

    `in_flight` batches at once: 1 is no pipeline, 2 the paper's; set_control changes both later. `cores`: the CPU of
    the attention worker, then of each FFN rank; None leaves them to the system. `max_waiting` requests queue for room,
    each for `deadline_s` at most.
    """

    kv_budget: int | str
    max_models: int = 4
    max_tokens: int = 2048
    max_hidden: int = 4096
    in_flight: int = 2
    max_batch: int = 4
    lowered: bool = True
    ffn_ranks: int = 1
    block_tokens: int = 16
    page_bytes: int = 2 << 20
    max_waiting: int = 256
    deadline_s: float = 60.0
    kernels: str = "auto"
    cores: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        limits = {"max_batch": _MAX_ROWS, "ffn_ranks": _MAX_RANKS}
        for name in ("max_models", "max_tokens", "max_hidden", "in_flight", "max_batch", "ffn_ranks", "block_tokens"):
            value, most = getattr(self, name), limits.get(name)
            if value < 1 or (most is not None and value > most):
                raise ConfigError(
                    f"{name} must be at least 1{f' and at most {most}' if most else ''}, got {value}", setting=name,
                    value=value, limit=most or 1,
                )  # fmt: skip
        if self.max_waiting < 0 or not self.deadline_s > 0:
            raise ConfigError("max_waiting is not negative and deadline_s positive", setting="deadline_s")
        if self.cores is not None and len(self.cores) != 1 + self.ffn_ranks:
            raise ConfigError(
                f"cores names {len(self.cores)} CPUs, there are {1 + self.ffn_ranks} workers", setting="cores",
                value=self.cores,
            )  # fmt: skip
        if self.budget_bytes < self.page_bytes:
            raise ConfigError(
                f"kv_budget {self.budget_bytes} holds no page of {self.page_bytes} bytes", setting="kv_budget",
                value=self.budget_bytes, limit=self.page_bytes,
            )  # fmt: skip

    @property
    def budget_bytes(self) -> int:
        return parse_bytes(self.kv_budget, "kv_budget")

    @property
    def budget_pages(self) -> int:
        return self.budget_bytes // self.page_bytes

    @property
    def slots(self) -> int:
        """Batches on the board: of each model as many as can fly."""
        return self.max_models * self.in_flight

    @property
    def seats(self) -> int:
        """Requests on the board."""
        return self.slots * self.max_batch
