"""Tokens grouped by the experts that their router chose, and the experts' results summed by their weights."""

from phasor.ops.routing.grouped_experts import GroupedExpertsArgs, grouped_experts_op
from phasor.ops.routing.reference import SortedRouting, choose_experts
from phasor.ops.routing.routing import ROUTING, KernelRouting, Routing, kernels_why_not, route

__all__ = [
    "ROUTING",
    "GroupedExpertsArgs",
    "KernelRouting",
    "Routing",
    "SortedRouting",
    "choose_experts",
    "grouped_experts_op",
    "kernels_why_not",
    "route",
]
