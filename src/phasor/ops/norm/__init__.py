"""RMSNorm and LayerNorm over the last dimension, alone or fused with the residual sums before or after them."""

from phasor.ops.norm.norm import ADD_NORM, NORM, NormOptions, add_norm, norm
from phasor.ops.norm.norm_add import NORM_ADD, NORM_ADD_NORM, norm_add, norm_add_norm
from phasor.ops.norm.reference import add_norm_ref, norm_add_norm_ref, norm_add_ref, norm_ref

__all__ = [
    "ADD_NORM",
    "NORM",
    "NORM_ADD",
    "NORM_ADD_NORM",
    "NormOptions",
    "add_norm",
    "add_norm_ref",
    "norm",
    "norm_add",
    "norm_add_norm",
    "norm_add_norm_ref",
    "norm_add_ref",
    "norm_ref",
]
