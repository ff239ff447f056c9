"""How a decode engine is set up. Values only, checked when built."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.errors import ConfigError
from poolweave.types import parse_bytes

_MAX_ROWS = 16  # of the native board
MAX_RANKS = 8  # of it too


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`kv_budget` bytes of KV over all models, on each attention rank, or a tuple with each rank's own.

    `in_flight` batches of a rank at once: 1 is no pipeline, 2 the paper's; `lowered`: workers hand batches on without
    the host. set_control changes both later. `cores`: the CPU of each attention rank's worker, then of each FFN
    rank's; None leaves them to the system. `max_waiting` requests queue for room, each for `deadline_s` at most.
    `ffn_hosts`: `host:port` of FFN ranks on other hosts (ffn_host), the last of `ffn_ranks`; the others run here.
    `events`: stages that each worker's timeline keeps. `reuse`: whole KV blocks of requests that ended stay, to be
    matched by later ones, until their memory is needed.
    """

    kv_budget: int | str | tuple[int | str, ...]
    max_models: int = 4
    max_tokens: int = 2048
    max_hidden: int = 4096
    in_flight: int = 2
    max_batch: int = 4
    lowered: bool = True
    attention_ranks: int = 1
    ffn_ranks: int = 1
    block_tokens: int = 16
    page_bytes: int = 2 << 20
    max_waiting: int = 256
    deadline_s: float = 60.0
    kernels: str = "auto"
    cores: tuple[int, ...] | None = None
    ffn_hosts: tuple[str, ...] = ()
    events: int = 0
    reuse: bool = True

    def __post_init__(self) -> None:
        limits = {"max_batch": _MAX_ROWS, "attention_ranks": MAX_RANKS, "ffn_ranks": MAX_RANKS}
        positive = ("max_models", "max_tokens", "max_hidden", "in_flight", "max_batch", "block_tokens")
        for name in (*positive, "attention_ranks", "ffn_ranks"):
            value, most = getattr(self, name), limits.get(name)
            if value < 1 or (most is not None and value > most):
                raise ConfigError(
                    f"{name} must be at least 1{f' and at most {most}' if most else ''}, got {value}", setting=name,
                    value=value, limit=most or 1,
                )  # fmt: skip
        if self.max_waiting < 0 or self.events < 0 or not self.deadline_s > 0:
            raise ConfigError("max_waiting and events are not negative and deadline_s positive", setting="deadline_s")
        workers = self.attention_ranks + self.ffn_ranks
        if self.cores is not None and len(self.cores) != workers:
            raise ConfigError(
                f"cores names {len(self.cores)} CPUs, there are {workers} workers", setting="cores", value=self.cores
            )
        if len(self.ffn_hosts) > self.ffn_ranks:
            raise ConfigError(
                f"ffn_hosts names {len(self.ffn_hosts)} of {self.ffn_ranks} FFN ranks", setting="ffn_hosts",
                value=self.ffn_hosts, limit=self.ffn_ranks,
            )  # fmt: skip
        self._check_budget()

    def _check_budget(self) -> None:
        if isinstance(self.kv_budget, tuple) and len(self.kv_budget) != self.attention_ranks:
            raise ConfigError(
                f"kv_budget names {len(self.kv_budget)} ranks, there are {self.attention_ranks}", setting="kv_budget",
                value=self.kv_budget,
            )  # fmt: skip
        for rank in range(self.attention_ranks):
            if self.budget_pages(rank) < 1:
                raise ConfigError(
                    f"kv_budget {self.kv_budget} holds no page of {self.page_bytes} bytes", setting="kv_budget",
                    value=self.kv_budget, limit=self.page_bytes,
                )  # fmt: skip

    def budget_pages(self, rank: int) -> int:
        """Pages of KV on one attention rank."""
        budget = self.kv_budget[rank] if isinstance(self.kv_budget, tuple) else self.kv_budget
        return parse_bytes(budget, "kv_budget") // self.page_bytes

    @property
    def board_sizes(self) -> dict[str, int]:
        """Of the native board, here and at other hosts."""
        return {
            "slots": self.slots, "max_rows": self.max_batch, "seats": self.seats, "max_tokens": self.max_tokens,
            "block_tokens": self.block_tokens, "max_hidden": self.max_hidden, "models": self.max_models,
            "events": self.events, "width": self.attention_ranks,
        }  # fmt: skip

    @property
    def slots_per_rank(self) -> int:
        """Batches on the board of one attention rank: of each model as many as can fly."""
        return self.max_models * self.in_flight

    @property
    def slots(self) -> int:
        return self.attention_ranks * self.slots_per_rank

    @property
    def seats(self) -> int:
        """Requests on the board."""
        return self.slots * self.max_batch
