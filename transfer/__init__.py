"""Moving blocks between instances: layouts, offers, pulls and transports."""

from poolweave.transfer.layout import KVLayout, Part
from poolweave.transfer.store import BlockStore, Incoming, Loan, Placement, Region

__all__ = ["BlockStore", "Incoming", "KVLayout", "Loan", "Part", "Placement", "Region"]
