"""Weights in 8 or 4 bits: quantization, matrix products, embedding lookup, references."""

from phasor.ops.quantized.frozen import NF4_LINEAR, FrozenMatrix, frozen_linear
from phasor.ops.quantized.linear import QUANTIZED_LINEAR, quantized_embedding, quantized_linear
from phasor.ops.quantized.matrix import (
    GROUP_SIZES,
    Int4Matrix,
    Int8Matrix,
    Matrix,
    PackedInt4,
    QuantizedMatrix,
    dequantize,
    quantize_int4,
    quantize_int8,
)
from phasor.ops.quantized.nf4 import NF4Matrix, quantize_nf4
from phasor.ops.quantized.nf4_dequantize import NF4_DEQUANTIZE
from phasor.ops.quantized.pack import pack_int4, prepare_int8
from phasor.ops.quantized.reference import (
    dequantize_int4_ref,
    dequantize_nf4_ref,
    dequantize_ref,
    int4_linear_ref,
    int8_embedding_ref,
    int8_linear_ref,
    nf4_linear_ref,
    quantize_int4_ref,
    quantize_int8_ref,
    quantize_nf4_ref,
)
from phasor.ops.quantized.updated import UPDATED_MATRIX, updated_matrix

__all__ = [
    "GROUP_SIZES",
    "NF4_DEQUANTIZE",
    "NF4_LINEAR",
    "QUANTIZED_LINEAR",
    "UPDATED_MATRIX",
    "FrozenMatrix",
    "Int4Matrix",
    "Int8Matrix",
    "Matrix",
    "NF4Matrix",
    "PackedInt4",
    "QuantizedMatrix",
    "dequantize",
    "dequantize_int4_ref",
    "dequantize_nf4_ref",
    "dequantize_ref",
    "frozen_linear",
    "int4_linear_ref",
    "int8_embedding_ref",
    "int8_linear_ref",
    "nf4_linear_ref",
    "pack_int4",
    "prepare_int8",
    "quantize_int4",
    "quantize_int4_ref",
    "quantize_int8",
    "quantize_int8_ref",
    "quantize_nf4",
    "quantize_nf4_ref",
    "quantized_embedding",
    "quantized_linear",
    "updated_matrix",
]
