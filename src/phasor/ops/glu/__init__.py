"""Gated activations (GLU, ReGLU, SwiGLU, GeGLU), alone or fused with the projection after them."""

from phasor.ops.glu.glu import (
    FUSED_GLU_LINEAR,
    GLU,
    GLU_LINEAR,
    glu,
    glu_linear,
    recompute_why_not,
)
from phasor.ops.glu.reference import GLU_ACTIVATIONS, glu_linear_ref, glu_ref

__all__ = [
    "FUSED_GLU_LINEAR",
    "GLU",
    "GLU_ACTIVATIONS",
    "GLU_LINEAR",
    "glu",
    "glu_linear",
    "glu_linear_ref",
    "glu_ref",
    "recompute_why_not",
]
