"""4-bit weights as the CPU kernels read them, and the kernel that 8-bit ones need."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.quantized.cpp import load_kernel
from phasor.ops.quantized.int4_vnni import pack_int4_vnni
from phasor.ops.quantized.matrix import Int4Matrix, Int8Matrix, PackedInt4, dequantize, nibbles_of, quantize_int8

OUTPUTS_MULTIPLE = 16  # of the x86 kernel


# What the processor has: kernels of torch for x86 that are vectorized, instructions for products of 8-bit integers, the
# KleidiAI kernels for ARM, and ARM at all.
X86_KERNELS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
VNNI = bool(torch.cpu._is_vnni_supported()) and torch.backends.mkldnn.is_available()
KLEIDIAI = bool(torch.backends.kleidiai.is_available())
ARM = platform.machine() in ("aarch64", "arm64")


def pack_int4(matrix: Int4Matrix) -> PackedInt4 | None:
    """The weights as the kernel of this machine reads them; None where there is no kernel.

    >>> from phasor.ops.quantized import quantize_int4
    >>> packed = pack_int4(quantize_int4(torch.randn(16, 64)))
    >>> packed is not None or not (X86_KERNELS or KLEIDIAI)
    True
    """
    if matrix.values.device.type != "cpu":
        return None
    if KLEIDIAI:
        return pack_int4_kleidiai(matrix)
    if not X86_KERNELS:
        return None
    if not VNNI:
        return pack_int4_x86(matrix)
    load_kernel("int8_vnni")  # for many rows
    packed = pack_int4_vnni(matrix) if load_kernel("int4_vnni") else pack_int4_x86(matrix)
    return packed._replace(integers=int4_as_int8(matrix))


def prepare_int8(values: Tensor) -> None:
    """Load our kernels for 8-bit weights, where this machine takes them: a function cannot while it is being compiled.

    >>> prepare_int8(torch.zeros(2, 32, dtype=torch.int8))
    """
    if values.device.type == "cpu":
        if ARM:
            load_kernel("int8_neon")
        elif VNNI:
            load_kernel("int8_vnni")


def pack_int4_kleidiai(matrix: Int4Matrix) -> PackedInt4:
    """For the KleidiAI kernel, scales included."""
    given = matrix.values, matrix.kernel_scale, None, matrix.group_size, matrix.inputs, len(matrix.values)
    return PackedInt4(torch.ops.aten._dyn_quant_pack_4bit_weight(*given), None)


def pack_int4_x86(matrix: Int4Matrix) -> PackedInt4:
    """For the x86 kernel: scales and zeros are `[K/group, N, 2]`, and N is a multiple of 16."""
    padding = (0, 0, 0, -len(matrix.values) % OUTPUTS_MULTIPLE)
    nibbles = F.pad(nibbles_of(matrix.values).to(torch.int32), padding)
    scale = F.pad(matrix.kernel_scale, padding).T
    scales = torch.stack([scale, torch.zeros_like(scale)], dim=-1)
    return PackedInt4(torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1), scales)


def int4_as_int8(matrix: Int4Matrix) -> Int8Matrix:
    """For products of 8-bit integers: rounded once more, to the 255 values of a row.

    >>> from phasor.ops.quantized import quantize_int4
    >>> matrix = quantize_int4(torch.randn(16, 64))
    >>> exact = dequantize(matrix, torch.float32)
    >>> bool((dequantize(int4_as_int8(matrix), torch.float32) - exact).norm() < 0.01 * exact.norm())
    True
    """
    return quantize_int8(dequantize(matrix, torch.float32))
