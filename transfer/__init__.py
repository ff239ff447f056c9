"""Moving blocks between instances: layouts, offers, pulls and transports."""

from poolweave.transfer.arriving import Arriving
from poolweave.transfer.config import TransferConfig
from poolweave.transfer.engine import TransferEngine
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
    "Cut",
    "Exchange",
    "Incoming",
    "KVLayout",
    "Loan",
    "Part",
    "Placement",
    "Region",
    "Reservation",
    "Shard",
    "Shipment",
    "Transfer",
    "TransferConfig",
    "TransferEngine",
    "TransferReport",
    "TransferStats",
]
