"""Which instance a request goes to: prompt trees, cost model, policies, membership. Pure: no I/O."""

from poolweave.scheduler.cost_model import ArchitectureModel, CostModel, DecodeStep, KVLink, Link
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.membership import Membership, MembershipConfig
from poolweave.scheduler.policies import POLICIES, RoutingPolicy
from poolweave.scheduler.prompt_tree import PromptTree, Source
from poolweave.scheduler.routes import Route, SchedulerConfig

__all__ = [
    "POLICIES",
    "ArchitectureModel",
    "CostModel",
    "DecodeStep",
    "GlobalScheduler",
    "KVLink",
    "Link",
    "Membership",
    "MembershipConfig",
    "PromptTree",
    "Route",
    "RoutingPolicy",
    "SchedulerConfig",
    "Source",
]
