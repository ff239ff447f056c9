"""Requests over time, as a plan needs them: when each came, how many tokens, how long it was served.

Reads the published trace formats by their column names; knows no models. Source: CrossPool §planner (arrivals,
prompt and output lengths, service times).
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError

FloatArray = npt.NDArray[np.float64]

# field -> the names it has in the traces that are read
_NAMES: Mapping[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "timestamp", "TIMESTAMP"),
    "prompt": ("prompt_tokens", "input_length", "ContextTokens", "input_toks", "prompt_len", "num_prefill_tokens"),
    "output": ("output_tokens", "output_length", "GeneratedTokens", "output_toks", "output_len", "num_decode_tokens"),
    "service": ("service_s",),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """`n` requests in order of arrival; times in seconds from the first one, all arrays `[n]` float64.

    `service_s` is the time a request holds its KV while it decodes. Raises ConfigError for an empty trace, arrays of
    unlike length, and values that are negative or not finite.
    """

    arrival_s: FloatArray
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    service_s: FloatArray

    def __post_init__(self) -> None:
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "service_s"):
            array = np.asarray(getattr(self, name), np.float64)
            if array.ndim != 1 or len(array) != len(self.arrival_s) or not len(array):
                raise ConfigError(
                    f"a trace needs one {name} for each of its {len(self.arrival_s)} requests, got {array.shape}",
                    setting=name, value=array.shape, limit=len(self.arrival_s),
                )  # fmt: skip
            if not np.isfinite(array).all() or array.min() < 0:
                raise ConfigError(
                    f"{name} of a trace must be finite and not negative", setting=name, value=float(array.min())
                )
            object.__setattr__(self, name, array)
        order = np.argsort(self.arrival_s, kind="stable")
        first = self.arrival_s[order[0]]
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "service_s"):
            object.__setattr__(self, name, getattr(self, name)[order] - (first if name == "arrival_s" else 0))

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def period_s(self) -> float:
        """The time the trace stands for: its span and one mean gap, after which it may begin again."""
        span = float(self.arrival_s[-1])
        if span > 0:
            return span * len(self) / (len(self) - 1)
        return max(float(self.service_s.max()), 1e-9)

    @property
    def rate_per_s(self) -> float:
        return len(self) / self.period_s

    def at_rate(self, rate_per_s: float) -> Trace:
        """The same requests with their arrivals drawn apart or together to `rate_per_s`; service times stay."""
        if not rate_per_s > 0:
            raise ConfigError(f"rate_per_s must be positive, got {rate_per_s}", setting="rate_per_s", value=rate_per_s)
        scale = self.rate_per_s / rate_per_s
        return Trace(self.arrival_s * scale, self.prompt_tokens, self.output_tokens, self.service_s)

    def where(self, keep: npt.NDArray[np.bool_]) -> Trace:
        """The requests that `keep` marks. Raises ConfigError if it marks none."""
        return Trace(self.arrival_s[keep], self.prompt_tokens[keep], self.output_tokens[keep], self.service_s[keep])


def read_trace(path: str | Path, *, token_s: float | None = None) -> Trace:
    """Read a trace from `.csv` or `.jsonl`, `.xz` or not.

    Known columns: arrival_s / timestamp (milliseconds) / TIMESTAMP (a date), prompt and output tokens under the names
    of the Mooncake, Azure, ShareGPT, LMSYS-arena and measured vLLM traces, and service_s or first_token_s and
    last_token_s. Without measured service times, `token_s` seconds an output token are taken. Raises ConfigError
    naming the file and what it lacks.
    """
    rows = list(_rows(Path(path)))
    if not rows:
        raise ConfigError(f"{path} holds no requests", setting="trace", value=str(path))
    columns = {field: name for field, names in _NAMES.items() for name in reversed(names) if name in rows[0]}
    for field in ("arrival", "prompt", "output"):
        if field not in columns:
            raise ConfigError(
                f"{path} has no column for {field}: one of {_NAMES[field]}; it has {sorted(rows[0])}",
                setting="trace", value=str(path),
            )  # fmt: skip
    try:
        arrival = np.array([_seconds(row[columns["arrival"]], columns["arrival"]) for row in rows])
        prompt, output = (np.array([float(row[columns[f]]) for row in rows]) for f in ("prompt", "output"))
        service = _service(rows, columns.get("service"), output, token_s)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} has a row that cannot be read: {error}", setting="trace", value=str(path)) from error
    if service is None:
        raise ConfigError(
            f"{path} has no service times: pass token_s, the seconds an output token takes", setting="token_s"
        )
    return Trace(arrival - arrival.min(), prompt, output, service)


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", setting="trace", value=str(path)) from error
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    if ".jsonl" in path.name:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return csv.DictReader(io.StringIO(text))


def _seconds(value: Any, column: str) -> float:
    if column == "TIMESTAMP":  # a date with seven decimals, one more than datetime reads
        return datetime.fromisoformat(str(value)[:26]).timestamp()
    return float(value) / 1000 if column == "timestamp" else float(value)


def _service(
    rows: list[dict[str, Any]], column: str | None, output: FloatArray, token_s: float | None
) -> FloatArray | None:
    if column is not None:
        return np.array([float(row[column]) for row in rows])
    if "first_token_s" in rows[0]:
        return np.array([float(row["last_token_s"]) - float(row["first_token_s"]) for row in rows])
    return None if token_s is None else output * token_s
