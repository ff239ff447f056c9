"""Moving blocks between instances: layouts, offers, pulls and transports."""

from poolweave.transfer._native import Tiers
from poolweave.transfer.arriving import Arriving
from poolweave.transfer.config import TransferConfig
from poolweave.transfer.costs import CostMeter, TransferCosts
from poolweave.transfer.engine import TransferEngine
from poolweave.transfer.granularity import LayerWork, ends_after, layers_per_step
from poolweave.transfer.layout import KVLayout, Part
from poolweave.transfer.messages import Offer
from poolweave.transfer.peers import Presence
from poolweave.transfer.resharding import Cut, Shard
from poolweave.transfer.shipment import Arrival, Reservation, Shipment, Transfer, TransferReport
from poolweave.transfer.stats import TransferStats
from poolweave.transfer.store import (
    BlockStore,
    Incoming,
    Joint,
    Loan,
    MappedPeer,
    Payer,
    Placement,
    Region,
    ShortWay,
    TakenIn,
)
from poolweave.transfer.tls import TlsFiles
from poolweave.transfer.transports.inproc import Exchange

__all__ = [
    "Arrival",
    "Arriving",
    "BlockStore",
    "CostMeter",
    "Cut",
    "Exchange",
    "Incoming",
    "Joint",
    "KVLayout",
    "LayerWork",
    "Loan",
    "MappedPeer",
    "Offer",
    "Part",
    "Payer",
    "Placement",
    "Presence",
    "Region",
    "Reservation",
    "Shard",
    "Shipment",
    "ShortWay",
    "TakenIn",
    "Tiers",
    "TlsFiles",
    "Transfer",
    "TransferConfig",
    "TransferCosts",
    "TransferEngine",
    "TransferReport",
    "TransferStats",
    "ends_after",
    "layers_per_step",
]
