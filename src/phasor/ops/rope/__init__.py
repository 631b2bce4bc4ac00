"""Rotary position embedding: rotation of feature pairs by given cosines and sines, or by positions in one kernel."""

from phasor.ops.rope.reference import (
    PhaseArgs,
    RopeArgs,
    rope_phases_ref,
    rope_qkv_ref,
    rope_ref,
    rotate_pairs_ref,
    split_pairs,
    split_qkv,
)
from phasor.ops.rope.rope import (
    ROPE,
    ROPE_QKV,
    expand_cos_sin,
    rope,
    rope_kernel,
    rope_kernel_why_not,
    rope_qkv,
    rope_qkv_kernel,
    rotate_halves,
    rotate_pairs,
)

__all__ = [
    "ROPE",
    "ROPE_QKV",
    "PhaseArgs",
    "RopeArgs",
    "expand_cos_sin",
    "rope",
    "rope_kernel",
    "rope_kernel_why_not",
    "rope_phases_ref",
    "rope_qkv",
    "rope_qkv_kernel",
    "rope_qkv_ref",
    "rope_ref",
    "rotate_halves",
    "rotate_pairs",
    "rotate_pairs_ref",
    "split_pairs",
    "split_qkv",
]
