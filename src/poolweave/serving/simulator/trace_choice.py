"""Which requests to simulate: a recorded trace or a made-up one, how much of it, at which rates and shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poolweave.errors import ConfigError
from poolweave.serving.simulator.conversations import Conversations
from poolweave.serving.simulator.trace_files import TRACES, load_loogle, load_trace
from poolweave.serving.simulator.traces import SharedPrefixes, Trace

MADE_UP = {"shared": 600, "conversations": 200}  # and how many requests where none are asked for
_SHARING = ("loogle", "shared")  # kinds that have a share


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace at one rate and share; None: as recorded."""

    trace: Trace
    rate: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """`kind`: of TRACES with a `path`, or of MADE_UP without. `rates`: Poisson arrivals a second; none: as recorded.
    `shares`: how much of a document or prompt others have too. `copies`: LooGLE's documents, so many of each length.
    Raises ConfigError."""

    kind: str
    path: Path | None = None
    requests: int | None = None  # only the first ones
    rates: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    copies: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (*TRACES, *MADE_UP):
            known = ", ".join((*TRACES, *MADE_UP))
            raise ConfigError(f"trace kind {self.kind!r} is none of {known}", setting="trace", value=self.kind)
        if (self.path is None) != (self.kind in MADE_UP):
            needs = "is made up and takes no file" if self.kind in MADE_UP else "needs the trace's file"
            raise ConfigError(f"kind {self.kind} {needs}", setting="trace", value=self.kind)
        if self.shares and self.kind not in _SHARING:
            raise ConfigError(
                f"kind {self.kind} has no share that can be varied; {' and '.join(_SHARING)} have", setting="share"
            )
        if not all(0 <= share <= 1 for share in self.shares):
            raise ConfigError(f"shares must be between 0 and 1, got {self.shares}", setting="share")
        if self.copies != 1 and self.kind != "loogle":
            raise ConfigError(f"only loogle has copies of its documents, not {self.kind}", setting="copies")

    def workloads(self) -> Iterator[Workload]:
        """Each share at each rate."""
        for share in self.shares or (None,):
            trace = self._trace(share)
            for rate in self.rates or (None,):
                yield Workload(trace=trace if rate is None else trace.at_rate(rate, self.seed), rate=rate, share=share)

    @property
    def num_workloads(self) -> int:
        return max(len(self.shares), 1) * max(len(self.rates), 1)

    def _trace(self, share: float | None) -> Trace:
        if self.path is None:
            return self._made_up(share)
        if self.kind == "loogle":
            whole = 1.0 if share is None else share
            trace = load_trace("loogle", self.path, lambda path: load_loogle(path, copies=self.copies, share=whole))
        else:
            trace = load_trace(self.kind, self.path)
        trace = trace if self.requests is None else trace.head(self.requests)
        if not trace.requests:
            raise ConfigError(f"trace file {self.path} holds no requests", setting="trace", value=str(self.path))
        return trace

    def _made_up(self, share: float | None) -> Trace:
        """Prompts of 4,096 tokens about one of 48 beginnings; or talks of five turns, of which one prefill instance has
        room for 40."""
        count = self.requests or MADE_UP[self.kind]
        if self.kind == "conversations":
            return Conversations(sessions=-(-count // 5), turns=5, seed=self.seed).trace().head(count)
        common = 0.5 if share is None else share
        return SharedPrefixes(share=common, num_requests=count, prefixes=48, seed=self.seed).trace()
