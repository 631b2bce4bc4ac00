"""Linear attention with a state of constant size, and the short convolution before it. Nothing imports Triton."""

from phasor.ops.linear_attention.arguments import LinearAttentionArgs
from phasor.ops.linear_attention.linear_attention import (
    CAUSAL_CONVOLUTION,
    GATED_DELTA,
    LINEAR_ATTENTION_STEP,
    causal_convolution,
    gated_delta,
    linear_attention_step,
    retention,
)
from phasor.ops.linear_attention.reference import causal_convolution_ref, gated_delta_ref, retention_ref

__all__ = [
    "CAUSAL_CONVOLUTION",
    "GATED_DELTA",
    "LINEAR_ATTENTION_STEP",
    "LinearAttentionArgs",
    "causal_convolution",
    "causal_convolution_ref",
    "gated_delta",
    "gated_delta_ref",
    "linear_attention_step",
    "retention",
    "retention_ref",
]
