"""Float8 training: linear layers and gated MLPs, their dispatch tables and plain references."""

from phasor.ops.float8.float8 import (
    FLOAT8_MLP,
    FLOAT8_TRANSPOSE,
    float8_linear,
    float8_linear_why_not,
    float8_mlp,
    float8_mlp_why_not,
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
    "FLOAT8_MAX",
    "FLOAT8_MLP",
    "FLOAT8_TRANSPOSE",
    "float8_linear",
    "float8_linear_backward_ref",
    "float8_linear_ref",
    "float8_linear_why_not",
    "float8_mlp",
    "float8_mlp_backward_ref",
    "float8_mlp_ref",
    "float8_mlp_why_not",
    "glu_float8_backward_ref",
    "glu_float8_ref",
    "quantize_rows",
    "quantize_rows_ref",
    "transpose",
    "transpose_ref",
]
