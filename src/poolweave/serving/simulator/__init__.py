"""The scheduler and membership of a deployment under a seeded virtual clock, with instances that only take time."""

from poolweave.serving.simulator.config import Device, Flow, InstanceGroup, SimulationConfig
from poolweave.serving.simulator.devices import calibrated, llama2_13b_on_two_h800
from poolweave.serving.simulator.faults import Faults
from poolweave.serving.simulator.report import SimulationReport
from poolweave.serving.simulator.simulation import Simulation, compare_policies
from poolweave.serving.simulator.traces import Trace, TraceRequest

__all__ = [
    "Device",
    "Faults",
    "Flow",
    "InstanceGroup",
    "Simulation",
    "SimulationConfig",
    "SimulationReport",
    "Trace",
    "TraceRequest",
    "calibrated",
    "compare_policies",
    "llama2_13b_on_two_h800",
]
