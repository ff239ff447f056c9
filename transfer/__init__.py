"""Moving blocks between instances: layouts, offers, pulls and transports."""

from poolweave.transfer.arriving import Arriving
from poolweave.transfer.config import TransferConfig
from poolweave.transfer.costs import CostMeter, TransferCosts
from poolweave.transfer.engine import TransferEngine
from poolweave.transfer.granularity import LayerWork, ends_after, layers_per_step
from poolweave.transfer.layout import KVLayout, Part
from poolweave.transfer.resharding import Cut, Shard
from poolweave.transfer.shipment import Arrival, Reservation, Shipment, Transfer, TransferReport
from poolweave.transfer.stats import TransferStats
from poolweave.transfer.store import BlockStore, Incoming, Loan, Placement, Region
from poolweave.transfer.transports.inproc import Exchange

__all__ = [
    "Arrival",
    "Arriving",
    "BlockStore",
    "CostMeter",
    "Cut",
    "Exchange",
    "Incoming",
    "KVLayout",
    "LayerWork",
    "Loan",
    "Part",
    "Placement",
    "Region",
    "Reservation",
    "Shard",
    "Shipment",
    "Transfer",
    "TransferConfig",
    "TransferCosts",
    "TransferEngine",
    "TransferReport",
    "TransferStats",
    "ends_after",
    "layers_per_step",
]
