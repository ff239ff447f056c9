"""Offline planning: from traces and model shapes to a page budget, attention ranks and FFN placement."""

from poolweave.crosspool_engine.planner.demand import DemandEstimate, Workload, estimate_demand
from poolweave.crosspool_engine.planner.explanation import explain
from poolweave.crosspool_engine.planner.plan import FfnPiece, ModelPlan, Plan, load_plan, save_plan
from poolweave.crosspool_engine.planner.planner import Device, PlanRequest, make_plan
from poolweave.crosspool_engine.planner.trace import Trace, read_trace

__all__ = [
    "DemandEstimate",
    "Device",
    "FfnPiece",
    "ModelPlan",
    "Plan",
    "PlanRequest",
    "Trace",
    "Workload",
    "estimate_demand",
    "explain",
    "load_plan",
    "make_plan",
    "read_trace",
    "save_plan",
]
