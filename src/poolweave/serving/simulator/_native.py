"""The native part of this room: simulated instances and the clock over them."""

from poolweave._core import SimulatedFleet

__all__ = ["SimulatedFleet"]
