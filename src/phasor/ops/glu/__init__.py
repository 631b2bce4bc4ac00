"""Gated activations (GLU, ReGLU, SwiGLU, GeGLU), alone or fused with the projection after them."""

from phasor.ops.glu.glu import (
    FUSED_GLU_LINEAR,
    GLU,
    GLU_AND_PRODUCT,
    GLU_LINEAR,
    glu,
    glu_and_product,
    glu_and_product_why_not,
    glu_linear,
)
from phasor.ops.glu.reference import GLU_ACTIVATIONS, glu_linear_ref, glu_ref

__all__ = [
    "FUSED_GLU_LINEAR",
    "GLU",
    "GLU_ACTIVATIONS",
    "GLU_AND_PRODUCT",
    "GLU_LINEAR",
    "glu",
    "glu_and_product",
    "glu_and_product_why_not",
    "glu_linear",
    "glu_linear_ref",
    "glu_ref",
]
