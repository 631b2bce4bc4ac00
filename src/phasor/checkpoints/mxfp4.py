"""Weights in MXFP4, as gpt-oss is published: blocks of 32 numbers of four bits with one exponent each, read as bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints.tensors import Tensors

BLOCKS, SCALES = "_blocks", "_scales"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the numbers that three bits count; the fourth is the sign
BIAS = 127  # of the exponents


def is_mxfp4(data: dict[str, Any]) -> bool:
    """Whether a config.json says that weights are in MXFP4."""
    given = data.get("quantization_config")
    return isinstance(given, dict) and given.get("quant_method") == "mxfp4"


class MXFP4Tensors(Tensors):
    """Tensors of which some are stored as `NAME_blocks` and `NAME_scales`: they appear under NAME, in bfloat16.

    Blocks lie `[experts, out, blocks, 16]`, two numbers a byte; the tensor is `[experts, in, out]`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        stems = [name.removesuffix(BLOCKS) for name in self.file_of if name.endswith(BLOCKS)]
        self.packed = {name for name in stems if name not in self.file_of and self._is_packed(name)}
        if not self.packed:
            self.opened.close()
            raise ValueError(
                f"{folder}: quantization_config says mxfp4, but no tensor is stored as {BLOCKS} and {SCALES}"
            )
        self.file_of |= {name: self.file_of[name + BLOCKS] for name in self.packed}

    def _is_packed(self, name: str) -> bool:
        """Whether a tensor has blocks and scales that go together."""
        if name + SCALES not in self.file_of:
            return False
        blocks, scales = (super(MXFP4Tensors, self).shape(name + end) for end in (BLOCKS, SCALES))
        types = {super(MXFP4Tensors, self).dtype(name + end) for end in (BLOCKS, SCALES)}
        return len(blocks) == 4 and blocks[3] == 16 and blocks[:3] == scales and types == {"U8"}

    @property
    def names(self) -> list[str]:
        stored = {name + end for name in self.packed for end in (BLOCKS, SCALES)}
        return [name for name in self.file_of if name not in stored]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.packed:
            return super().shape(name)
        experts, rows, blocks, size = super().shape(name + BLOCKS)
        return experts, blocks * size * 2, rows

    def dtype(self, name: str) -> str:
        return "BF16" if name in self.packed else super().dtype(name)

    def get(self, name: str) -> Tensor:
        if name not in self.packed:
            return super().get(name)
        blocks, scales = super().get(name + BLOCKS), super().get(name + SCALES)
        return torch.stack([dequantize(*one).T for one in zip(blocks, scales, strict=True)])

    def get_adjacent(self, names: list[str]) -> Tensor | None:
        return None if self.packed & set(names) else super().get_adjacent(names)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrix `[rows, columns]` of packed blocks `[rows, blocks, 16]` and their exponents; every value is exact.

    >>> dequantize(torch.tensor([[[0x21, 0xF0]]], dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)).tolist()
    [[1.0, 2.0, 0.0, -12.0]]
    """
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # the low half of a byte comes first
    return torch.ldexp(values[numbers.int()], scales.int()[..., None] - BIAS).flatten(-2)
