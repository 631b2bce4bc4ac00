"""The kernels of a decoding step and their references.

`embedding`, `decode_attention`, `convolve`, `recurrent_step`, `experts`, `experts_one_row`, `gemv`, `small_gemm`,
`split_k_gemm`, `int4_tiles`, `lm_head_argmax` and `reorder_cache` are modules of Triton kernels, to be imported where
Triton is installed. This package itself has their arguments and references, and imports without Triton.
"""

from phasor.ops.decode.arguments import (
    ACTIVATIONS,
    ConvolutionArgs,
    ExpertsArgs,
    HeadNormArgs,
    NormArgs,
    QKNormArgs,
    RecurrentArgs,
    RotaryArgs,
)
from phasor.ops.decode.recurrent_reference import convolve_ref, project_convolve_ref, recurrent_step_ref
from phasor.ops.decode.reference import (
    activate_ref,
    advance_step_ref,
    decode_attention_ref,
    embed_tokens_ref,
    experts_ref,
    lm_head_argmax_ref,
    project_activate_ref,
    project_ref,
    reorder_cache_ref,
    small_gemm_ref,
)
from phasor.ops.decode.tiles import Tiles, choose_tiles

__all__ = [
    "ACTIVATIONS",
    "ConvolutionArgs",
    "ExpertsArgs",
    "HeadNormArgs",
    "NormArgs",
    "QKNormArgs",
    "RecurrentArgs",
    "RotaryArgs",
    "Tiles",
    "activate_ref",
    "advance_step_ref",
    "choose_tiles",
    "convolve_ref",
    "decode_attention_ref",
    "embed_tokens_ref",
    "experts_ref",
    "lm_head_argmax_ref",
    "project_activate_ref",
    "project_convolve_ref",
    "project_ref",
    "recurrent_step_ref",
    "reorder_cache_ref",
    "small_gemm_ref",
]
