"""What a caller did wrong, said as ConfigError. Called when a call failed already, so that right ones pay nothing."""

from __future__ import annotations

import operator
from typing import Any

from poolweave.errors import ConfigError
from poolweave.index import Identity
from poolweave.types import Tier, require_timeout


def refuse_count(num_blocks: Any) -> None:
    """Raises ConfigError for what is no number of blocks."""
    try:
        wrong = operator.index(num_blocks) < 0
    except TypeError:
        wrong = True
    if wrong:
        raise ConfigError(
            f"num_blocks must be an integer and not negative, got {num_blocks!r}",
            setting="num_blocks",
            value=num_blocks,
        )


def refuse_request(num_blocks: Any, tier: Any, timeout: Any) -> None:
    """Raises ConfigError for the first argument of an alloc that is none."""
    refuse_count(num_blocks)
    if not isinstance(tier, Tier):
        raise ConfigError(f"tier must be a Tier such as Tier.HBM, got {tier!r}", setting="tier", value=tier)
    require_timeout(timeout)


def refuse_identity(identity: Any) -> None:
    """Raises ConfigError for what is no Identity."""
    if not isinstance(identity, Identity):
        raise ConfigError(
            f"a namespace stands for an Identity(model=...), got {identity!r}", setting="identity", value=identity
        )
