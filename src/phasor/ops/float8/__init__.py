"""Float8 training: linear layers and gated MLPs, their dispatch tables and plain references."""

from phasor.ops.float8.float8 import (
    FLOAT8_LINEAR,
    FLOAT8_MLP,
    FLOAT8_TRANSPOSE,
    FUSED_FLOAT8_MLP,
    float8_linear,
    float8_mlp,
    float8_mlp_why_not,
    float8_unsupported_reason,
    quantize_rows,
    transpose,
)
from phasor.ops.float8.reference import (
    FLOAT8,
    FLOAT8_MAX,
    float8_linear_backward_ref,
    float8_linear_ref,
    float8_mlp_backward_ref,
    float8_mlp_ref,
    glu_float8_backward_ref,
    glu_float8_ref,
    quantize_rows_ref,
    transpose_ref,
)

__all__ = [
    "FLOAT8",
    "FLOAT8_LINEAR",
    "FLOAT8_MAX",
    "FLOAT8_MLP",
    "FLOAT8_TRANSPOSE",
    "FUSED_FLOAT8_MLP",
    "float8_linear",
    "float8_linear_backward_ref",
    "float8_linear_ref",
    "float8_mlp",
    "float8_mlp_backward_ref",
    "float8_mlp_ref",
    "float8_mlp_why_not",
    "float8_unsupported_reason",
    "glu_float8_backward_ref",
    "glu_float8_ref",
    "quantize_rows",
    "quantize_rows_ref",
    "transpose",
    "transpose_ref",
]
