"""RMSNorm and LayerNorm over the last dimension, alone or fused with the residual addition before them."""

from phasor.ops.norm.norm import ADD_NORM, NORM, add_norm, norm
from phasor.ops.norm.reference import add_norm_ref, norm_ref

__all__ = ["ADD_NORM", "NORM", "add_norm", "add_norm_ref", "norm", "norm_ref"]
