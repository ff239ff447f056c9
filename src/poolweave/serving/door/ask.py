"""What a client asked, in tokens, and what it costs: values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.tenant_quota import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as instances need it. `owner`: whose its KV is; `session`: for the policy of that name."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    owner: Owner = field(default_factory=Owner)
    session: str | None = None


@dataclass(slots=True)
class Outcome:
    """What became of a request, filled in as it goes on."""

    answer: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None  # None: it has not ended
    attempts: int = 0
