"""Settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much one step does. Raises ConfigError for a value below 1.

    `step_tokens` bounds the tokens of one forward (decode tokens and prefill chunks together), and so the gap that
    a long prompt puts between two decode tokens. `max_sequences` bounds the sequences that hold KV at once; more wait.
    """

    step_tokens: int = 512
    max_sequences: int = 64
    num_threads: int = 1  # torch's threads in this process

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{field.name} must be a positive integer, got {value!r}", setting=field.name, value=value, limit=1
                )
        if self.step_tokens < self.max_sequences:
            raise ConfigError(
                f"step_tokens={self.step_tokens} is below max_sequences={self.max_sequences}: some would not decode in "
                "each step; raise the first or lower the second",
                setting="step_tokens",
                value=self.step_tokens,
                limit=self.max_sequences,
            )
