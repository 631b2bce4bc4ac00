"""Tokens grouped by the experts that their router chose, and the experts' results summed by their weights."""

from phasor.ops.routing.balance import EXPERT_LOADS, expert_loads_ref
from phasor.ops.routing.grouped_experts import GroupedExpertsArgs, grouped_experts_op
from phasor.ops.routing.reference import SortedRouting, route, score_experts
from phasor.ops.routing.routing import ROUTING, KernelRouting, Routing, group_by_expert, kernels_why_not

__all__ = [
    "EXPERT_LOADS",
    "ROUTING",
    "GroupedExpertsArgs",
    "KernelRouting",
    "Routing",
    "SortedRouting",
    "expert_loads_ref",
    "group_by_expert",
    "grouped_experts_op",
    "kernels_why_not",
    "route",
    "score_experts",
]
