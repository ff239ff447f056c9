"""What the door counts, in Prometheus' words: vLLM's names where they mean the same, `poolweave:` for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from poolweave.serving.door.ask import Ask, Outcome

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
M = TypeVar("M")
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class _Families:
    """Of all models of a door: one registry, each name in it once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {}

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._of(Counter, name, text, ("model_name", *labels))

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._of(Gauge, name, text, ("model_name", *labels))

    def histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return self._of(Histogram, name, text, ("model_name",), buckets=buckets)

    def _of(self, kind: Callable[..., M], name: str, text: str, labels: tuple[str, ...], **options: Any) -> M:
        if name not in self._by_name:
            self._by_name[name] = kind(name, text, labels, registry=self.registry, **options)
        found: M = self._by_name[name]
        return found


class Metrics:
    """One model's part of a door's registry; `model` labels everything, as vLLM's do. `beside`: another one's part."""

    def __init__(self, model: str, beside: Metrics | None = None) -> None:
        self._families: _Families = _Families() if beside is None else beside._families
        families = self._families
        self._model = model
        self._used: set[str] = set()  # instances whose usage is shown
        counter = families.counter

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return families.histogram(name, text, buckets).labels(model)

        self._running = families.gauge("vllm:num_requests_running", "Requests with tokens")
        self._waiting = families.gauge("vllm:num_requests_waiting", "Requests without")
        self._usage = families.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use", "instance")
        self._instances = families.gauge("poolweave:instances", "Usable instances", "role")
        self._finished = counter("vllm:request_success", "Answered requests", "finished_reason")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens").labels(model)
        self._generated = counter("vllm:generation_tokens", "Tokens of answers").labels(model)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up").labels(model)
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found").labels(model)
        self._turned_away = counter("poolweave:requests_turned_away", "Not let in", "reason", "tenant")
        self._failed = counter("poolweave:requests_failed", "Without an answer", "status")
        self._retried = counter("poolweave:requests_retried", "Attempts after the first").labels(model)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token")
        self._gap = histogram("vllm:inter_token_latency_seconds", "Token to token")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token")
        self._prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens a request", _TOKENS)
        self._answer_sizes = histogram("vllm:request_generation_tokens", "Answer tokens a request", _TOKENS)

    def turned_away(self, reason: str, tenant: str) -> None:
        self._turned_away.labels(self._model, reason, tenant).inc()

    def failed(self, status: int) -> None:
        """It got an error; 499: its client went away."""
        self._failed.labels(self._model, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came, `seconds` after the ones before."""
        for _ in range(count):
            self._gap.observe(seconds / count)

    def ended(self, ask: Ask, outcome: Outcome, seconds: float) -> None:
        """It got its answer."""
        self._finished.labels(self._model, outcome.finish_reason or "").inc()
        self._whole.observe(seconds)
        self._prompt.inc(len(ask.prompt))
        self._queries.inc(len(ask.prompt))
        self._hits.inc(outcome.cached_tokens)
        self._generated.inc(len(outcome.answer))
        self._retried.inc(outcome.attempts - 1)
        self._prompt_sizes.observe(len(ask.prompt))
        self._answer_sizes.observe(len(outcome.answer))

    def load(self, running: int, waiting: int, roles: dict[str, int]) -> None:
        """What goes on now."""
        self._running.labels(self._model).set(running)
        self._waiting.labels(self._model).set(waiting)
        for role, count in roles.items():
            self._instances.labels(self._model, role).set(count)

    def usage(self, shares: dict[str, float]) -> None:
        """Share of KV blocks in use by instance; those not named are no more."""
        for name in self._used - shares.keys():
            self._usage.remove(self._model, name)
        self._used = set(shares)
        for name, share in shares.items():
            self._usage.labels(self._model, name).set(share)

    def text(self) -> bytes:
        """Everything of all models, in Prometheus' text format."""
        return generate_latest(self._families.registry)
