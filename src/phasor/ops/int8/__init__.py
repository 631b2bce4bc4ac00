"""Weights in int8 with one scale per output: quantization, matrix products, embedding lookup, references."""

from phasor.ops.int8.int8 import Int8Matrix, Matrix, dequantize, int8_embedding, int8_linear, quantize_int8
from phasor.ops.int8.reference import dequantize_ref, int8_embedding_ref, int8_linear_ref, quantize_int8_ref

__all__ = [
    "Int8Matrix",
    "Matrix",
    "dequantize",
    "dequantize_ref",
    "int8_embedding",
    "int8_embedding_ref",
    "int8_linear",
    "int8_linear_ref",
    "quantize_int8",
    "quantize_int8_ref",
]
