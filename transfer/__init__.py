"""Moving blocks between instances: layouts, offers, pulls and transports."""

from poolweave.transfer.config import TransferConfig
from poolweave.transfer.engine import TransferEngine, TransferStats
from poolweave.transfer.layout import KVLayout, Part
from poolweave.transfer.shipment import Arrival, Reservation, Shipment, Transfer, TransferReport
from poolweave.transfer.store import BlockStore, Incoming, Loan, Placement, Region
from poolweave.transfer.transports.inproc import Exchange

__all__ = [
    "Arrival",
    "BlockStore",
    "Exchange",
    "Incoming",
    "KVLayout",
    "Loan",
    "Part",
    "Placement",
    "Region",
    "Reservation",
    "Shipment",
    "Transfer",
    "TransferConfig",
    "TransferEngine",
    "TransferReport",
    "TransferStats",
]
