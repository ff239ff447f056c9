"""A recorded trace, asked of a running deployment over HTTP: its arrivals, its sessions, its shared prefixes.

Traces hold lengths and which blocks are equal, not words: each block becomes made-up tokens of its own, so prompts
share exactly the prefixes that they shared when they were recorded.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from poolweave.errors import ConfigError
from poolweave.serving.http_call import get_json
from poolweave.serving.simulator.traces import Trace, TraceRequest

_FIRST_TOKEN = 100  # below it are special tokens of common models


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """`speed` divides the recorded times. Prompts and answers are cut to the limits; ids stay below `vocabulary`."""

    url: str = "http://127.0.0.1:8000"
    model: str
    key: str | None = None
    speed: float = 1.0
    vocabulary: int = 32_000
    max_prompt_tokens: int = 4096
    max_answer_tokens: int = 256
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("speed", "max_prompt_tokens", "max_answer_tokens", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}", setting=name)
        if self.vocabulary <= _FIRST_TOKEN:
            raise ConfigError(
                f"vocabulary must be over {_FIRST_TOKEN}, got {self.vocabulary}",
                setting="vocabulary",
                value=self.vocabulary,
            )


@dataclass(slots=True)
class ReplayReport:
    """What was seen. Times are seconds; `statuses`: answers by HTTP status, "lost" for connections that broke."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    jct_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def complete(self) -> bool:
        """Every request was answered."""
        return set(self.statuses) <= {"200"}

    def summary(self) -> dict[str, Any]:
        """Plain values, for people and programs."""
        return {
            "requests": self.statuses.total(),
            "statuses": dict(self.statuses),
            "seconds": round(self.seconds, 3),
            "answer_tokens_per_s": round(self.answer_tokens / self.seconds, 3) if self.seconds else 0.0,
            "hit_ratio": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else 0.0,
            **{
                f"{name}_{label}_s": round(float(np.percentile(times, percent)), 6)
                for name, times in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("jct", self.jct_s))
                for label, percent in (("p50", 50), ("p99", 99))
                if times
            },
        }


def prompt_of(request: TraceRequest, block_tokens: int, config: ReplayConfig) -> list[int]:
    """Tokens of a prompt: those of each block follow from its key alone, those after the last one from it too."""
    length = min(request.num_tokens, config.max_prompt_tokens)
    keys: Sequence[int] = request.keys[: length // block_tokens].tolist()
    tokens = [_tokens_of(key, block_tokens, config.vocabulary) for key in keys]
    rest = length - len(keys) * block_tokens
    if rest:
        tail = int(request.answer_keys[len(keys)]) if len(keys) < len(request.answer_keys) else len(keys)
        tokens.append(_tokens_of(tail, rest, config.vocabulary))
    return [token for block in tokens for token in block]


def check_server(config: ReplayConfig) -> None:
    """Raises unless a server answers at the URL, takes the key and serves the model: ConfigError for what is no URL
    and for unknown models, PeerLost when nobody answers, PoolweaveError when it refuses."""
    found = get_json(f"{config.url.rstrip('/')}/v1/models", config.key)
    names = [str(model.get("id")) for model in found.get("data", ())]
    if config.model not in names:
        raise ConfigError(
            f"{config.url} has no model {config.model!r}, but {', '.join(names) or 'none'}",
            setting="model",
            value=config.model,
        )


async def replay(
    trace: Trace,
    config: ReplayConfig,
    done: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayReport:
    """Ask every request at its time, or when the one before it in its session was answered. `done` after each."""
    report = ReplayReport()
    headers = {"Authorization": f"Bearer {config.key}"} if config.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    last: dict[str, asyncio.Task[None]] = {}
    start = clock()
    async with httpx.AsyncClient(
        base_url=config.url, headers=headers, timeout=config.timeout_s, limits=limits
    ) as client:
        one = _Asker(client, config, trace.block_tokens, report, clock)
        tasks: list[asyncio.Task[None]] = []
        for request in trace.requests:
            await asyncio.sleep(max(0.0, start + request.arrival_s / config.speed - clock()))
            before = None if request.session is None else last.get(request.session)
            task = asyncio.create_task(one.ask(request, before))
            task.add_done_callback(lambda task: done())
            tasks.append(task)
            if request.session is not None:
                last[request.session] = task
        await asyncio.gather(*tasks)
    report.seconds = clock() - start
    return report


class _Asker:
    """Asks one request after another and writes down what came of it."""

    def __init__(
        self, client: httpx.AsyncClient, config: ReplayConfig, block_tokens: int, report: ReplayReport,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._client = client
        self._config = config
        self._block_tokens = block_tokens
        self._report = report
        self._clock = clock

    async def ask(self, request: TraceRequest, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        body = {
            "model": self._config.model,
            "prompt": prompt_of(request, self._block_tokens, self._config),
            "max_tokens": min(request.output_tokens, self._config.max_answer_tokens),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if request.session is None else {"session_id": request.session}),
        }
        try:
            status = await self._stream(body)
        except httpx.HTTPError:
            status = "lost"
        self._report.statuses[status] += 1

    async def _stream(self, body: dict[str, Any]) -> str:
        start, first = self._clock(), None
        usage: dict[str, Any] | None = None
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return str(answer.status_code)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or self._clock()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return str(chunk["error"]["code"])
                usage = chunk.get("usage") or usage
        if usage is None or first is None:
            return "lost"
        self._count(usage, first - start, self._clock() - start)
        return "200"

    def _count(self, usage: dict[str, Any], ttft_s: float, jct_s: float) -> None:
        report, answer = self._report, usage["completion_tokens"]
        report.ttft_s.append(ttft_s)
        report.jct_s.append(jct_s)
        if answer > 1:
            report.tpot_s.append((jct_s - ttft_s) / (answer - 1))
        report.prompt_tokens += usage["prompt_tokens"]
        report.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        report.answer_tokens += answer


def _tokens_of(key: int, length: int, vocabulary: int) -> list[int]:
    """Made up from `key` by a linear congruential generator: the same key gives the same tokens."""
    state, tokens = key & (2**64 - 1), []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        tokens.append(_FIRST_TOKEN + (state >> 33) % (vocabulary - _FIRST_TOKEN))
    return tokens
