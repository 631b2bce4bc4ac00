"""Cross-entropy of a linear layer's logits, computed in chunks of rows so that all logits are never held at once."""

from phasor.ops.cross_entropy.cross_entropy import CROSS_ENTROPY, linear_cross_entropy
from phasor.ops.cross_entropy.reference import (
    LossSums,
    cross_entropy_ref,
    linear_cross_entropy_ref,
    logits_cross_entropy,
    scale_and_softcap,
    weighted_sum,
)

__all__ = [
    "CROSS_ENTROPY",
    "LossSums",
    "cross_entropy_ref",
    "linear_cross_entropy",
    "linear_cross_entropy_ref",
    "logits_cross_entropy",
    "scale_and_softcap",
    "weighted_sum",
]
