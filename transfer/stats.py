"""What a transfer engine counts, as snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """Counts since the start, and what is open now. `transports`: by peer, the transport asked for and in use."""

    open_offers: int
    waiting_offers: int
    done: int
    failed: int
    expired: int
    cancelled: int
    bytes: int
    transports: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    """Counts since the start, and what is open now. `handed`: blocks that came without a copy, `bytes` those copied."""

    sessions: int
    pulling: int
    unclaimed: int
    reserved: int
    done: int
    failed: int
    expired: int
    bytes: int
    handed: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counts of both directions since the start, and what is open now."""

    epoch: int
    sending: SenderStats
    receiving: ReceiverStats
