"""Quantized weights made at random, element by element, by the published description of each format.

Each packer takes a shape `[out, in]` and gives the tensors that a file has for a weight, by the ends of their names,
and the weight that they stand for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634]
NF4 += [0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
FP4 += [-x for x in FP4]


class Packed(NamedTuple):
    stored: dict[str, Tensor]
    weight: Tensor


class Case(NamedTuple):
    """A format: its quantization_config, the dtype of the model, and what makes a weight."""

    config: dict[str, Any]
    dtype: torch.dtype
    pack: Callable[[random.Random, int, int], Packed]


def scales(rng: random.Random, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[rng.uniform(0.005, 0.02) for _ in range(columns)] for _ in range(rows)], dtype=dtype)


def matrix(rows: int, columns: int, element: Callable[[int, int], float], dtype: torch.dtype) -> Tensor:
    """A matrix by its elements: each is exact in float64, and rounded once."""
    values = [[element(i, j) for j in range(columns)] for i in range(rows)]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def integers(rng: random.Random, rows: int, columns: int, low: int, high: int) -> list[list[int]]:
    return [[rng.randint(low, high) for _ in range(columns)] for _ in range(rows)]


def words(values: list[int], bits: int) -> list[int]:
    """Integers of 32 bits that hold unsigned values, the first in the lowest bits; the last one may be half empty."""
    found = []
    for start in range(0, len(values), 32 // bits):
        word = sum(value << (bits * i) for i, value in enumerate(values[start : start + 32 // bits]))
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def by_rows(values: list[list[int]], bits: int) -> Tensor:
    return torch.tensor([words(row, bits) for row in values], dtype=torch.int32)


def by_columns(values: list[list[int]], bits: int) -> Tensor:
    return by_rows([list(column) for column in zip(*values, strict=True)], bits).T.contiguous()


def e4m3(byte: int) -> float:
    """The value of a float8: four bits of exponent with a bias of 7, three of mantissa, no infinities."""
    sign, exponent, mantissa = -1 if byte >> 7 else 1, (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def float8(rng: random.Random, rows: int, columns: int) -> tuple[list[list[int]], Tensor]:
    stored = [[rng.choice([b for b in range(256) if b & 127 < 96]) for _ in range(columns)] for _ in range(rows)]
    return stored, torch.tensor(stored, dtype=torch.uint8).view(torch.float8_e4m3fn)


def fp8(height: int, width: int, end: str = "weight_scale_inv", shape: tuple[int, ...] | None = None) -> Any:
    def pack(rng: random.Random, rows: int, columns: int) -> Packed:
        high, wide = min(height, rows), min(width, columns)
        numbers, stored = float8(rng, rows, columns)
        scale = scales(rng, -(-rows // high), -(-columns // wide), torch.float32)
        # The product is rounded to float32 before it is rounded to the dtype of the model.
        weight = matrix(
            rows, columns, lambda i, j: e4m3(numbers[i][j]) * float(scale[i // high, j // wide]), torch.float32
        )
        return Packed({"weight": stored, end: scale if shape is None else scale.view(shape)}, weight)

    return pack


def compressed_float(strategy: str) -> Any:
    def pack(rng: random.Random, rows: int, columns: int) -> Packed:
        numbers, stored = float8(rng, rows, columns)
        scale = scales(rng, rows if strategy == "channel" else 1, 1, torch.bfloat16)
        weight = matrix(rows, columns, lambda i, j: e4m3(numbers[i][j]) * float(scale[i % len(scale), 0]), scale.dtype)
        given = scale if strategy == "channel" else scale[0]
        return Packed({"weight": stored, "weight_scale": given, "input_scale": torch.ones(1)}, weight)

    return pack


def compressed_int8(symmetric: bool) -> Any:
    def pack(rng: random.Random, rows: int, columns: int) -> Packed:
        values, zeros = integers(rng, rows, columns, -128, 127), integers(rng, rows, 1, -128, 127)
        zeros = [[0]] * rows if symmetric else zeros
        scale = scales(rng, rows, 1, torch.bfloat16)
        weight = matrix(rows, columns, lambda i, j: (values[i][j] - zeros[i][0]) * float(scale[i, 0]), scale.dtype)
        stored = {"weight": torch.tensor(values, dtype=torch.int8), "weight_scale": scale}
        zero = {} if symmetric else {"weight_zero_point": torch.tensor(zeros, dtype=torch.int8)}
        return Packed(stored | zero, weight)

    return pack


def compressed_packed(bits: int, group: int, symmetric: bool, order: bool = False) -> Any:
    def pack(rng: random.Random, rows: int, columns: int) -> Packed:
        groups, half = columns // group, 1 << (bits - 1)
        values = integers(rng, rows, columns, -half, half - 1)
        zeros = integers(rng, rows, groups, 0, 0) if symmetric else integers(rng, rows, groups, -half, half - 1)
        scale, index = scales(rng, rows, groups, torch.bfloat16), [j // group for j in range(columns)]
        if order:
            rng.shuffle(index)
        weight = matrix(
            rows,
            columns,
            lambda i, j: (values[i][j] - zeros[i][index[j]]) * float(scale[i, index[j]]),
            scale.dtype,
        )
        stored = {"weight_packed": by_rows([[value + half for value in row] for row in values], bits)}
        stored |= {"weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
        if not symmetric:
            stored["weight_zero_point"] = by_columns([[zero + half for zero in row] for row in zeros], bits)
        return Packed(stored | ({"weight_g_idx": torch.tensor(index, dtype=torch.int32)} if order else {}), weight)

    return pack


def gptq(bits: int, group: int | None, version: int, order: bool, symmetric: bool = False) -> Any:
    def pack(rng: random.Random, rows: int, columns: int) -> Packed:
        groups = 1 if group is None else columns // group
        values = integers(rng, columns, rows, 0, 2**bits - 1)
        zeros = integers(rng, groups, rows, 1, 2**bits - 1)
        zeros = [[1 << bits - 1] * rows] * groups if symmetric else zeros
        scale, index = scales(rng, groups, rows, torch.float16), [j * groups // columns for j in range(columns)]
        if order:
            rng.shuffle(index)
        weight = matrix(
            rows,
            columns,
            lambda i, j: (values[j][i] - zeros[index[j]][i]) * float(scale[index[j], i]),
            scale.dtype,
        )
        less = 1 if version == 1 else 0
        stored = {"qweight": by_columns(values, bits), "scales": scale}
        stored["qzeros"] = by_rows([[zero - less for zero in row] for row in zeros], bits)
        return Packed(stored | ({"g_idx": torch.tensor(index, dtype=torch.int32)} if group else {}), weight)

    return pack


def awq(rng: random.Random, rows: int, columns: int, group: int = 16, symmetric: bool = False) -> Packed:
    values, zeros = integers(rng, columns, rows, 0, 15), integers(rng, columns // group, rows, 0, 15)
    zeros = [[8] * rows] * (columns // group) if symmetric else zeros
    scale = scales(rng, columns // group, rows, torch.float16)
    weight = matrix(
        rows, columns, lambda i, j: (values[j][i] - zeros[j // group][i]) * float(scale[j // group, i]), scale.dtype
    )

    def ordered(row: list[int]) -> list[int]:
        return [row[start + place] for start in range(0, len(row), 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]

    packed = (by_rows([ordered(row) for row in each], 4) for each in (values, zeros))
    return Packed(dict(zip(("qweight", "qzeros"), packed, strict=True)) | {"scales": scale}, weight)


def four_bits(table: list[float], kind: str, nested: bool) -> Any:
    def pack(rng: random.Random, rows: int, columns: int) -> Packed:
        size, block, outer = rows * columns, 64, 4
        values, blocks = [rng.randrange(16) for _ in range(size)], -(-size // block)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
        code = np.array(table, dtype=np.float32)
        if nested:
            absmax = torch.tensor([rng.randrange(256) for _ in range(blocks)], dtype=torch.uint8)
            spread = np.array([rng.uniform(-0.1, 0.1) for _ in range(256)], dtype=np.float32)
            most = np.array([rng.uniform(0.1, 0.2) for _ in range(-(-blocks // outer))], dtype=np.float32)
            state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.0625}
            scale = [spread[int(absmax[i])] * most[i // outer] + np.float32(0.0625) for i in range(blocks)]
            tables = {"absmax": absmax, "nested_absmax": torch.tensor(most), "nested_quant_map": torch.tensor(spread)}
        else:
            scale = list(np.array([rng.uniform(0.1, 0.2) for _ in range(blocks)], dtype=np.float32))
            tables = {"absmax": torch.tensor(np.array(scale))}
        weight = matrix(
            rows,
            columns,
            lambda i, j: float(code[values[i * columns + j]] * scale[(i * columns + j) // block]),
            torch.bfloat16,
        )
        pairs = [(values[i] << 4) | values[i + 1] for i in range(0, size, 2)]
        stored = {"weight": torch.tensor(pairs, dtype=torch.uint8)[:, None], "weight.quant_map": torch.tensor(code)}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored |= {f"weight.{name}": tensor for name, tensor in tables.items()}
        return Packed(stored | {f"weight.quant_state.bitsandbytes__{kind}": text}, weight)

    return pack


def eight_bits(rng: random.Random, rows: int, columns: int) -> Packed:
    values = integers(rng, rows, columns, -127, 127)
    most = np.array([rng.uniform(0.5, 2.0) for _ in range(rows)], dtype=np.float32)
    seventh = np.float32(7.874015718698502e-3)
    weight = matrix(rows, columns, lambda i, j: float(np.float32(values[i][j]) * most[i] * seventh), torch.float32)
    stored = {"weight": torch.tensor(values, dtype=torch.int8), "SCB": torch.tensor(most)}
    return Packed(stored | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, weight)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 12]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
WHOLE = 10**6
CASES = {
    "fp8 by blocks": Case(BLOCKS, torch.bfloat16, fp8(16, 12)),
    "fp8 by tensors": Case(PER_TENSOR | {"weight_block_size": None}, torch.bfloat16, fp8(WHOLE, WHOLE, shape=())),
    "fp8 with weight_scale": Case(PER_TENSOR, torch.float16, fp8(WHOLE, WHOLE, "weight_scale", (1,))),
    "float-quantized by rows": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        torch.bfloat16,
        compressed_float("channel"),
    ),
    "float-quantized by tensors": Case(
        compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
        torch.bfloat16,
        compressed_float("tensor"),
    ),
    "int-quantized": Case(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), torch.bfloat16, compressed_int8(False)
    ),
    "pack-quantized": Case(compressed("pack-quantized", **INT4), torch.bfloat16, compressed_packed(4, 16, True)),
    "pack-quantized with zero points": Case(
        compressed("pack-quantized", **INT4, symmetric=False), torch.bfloat16, compressed_packed(4, 16, False)
    ),
    "pack-quantized in 8 bits": Case(
        compressed("pack-quantized", **INT4 | {"num_bits": 8}), torch.bfloat16, compressed_packed(8, 16, False)
    ),
    "pack-quantized in order of activations": Case(
        compressed("pack-quantized", **INT4, actorder="group"), torch.bfloat16, compressed_packed(4, 16, False, True)
    ),
    "gptq": Case({"quant_method": "gptq", "bits": 4, "group_size": 16}, torch.float16, gptq(4, 16, 1, False)),
    "gptq in order of activations": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, torch.float16, gptq(4, 16, 1, True)
    ),
    "gptq without groups": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": -1}, torch.float16, gptq(4, None, 1, False)
    ),
    "gptq in 8 bits": Case({"quant_method": "gptq", "bits": 8, "group_size": 16}, torch.float16, gptq(8, 16, 1, True)),
    "gptq_v2": Case(
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, torch.float16, gptq(4, 16, 2, True)
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, torch.float16, awq),
    "nf4": Case(FOUR, torch.bfloat16, four_bits(NF4, "nf4", False)),
    "nf4 with nested scales": Case(FOUR, torch.bfloat16, four_bits(NF4, "nf4", True)),
    "fp4": Case(FOUR, torch.bfloat16, four_bits(FP4, "fp4", False)),
    "int8 of bitsandbytes": Case({"load_in_8bit": True}, torch.float16, eight_bits),
}
