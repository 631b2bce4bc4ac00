"""Matrix products with quantized weights, and lookup of their rows.

With few rows, as in decoding, a product is bound by reading the weights, and CPU kernels read them as they are; those
of torch for x86 take the rows in bfloat16, and sum in float32. On an x86 processor with VNNI instructions, weights are
multiplied as integers: with few rows by our own kernels; with many, 8-bit ones, and 4-bit ones that are held in 8 bits
for that, by rows of activations rounded to 255 values each, in one operation where it was built. So they are on ARM:
4-bit ones by the KleidiAI kernel, 8-bit ones by our own. Elsewhere, with many rows, a product is bound by arithmetic,
and weights are converted for it. NF4 weights, and all products that are differentiated, are those of `frozen.py`.

The kernels that read int8 weights in a decoding step on a GPU are in `ops/decode`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import Dispatch, Path, forced_path, functional_transform_why_not, needs_grad
from phasor.ops.quantized.cpp import load_kernel
from phasor.ops.quantized.frozen import frozen_linear
from phasor.ops.quantized.int4_vnni import int4_vnni, is_packed_for_vnni
from phasor.ops.quantized.int8_neon import int8_neon
from phasor.ops.quantized.int8_vnni import int8_gemm_vnni, int8_vnni
from phasor.ops.quantized.matrix import INT8_MAX, Int4Matrix, Int8Matrix, Matrix, QuantizedMatrix, dequantize
from phasor.ops.quantized.nf4 import NF4Matrix
from phasor.ops.quantized.pack import (
    ARM,
    KLEIDIAI,
    VNNI,
    X86_KERNELS,
    int4_as_int8,
    pack_int4_kleidiai,
    pack_int4_x86,
)

# With more rows than these, other paths are faster.
MAX_ROWS = {"int4 vnni": 32, "int8 vnni": 4, "int4": 4, "int8": 4}
SMALLEST_STEP = 1e-30  # between the values that a row is rounded to, where it is all zeros
NOT_BUILT = "it was not built: no C++ compiler was found, or it failed"
INPUTS_MULTIPLE = 32  # the kernels have no code for what would be left over


def cpu_kernel_why_not(x: Tensor, max_rows: int | None = None) -> str | None:
    """Why no CPU kernel can take these rows."""
    if x.device.type != "cpu":
        return "the kernel is for CPUs"
    if forced_path() == "reference":
        return "the reference path is forced"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"{str(x.dtype)[6:]} has no kernel"
    if max_rows is not None and x.numel() > max_rows * x.shape[-1]:
        return f"with more than {max_rows} rows, other paths are faster"
    if needs_grad(x):
        return "the kernel has no derivative"
    return functional_transform_why_not()


def one_operation_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why integers are not multiplied in one operation."""
    reason = integers_why_not(x, matrix, bias)
    return NOT_BUILT if reason is None and not load_kernel("int8_vnni") else reason


def integers_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why integers are not multiplied."""
    if not VNNI:
        return "the processor has no VNNI instructions, which multiply 8-bit integers"
    return cpu_kernel_why_not(x)


def int4_vnni_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why the 4-bit kernel for VNNI is not taken."""
    if not isinstance(matrix, Int4Matrix):
        return "the weights are in 8 bits"
    if not VNNI:
        return "the processor has no VNNI instructions, which multiply 8-bit integers"
    reason = cpu_kernel_why_not(x, MAX_ROWS["int4 vnni"])
    if reason is not None:
        return reason
    built = load_kernel("int4_vnni") if matrix.packed is None else is_packed_for_vnni(matrix.packed)
    return None if built else NOT_BUILT


def int8_vnni_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why the 8-bit kernel for VNNI is not taken."""
    if not VNNI:
        return "the processor has no VNNI instructions, which multiply 8-bit integers"
    reason = int8_inputs_why_not(matrix) or cpu_kernel_why_not(x, MAX_ROWS["int8 vnni"])
    return NOT_BUILT if reason is None and not load_kernel("int8_vnni") else reason


def int4_x86_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why the 4-bit kernel for x86 is not taken."""
    if not isinstance(matrix, Int4Matrix):
        return "the weights are in 8 bits"
    if not X86_KERNELS:
        return "the processor has neither AVX2 nor AVX-512"
    if matrix.packed is not None and is_packed_for_vnni(matrix.packed):
        return "the weights are held as the kernel for VNNI reads them"
    return cpu_kernel_why_not(x, MAX_ROWS["int4"])


def int4_kleidiai_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why the 4-bit kernel for ARM is not taken."""
    if not isinstance(matrix, Int4Matrix):
        return "the weights are in 8 bits"
    if not KLEIDIAI:
        return "torch has no KleidiAI kernels here, which are for ARM processors"
    return cpu_kernel_why_not(x)


def int8_neon_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why our 8-bit kernel for ARM is not taken."""
    if not ARM:
        return "the processor is not an ARM one"
    reason = int8_inputs_why_not(matrix) or cpu_kernel_why_not(x)
    return NOT_BUILT if reason is None and not load_kernel("int8_neon") else reason


def int8_why_not(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> str | None:
    """Why the 8-bit kernel of torch is not taken."""
    if not (X86_KERNELS or ARM):
        return "the processor has neither AVX2 nor AVX-512, nor is it an ARM one"
    return int8_inputs_why_not(matrix) or cpu_kernel_why_not(x, MAX_ROWS["int8"])


def int8_inputs_why_not(matrix: QuantizedMatrix) -> str | None:
    """Why no 8-bit kernel can take this matrix."""
    if not isinstance(matrix, Int8Matrix):
        return "the weights are in 4 bits"
    if matrix.inputs % INPUTS_MULTIPLE:
        return f"{matrix.inputs} inputs are not a multiple of {INPUTS_MULTIPLE}"
    return None


@custom_op("phasor::int8_mm")
def int8_mm(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """`x W^T` by the 8-bit kernel: in bfloat16 on x86, where float32 has no vectorized one."""
    dtype = torch.bfloat16 if X86_KERNELS else x.dtype
    rows = x.reshape(-1, x.shape[-1]).to(dtype, copy=True)  # aligned, as the kernel needs it
    ones = torch.ones(len(values), dtype=dtype)  # scales would be rounded to that dtype
    y = torch.ops.aten._weight_int8pack_mm(rows, values, ones) * scale
    return y.view(*x.shape[:-1], len(values)).to(x.dtype)


int8_mm.register_fake(lambda x, values, scale: x.new_empty(*x.shape[:-1], len(values)))


def integers_of(matrix: QuantizedMatrix) -> Int8Matrix:
    """The matrix that products of 8-bit integers take."""
    if isinstance(matrix, Int8Matrix):
        return matrix
    return (None if matrix.packed is None else matrix.packed.integers) or int4_as_int8(matrix)


def multiply_in_one_operation(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """The product of 8-bit integers, to which each row of `x` is rounded."""
    return int8_gemm_vnni(x, integers_of(matrix), bias)


def multiply_integers(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """The same by operations of torch."""
    values, scale = integers_of(matrix)
    rows = x.reshape(-1, x.shape[-1]).float()
    step = rows.abs().amax(-1, keepdim=True).mul_(1 / INT8_MAX)
    integers = (rows / step.clamp(min=SMALLEST_STEP)).round_().to(torch.int8)
    y = torch._int_mm(integers, values.t()).mul(scale).mul_(step)
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], len(values))


def int4_x86(x: Tensor, matrix: Int4Matrix, bias: Tensor | None) -> Tensor:
    """The product by the 4-bit kernel for x86, in bfloat16."""
    weights, scales, _ = matrix.packed or pack_int4_x86(matrix)
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16, copy=True)  # aligned, as the kernel needs it
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weights, matrix.group_size, scales)
    y = y[:, : len(matrix.values)].float()
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def int4_kleidiai(x: Tensor, matrix: Int4Matrix, bias: Tensor | None) -> Tensor:
    """The product by the KleidiAI kernel, with rows rounded to 8 bits."""
    weights = (matrix.packed or pack_int4_kleidiai(matrix)).weights
    outputs, inputs = len(matrix.values), matrix.inputs
    rows = x.reshape(-1, inputs).float().contiguous()
    y = torch.ops.aten._dyn_quant_matmul_4bit(rows, weights, matrix.group_size, inputs, outputs)
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], outputs)


def int8_kernel(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """The product by `int8_mm`."""
    y: Tensor = int8_mm(x, matrix.values, matrix.scale)
    return y if bias is None else (y + bias).to(x.dtype)


def convert_and_multiply(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """The product with the weights in the dtype of `x`."""
    if isinstance(matrix, Int4Matrix) or x.dtype == torch.float16:  # in which sums of integers may exceed its range
        return F.linear(x, dequantize(matrix, x.dtype), bias)
    y = F.linear(x, matrix.values.to(x.dtype))
    y = y * matrix.scale  # in float32 or better
    return (y if bias is None else y + bias).to(x.dtype)


QUANTIZED_LINEAR = Dispatch(
    Path("4-bit kernel for VNNI", int4_vnni, int4_vnni_why_not),
    Path("4-bit kernel for x86, in bfloat16", int4_x86, int4_x86_why_not),
    Path("8-bit kernel for VNNI", int8_vnni, int8_vnni_why_not),
    Path("8-bit integers, in one operation", multiply_in_one_operation, one_operation_why_not),
    Path("8-bit integers", multiply_integers, integers_why_not),
    Path("4-bit KleidiAI kernel", int4_kleidiai, int4_kleidiai_why_not),
    Path("8-bit kernel for ARM", int8_neon, int8_neon_why_not),
    Path("8-bit kernel of torch", int8_kernel, int8_why_not),
    Path("converted layer by layer", convert_and_multiply),
)


def quantized_linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` for a quantized matrix or one in the dtype of `x`; under autocast in the dtype of autocast.

    >>> from phasor.ops.quantized import quantize_int8
    >>> x, weight = torch.randn(3, 64), torch.randn(8, 64)
    >>> matrix = quantize_int8(weight)
    >>> exact = F.linear(x, dequantize(matrix, torch.float32))
    >>> bool((quantized_linear(x, matrix) - exact).norm() < 0.01 * exact.norm())
    True
    >>> bool((quantized_linear(x, matrix) - F.linear(x, weight)).norm() < 0.02 * F.linear(x, weight).norm())
    True
    """
    if isinstance(matrix, Tensor):
        return F.linear(x, matrix, bias)
    if isinstance(matrix, NF4Matrix):
        return frozen_linear(x, matrix, bias)
    if x.shape[-1] != matrix.inputs:
        raise ValueError(f"rows of {x.shape[-1]} elements do not fit a quantized matrix of {matrix.inputs} inputs")
    kind = x.device.type
    x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    y: Tensor = QUANTIZED_LINEAR(x, matrix, bias)
    return y


def quantized_embedding(tokens: Tensor, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Rows of a quantized matrix, in a floating-point dtype.

    >>> from phasor.ops.quantized import quantize_int8
    >>> table = quantize_int8(torch.tensor([[127.0, 0.0], [254.0, -2.0]]))
    >>> quantized_embedding(torch.tensor([1, 0]), table, torch.float32).tolist()
    [[254.0, -2.0], [127.0, 0.0]]
    """
    index = tokens.flatten()
    rows = type(matrix)(F.embedding(index, matrix.values), matrix.scale[index])
    return dequantize(rows, dtype).unflatten(0, tokens.shape)
