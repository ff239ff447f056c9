"""What the sending half of an engine is set to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSettings:
    """What a sender takes from its engine's settings."""

    lease_s: float
    checksums: bool
    max_in_flight_bytes: int
    spin_s: float
