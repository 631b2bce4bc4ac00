"""Formats of quantized weights: which tensors of a file make one weight, and the function that gives it back.

What is stored is multiplied by its scales in float32 and rounded once, to the dtype in which a format's own
implementation has its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import ceil, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from phasor.checkpoints.tensors import TYPES, Tensors
from phasor.config.text_files import from_json
from phasor.models.fields import Fields, json_repr
from phasor.ops.quantized.nf4 import block_scales, look_up

FLOAT8, INT8 = "F8_E4M3", "I8"
# Ends of tensors that quantized activations and caches need, and weights do not.
ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale", ".input_zero_point", ".k_scale", ".v_scale")


class StoredWeight:
    """The stored tensors of one weight, by the ends of their names; "" is that of a tensor with the weight's name."""

    def __init__(self, tensors: Tensors, names: dict[str, str]) -> None:
        self.tensors, self.names = tensors, names

    def __contains__(self, end: str) -> bool:
        return end in self.names

    def shape(self, end: str) -> tuple[int, ...]:
        return Tensors.shape(self.tensors, self.names[end])

    def dtype(self, end: str) -> str:
        return Tensors.dtype(self.tensors, self.names[end])

    def get(self, end: str) -> Tensor:
        return Tensors.get(self.tensors, self.names[end])

    def scales(self, end: str) -> Tensor:
        """Scales, in float32; they have to be finite."""
        scales = self.get(end).float()
        if not scales.isfinite().all():
            raise ValueError(f"{self.names[end]} has scales that are not finite")
        return scales

    def group_index(self, end: str, groups: int) -> Tensor:
        """Which group of scales each input has."""
        index = self.get(end).long()
        if not ((index >= 0) & (index < groups)).all():
            raise ValueError(f"{self.names[end]} counts groups outside of 0 to {groups - 1}")
        return index

    def expect(self, end: str, types: Collection[str], shape: tuple[int, ...] | None = None) -> None:
        """Refuse a tensor of another dtype, or of another shape where one is given."""
        name, found = self.names[end], self.shape(end)
        if self.dtype(end) not in types:
            raise ValueError(f"{name} is stored as {self.dtype(end)}, not {' or '.join(types)}")
        if shape is not None and found != shape:
            raise ValueError(f"{name} has the shape {list(found)}, not {list(shape)}")

    def matrix(self, end: str) -> tuple[int, int]:
        """The shape of a matrix."""
        if len(self.shape(end)) != 2:
            raise ValueError(f"{self.names[end]} has the shape {list(self.shape(end))}, which is not that of a matrix")
        rows, columns = self.shape(end)
        return rows, columns

    def block(self, end: str, weight: tuple[int, ...], known: Iterable[tuple[int, int] | None]) -> tuple[int, int]:
        """The rows and columns of a weight for which scales have one element: those of a block that is known, of a
        tensor, or of groups in a row.
        """
        found = self.shape(end)
        grid = found if len(found) > 1 else (prod(found), 1)
        if len(weight) > 1:
            rows, columns = weight[-2:]
            whole, group = (rows, columns), (1, max(1, columns // max(1, grid[-1])))
            if prod(found) == 1:
                return whole
            for block in (*known, whole, group):
                if block and grid == (*weight[:-2], ceil(rows / block[0]), ceil(columns / block[1])):
                    return min(block[0], rows), min(block[1], columns)
        raise ValueError(f"{self.names[end]} has the shape {list(found)}, which fits no blocks of {list(weight)}")


class Grid(NamedTuple):
    """Elements `[..., rows, columns]`, with one scale for every block of them, and perhaps one zero point."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None

    def per_element(self, grid: Tensor) -> Tensor:
        """Scales or zero points, one for every element; the last blocks may be cut off."""
        rows, columns = self.values.shape[-2:]
        by_row = repeat_elements(as_matrix(grid).float(), self.block[0], -2, rows)
        return repeat_elements(by_row, self.block[1], -1, columns)

    def elements(self) -> Tensor:
        """Elements, less their zero points, in float32."""
        values = self.values.float()
        return values if self.zeros is None else values - self.per_element(self.zeros)

    def dequantize(self) -> Tensor:
        """Elements times their scales.

        >>> Grid(torch.ones(1, 3), torch.tensor([[2.0, 5.0]]), (1, 2)).dequantize().tolist()
        [[2.0, 2.0, 5.0]]
        """
        return self.elements() * self.per_element(self.scales)


class Format:
    """A way in which weights are stored.

    `ends` are the ends of the names of stored tensors, and the end that the name of their weight has instead; `unused`
    are ends of tensors that say nothing about weights.
    """

    method: ClassVar[str]
    ends: ClassVar[dict[str, str]]
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, fields: Fields) -> None:
        """Read what the configuration says; what is not known is refused."""

    def requirements(self, parts: StoredWeight) -> Sequence[str]:
        """The ends of tensors that cannot be missing, by those that are there."""
        return list(self.ends)

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        """The shape of a weight and its dtype, as safetensors names it; tensors that do not go together are refused."""
        raise NotImplementedError(f"{type(self).__name__} does not describe its weights")

    def grid(self, parts: StoredWeight) -> Grid | None:
        """A weight as elements and scales; None where it is stored in another way."""
        return None

    def dequantize(self, parts: StoredWeight) -> Tensor:
        """A weight, in float32 or its own dtype."""
        grid = self.grid(parts)
        assert grid is not None, f"{type(self).__name__} does not dequantize"
        return grid.dequantize()


class FP8(Format):
    """float8 with one scale per block, row or tensor, as DeepSeek V3 and Qwen3 are published."""

    method = "fp8"
    ends: ClassVar = {"_scale_inv": "", ".weight_scale": ".weight"}
    unused = ACTIVATIONS

    def __init__(self, fields: Fields) -> None:
        self.block = block_field(fields, "weight_block_size", [128, 128])
        fields.expect("expert_dtype", "fp8")
        fields.expect("fmt", "e4m3", "float8_e4m3fn")

    def requirements(self, parts: StoredWeight) -> Sequence[str]:
        return ("", self.scale(parts))

    def scale(self, parts: StoredWeight) -> str:
        return next(end for end in self.ends if end in parts)

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        end, shape = self.scale(parts), parts.shape("")
        parts.expect("", (FLOAT8,))
        parts.expect(end, (*TYPES, "F8_E8M0"))
        parts.block(end, shape, [self.block])
        return shape, "F32"

    def grid(self, parts: StoredWeight) -> Grid:
        end = self.scale(parts)
        return Grid(parts.get(""), parts.scales(end), parts.block(end, parts.shape(""), [self.block]))


class CompressedTensors(Format):
    """float8, int8 or packed int4 and int8, with scales per tensor, row, group or block and perhaps zero points."""

    method = "compressed-tensors"
    ends = dict.fromkeys(
        (".weight_scale", ".weight_zero_point", ".weight_packed", ".weight_shape", ".weight_g_idx"), ".weight"
    )
    unused = ACTIVATIONS
    formats = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense")

    def __init__(self, fields: Fields) -> None:
        fields.expect("format", *self.formats)
        fields.inside(fields.get("sparsity_config", {}), f"{fields.prefix}sparsity_config.").expect("format", "dense")
        if fields.get("transform_config", {}):
            raise ValueError(f"{fields.file}: phasor does not honor {fields.prefix}transform_config; it must be empty")
        self.blocks = []
        for name, group in fields.get("config_groups", {}).items():
            if not isinstance(group, dict):  # the name of a preset
                continue
            inner = fields.inside(group, f"{fields.prefix}config_groups.{name}.")
            inner.expect("format", *self.formats)
            weights = inner.inside(inner.get("weights", {}), f"{inner.prefix}weights.")
            weights.expect("num_bits", 8, 4)
            weights.expect("type", "int", "float")
            weights.expect("strategy", "tensor", "channel", "group", "block")
            self.blocks.append(block_field(weights, "block_structure", None))

    def requirements(self, parts: StoredWeight) -> Sequence[str]:
        packed = ".weight_packed" in parts or ".weight_shape" in parts
        return (".weight_scale", ".weight_packed", ".weight_shape") if packed else (".weight_scale", "")

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        scale, zero, index = ".weight_scale", ".weight_zero_point", ".weight_g_idx"
        if ".weight_packed" in parts:
            parts.expect(".weight_packed", ("I32",))
            parts.expect(".weight_shape", ("I64", "I32"), (2,))
            self.bits(parts)
        else:
            parts.expect("", (FLOAT8, INT8))
        shape = self.shape(parts)
        parts.expect(scale, TYPES)
        parts.block(scale, shape, self.blocks)
        if zero in parts and parts.dtype(zero) == "I32" and ".weight_packed" in parts:
            parts.expect(zero, ("I32",), (ceil(shape[0] * self.bits(parts) / 32), parts.matrix(scale)[1]))
        elif zero in parts:
            parts.expect(zero, (INT8, FLOAT8), parts.shape(scale))
        if index in parts:
            parts.expect(index, ("I32", "I64"), shape[1:])
        return shape, parts.dtype(scale)

    def shape(self, parts: StoredWeight) -> tuple[int, ...]:
        return tuple(parts.get(".weight_shape").tolist()) if ".weight_packed" in parts else parts.shape("")

    def bits(self, parts: StoredWeight) -> int:
        """How many bits a packed element has, by the shapes."""
        found, (rows, columns) = parts.matrix(".weight_packed"), self.shape(parts)
        for bits in (4, 8):
            if found == (rows, ceil(columns * bits / 32)):
                return bits
        name = parts.names[".weight_packed"]
        raise ValueError(f"{name} has the shape {list(found)}, which holds no {[rows, columns]} in 4 or 8 bits")

    def grid(self, parts: StoredWeight) -> Grid:
        shape, scales = self.shape(parts), as_matrix(parts.scales(".weight_scale"))
        zero, index, packed = ".weight_zero_point", ".weight_g_idx", ".weight_packed"
        zeros = as_matrix(parts.get(zero)) if zero in parts else torch.zeros_like(scales)
        values = parts.get(packed if packed in parts else "")
        if packed in parts:
            bits = self.bits(parts)
            values = unpack(values, bits)[:, : shape[1]] - (1 << bits - 1)
            if zeros.dtype == torch.int32:  # packed along the outputs
                zeros = unpack(zeros.T, bits)[:, : shape[0]].T - (1 << bits - 1)
        if index in parts and not (parts.get(index) == -1).all():  # -1 where groups are in order
            group = parts.group_index(index, scales.shape[1])
            return Grid(values, scales[:, group], (1, 1), zeros[:, group])
        return Grid(values, scales, parts.block(".weight_scale", shape, self.blocks), zeros)


class GPTQ(Format):
    """2, 4 or 8 bits packed along the inputs, with scales and zero points per group of inputs, in any order."""

    method = "gptq"
    ends = dict.fromkeys((".qweight", ".qzeros", ".scales", ".g_idx"), ".weight")

    def __init__(self, fields: Fields) -> None:
        fields.expect("bits", 4, 8, 2)
        self.bits = int(fields.get("bits", 4))
        fields.expect("is_marlin_format", False)
        fields.expect("pack_dtype", "int32")
        version = "checkpoint_format" if "checkpoint_format" in fields else "format"
        fields.expect(version, "gptq", "gptq_v2")
        self.offset = int(fields.get(version, "gptq") == "gptq")  # the first version stores zero points less one

    def requirements(self, parts: StoredWeight) -> Sequence[str]:
        return (".qweight", ".qzeros", ".scales")

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        per_word = 32 // self.bits
        (words, columns), (groups, _) = parts.matrix(".qweight"), parts.matrix(".scales")
        rows = words * per_word
        parts.expect(".qweight", ("I32",))
        parts.expect(".scales", TYPES, (groups, columns))
        parts.expect(".qzeros", ("I32",), (groups, ceil(columns / per_word)))
        if ".g_idx" in parts:
            parts.expect(".g_idx", ("I32", "I64"), (rows,))
        else:
            check_groups(parts, groups, rows)
        return (columns, rows), parts.dtype(".scales")

    def grid(self, parts: StoredWeight) -> Grid:
        scales = parts.scales(".scales").T  # [out, groups]
        values = unpack(parts.get(".qweight").T, self.bits)
        zeros = unpack(parts.get(".qzeros"), self.bits)[:, : len(scales)].T + self.offset
        if ".g_idx" not in parts:
            return Grid(values, scales, (1, values.shape[1] // scales.shape[1]), zeros)
        group = parts.group_index(".g_idx", scales.shape[1])
        return Grid(values, scales[:, group], (1, 1), zeros[:, group])


class AWQ(Format):
    """4 bits packed along the outputs, interleaved, with scales and zero points per group of inputs."""

    method = "awq"
    ends = dict.fromkeys((".qweight", ".qzeros", ".scales"), ".weight")
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the outputs are: it holds them as 0 2 4 6 1 3 5 7

    def __init__(self, fields: Fields) -> None:
        fields.expect("bits", 4)
        fields.expect("version", "gemm", "GEMM")
        fields.expect("format", "gemm")

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        (rows, words), (groups, _) = parts.matrix(".qweight"), parts.matrix(".scales")
        parts.expect(".qweight", ("I32",))
        parts.expect(".scales", TYPES, (groups, words * 8))
        parts.expect(".qzeros", ("I32",), (groups, words))
        check_groups(parts, groups, rows)
        return (words * 8, rows), parts.dtype(".scales")

    def grid(self, parts: StoredWeight) -> Grid:
        values, zeros = (
            unpack(parts.get(end), 4).unflatten(-1, (-1, 8))[..., list(self.order)].flatten(-2).T
            for end in (".qweight", ".qzeros")
        )
        scales = parts.scales(".scales").T
        return Grid(values, scales, (1, values.shape[1] // scales.shape[1]), zeros)


class BitsAndBytes(Format):
    """int8 with a scale per row, or 4 bits that index a table (NF4, FP4) with a scale per block, perhaps in 8 bits."""

    method = "bitsandbytes"
    step = 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it
    tables = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    states = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
    ends = {f".weight{end}": ".weight" for end in (*tables, *states)} | {".SCB": ".weight", ".weight_format": ".weight"}

    def requirements(self, parts: StoredWeight) -> Sequence[str]:
        if ".SCB" in parts or ".weight_format" in parts:
            return ("", ".SCB")
        nested = [end for end in self.tables[2:] if ".weight.nested_absmax" in parts or f".weight{end}" in parts]
        state = next((end for end in self.states if f".weight{end}" in parts), self.states[0])
        return ("", *(f".weight{end}" for end in (*self.tables[:2], *nested, state)))

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        if ".SCB" in parts:
            parts.expect("", (INT8,))
            parts.expect(".SCB", ("F32",), parts.shape("")[:1])
            if ".weight_format" in parts and parts.get(".weight_format").any():
                raise ValueError(f"{parts.names['.weight_format']} says that rows are not one after another")
            return parts.shape(""), "F32"
        state = self.state(parts)
        stored = parts.get("").element_size() * prod(parts.shape(""))
        if stored != ceil(prod(state["shape"]) / 2):
            raise ValueError(f"{parts.names['']} has {stored} bytes, which hold no {state['shape']} in 4 bits")
        blocks = ceil(prod(state["shape"]) / state["blocksize"])
        parts.expect(".weight.quant_map", ("F32",), (16,))
        if ".weight.nested_absmax" in parts:
            parts.expect(".weight.absmax", ("U8",), (blocks,))
            parts.expect(".weight.nested_quant_map", ("F32",), (256,))
            parts.expect(".weight.nested_absmax", ("F32",), (ceil(blocks / state["nested_blocksize"]),))
        else:
            parts.expect(".weight.absmax", ("F32",), (blocks,))
        return tuple(state["shape"]), {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[state["dtype"]]

    def state(self, parts: StoredWeight) -> dict[str, Any]:
        """The sizes of a weight in 4 bits, which a tensor holds as JSON."""
        end = next(f".weight{end}" for end in self.states if f".weight{end}" in parts)
        try:
            state = from_json(bytes(parts.get(end).tolist()).decode(), parts.names[end])
            sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
            valid = all(type(size) is int and size > 0 for size in sizes) and len(state["shape"]) == 2
            valid &= state["dtype"] in ("float32", "float16", "bfloat16")
            valid &= ".weight.nested_absmax" not in parts or isinstance(state["nested_offset"], float | int)
        except (ValueError, KeyError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise ValueError(f"{parts.names[end]} holds no JSON with a matrix's shape, blocksize and dtype")
        return state

    def grid(self, parts: StoredWeight) -> Grid | None:
        if ".SCB" not in parts:
            return None
        return Grid(parts.get(""), parts.scales(".SCB") * self.step, (1, parts.shape("")[1]))

    def dequantize(self, parts: StoredWeight) -> Tensor:
        if ".SCB" in parts:
            return parts.get("") * parts.scales(".SCB")[:, None] * self.step
        state = self.state(parts)
        absmax, size = parts.get(".weight.absmax"), prod(state["shape"])
        if ".weight.nested_absmax" in parts:
            nested, code = parts.scales(".weight.nested_absmax"), parts.get(".weight.nested_quant_map")
            absmax = block_scales(absmax, nested, state["nested_offset"], code, state["nested_blocksize"])
        else:
            absmax = parts.scales(".weight.absmax")
        stored = parts.get("").flatten().view(torch.uint8)
        elements = look_up(stored, parts.get(".weight.quant_map"), absmax, state["blocksize"])
        return elements[:size].view(state["shape"])


class MXFP4(Format):
    """Blocks of 32 elements of four bits with one exponent each, as gpt-oss is published; bfloat16 holds them exactly.

    Blocks lie `[experts, out, blocks, 16]`, two elements a byte; the weight is `[experts, in, out]`.
    """

    method = "mxfp4"
    ends: ClassVar = {"_blocks": "", "_scales": ""}
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of what three bits count; the fourth is the sign
    bias = 127  # of the exponents

    def describe(self, parts: StoredWeight) -> tuple[tuple[int, ...], str]:
        experts, rows, blocks = (*parts.shape("_scales"), 0, 0, 0)[:3]
        parts.expect("_scales", ("U8",), (experts, rows, blocks))
        parts.expect("_blocks", ("U8",), (experts, rows, blocks, 16))
        return (experts, blocks * 32, rows), "BF16"

    def dequantize(self, parts: StoredWeight) -> Tensor:
        table = torch.tensor([*self.magnitudes, *(-x for x in self.magnitudes)], dtype=torch.bfloat16, device="cpu")
        weight = []
        for blocks, scales in zip(parts.get("_blocks"), parts.get("_scales"), strict=True):
            numbers = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # the low half comes first
            weight.append(torch.ldexp(table[numbers.int()], scales.int()[..., None] - self.bias).flatten(-2).T)
        return torch.stack(weight)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The unsigned elements of integers of 32 bits `[..., n]`, the lowest bits first: `[..., n * 32 / bits]`.

    >>> unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def repeat_elements(grid: Tensor, size: int, dim: int, length: int) -> Tensor:
    """Repeat each element of a grid `size` times along a dimension, up to a length."""
    return grid.repeat_interleave(min(size, length), dim).narrow(dim, 0, length)


def as_matrix(scales: Tensor) -> Tensor:
    """Scales of a tensor or of its rows as a matrix of one column."""
    return scales if scales.dim() > 1 else scales.reshape(-1, 1)


def check_groups(parts: StoredWeight, groups: int, inputs: int) -> None:
    """Refuse scales of groups that are not of one size."""
    if groups == 0 or inputs % groups:
        raise ValueError(f"{parts.names['.scales']} has {groups} groups, which do not divide {inputs} inputs")


def block_field(fields: Fields, name: str, default: list[int] | None) -> tuple[int, int] | None:
    """The rows and columns of a block, by a field."""
    value = fields.raw(name, default)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"{fields.file}: {fields.prefix}{name} must be two positive integers, not {json_repr(value)}")
    return value[0], value[1]


FORMATS: dict[str, type[Format]] = {
    kind.method: kind for kind in (FP8, CompressedTensors, GPTQ, AWQ, BitsAndBytes, MXFP4)
}
