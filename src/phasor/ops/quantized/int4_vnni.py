"""Products with 4-bit weights on x86 processors with VNNI instructions: `int4_vnni.cpp`, compiled on first use.

Every 32 elements of a row are rounded to 255 values by one scale, and multiplied with the weights as integers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.quantized.cpp import load_kernel
from phasor.ops.quantized.matrix import Int4Matrix, PackedInt4, nibbles_of

LANES = 16  # outputs of a block

torch.library.define(
    "phasor::int4_mm_vnni", "(Tensor x, Tensor weights, Tensor scales, int outputs, Tensor? bias) -> Tensor"
)
torch.library.register_fake(
    "phasor::int4_mm_vnni", lambda x, weights, scales, outputs, bias: x.new_empty(*x.shape[:-1], outputs)
)
multiply = torch.ops.phasor.int4_mm_vnni.default


def pack_int4_vnni(matrix: Int4Matrix) -> PackedInt4:
    """Weights `[N/16, K/8, 16, 4]` in uint8 and scales `[N/16, K/group, 16]`, outputs padded to a multiple of 16.

    >>> from phasor.ops.quantized import quantize_int4
    >>> packed = pack_int4_vnni(quantize_int4(torch.randn(20, 64)))
    >>> tuple(packed.weights.shape), tuple(packed.scales.shape)
    ((2, 8, 16, 4), (2, 2, 16))
    """
    padding = (0, 0, 0, -len(matrix.values) % LANES)
    nibbles = F.pad(nibbles_of(matrix.values), padding).unflatten(0, (-1, LANES)).unflatten(-1, (-1, 2, 4))
    weights = nibbles[..., 0, :] | nibbles[..., 1, :] << 4  # [N/16, 16, K/8, 4]
    scales = F.pad(matrix.kernel_scale, padding).unflatten(0, (-1, LANES))
    return PackedInt4(weights.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous())


def is_packed_for_vnni(packed: PackedInt4) -> bool:
    """Whether weights are laid out as `pack_int4_vnni` does it."""
    return packed.weights.dim() == 4


def int4_vnni(x: Tensor, matrix: Int4Matrix, bias: Tensor | None) -> Tensor:
    """The product of 4-bit weights and rows rounded to 8 bits."""
    load_kernel("int4_vnni")
    weights, scales, _ = matrix.packed or pack_int4_vnni(matrix)
    bias = None if bias is None else bias.float()
    y: Tensor = multiply(x.float().contiguous(), weights, scales, len(matrix.values), bias)
    return y.to(x.dtype)
