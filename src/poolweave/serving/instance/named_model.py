"""One of several models that a process or a deployment serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """`path`: "smollm2" or a local Hugging Face directory. Raises ConfigError for a name that no instance can bear."""

    name: str
    path: str

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "-_" for c in self.name) or len(self.name) > 32:
            raise ConfigError(
                f"model name {self.name!r} must be 1 to 32 letters, digits, '-' or '_'", setting="models",
                value=self.name,
            )  # fmt: skip


def check_names(models: Sequence[NamedModel]) -> None:
    """Raises ConfigError when two have one name."""
    doubled = [name for name, count in Counter(model.name for model in models).items() if count > 1]
    if doubled:
        raise ConfigError(f"two models are named {doubled[0]!r}", setting="models", value=doubled[0])
