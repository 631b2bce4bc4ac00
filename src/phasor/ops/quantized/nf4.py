"""Matrices in NF4 with double quantization, as in QLoRA (Dettmers et al. 2023) and with the values of bitsandbytes.

A matrix is read as one row of blocks of 64 weights. A block is divided by its largest absolute value, and each weight
becomes the nearest of 16 quantiles of the normal distribution. The largest values, less their mean, are quantized once
more: in blocks of 256, each divided by its own largest, to the 256 numbers of a dynamic 8-bit map (Dettmers 2015).
That is 4.13 bits per weight.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZE, NESTED_BLOCK_SIZE = 64, 256
# The outermost probability: the mean of those of 15 and of 16 values, (1 - 1/30) and (1 - 1/32).
OUTERMOST = 0.9677083


class NF4Matrix(NamedTuple):
    """A matrix `[N, K]`: `values [N, K/2]` in uint8, two neighbors in a byte, the first in its upper half.

    The largest absolute value of a block is `dynamic_map[absmax] * nested_absmax + offset`: `absmax [blocks]` in
    uint8, `nested_absmax [blocks / 256]` and `offset []` in float32.
    """

    values: Tensor
    absmax: Tensor
    nested_absmax: Tensor
    offset: Tensor

    @property
    def inputs(self) -> int:
        """K."""
        return 2 * self.values.shape[1]


@cache
def nf4_code(device: torch.device) -> Tensor:
    """The 16 values of NF4, `[16]` in float32, on a device.

    They are 7 quantiles of the normal distribution below 0, and 0, and 8 above, divided by the largest.

    >>> [round(x, 4) for x in nf4_code(torch.device("cpu"))[::3].tolist()]
    [-1.0, -0.3949, -0.0911, 0.1609, 0.4407, 1.0]
    """
    quantile = NormalDist().inv_cdf
    below, above = (
        [quantile(p) for p in torch.linspace(OUTERMOST, 0.5, count + 1, dtype=torch.float32, device="cpu").tolist()]
        for count in (7, 8)
    )
    values = torch.tensor([*(-x for x in below[:-1]), *reversed(above)], dtype=torch.float32, device="cpu")
    return (values / values[-1]).to(device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """The 256 values of the dynamic map, `[256]` in float32, on a device.

    A power of ten takes a bit for each step down from 1, and what is left of seven bits counts the middles of equal
    parts of 0.1 to 1.

    >>> dynamic_map(torch.device("cpu"))[[0, 127, 255]].tolist()
    [-0.992968738079071, 0.0, 1.0]
    """
    values = [torch.tensor([0.0, 1.0], device="cpu")]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        middles = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values.to(device)


def quantize_nf4(weight: Tensor) -> NF4Matrix:
    """A matrix in NF4, every element rounded to the nearest of the 16 values of its block.

    >>> weight = torch.randn(8, 64)
    >>> matrix = quantize_nf4(weight)
    >>> tuple(matrix.values.shape), tuple(matrix.absmax.shape)
    ((8, 32), (8,))
    """
    rows, inputs = weight.shape
    if inputs % 2:
        raise ValueError(f"NF4 holds two neighbors of a row in a byte, and rows of {inputs} elements are odd")
    flat = weight.detach().float().reshape(-1)
    if weight.is_meta:
        blocks = -(-flat.numel() // BLOCK_SIZE)
        absmax, outer = flat.new_empty(blocks), -(-blocks // NESTED_BLOCK_SIZE)
        shapes = weight.new_empty(rows, inputs // 2, dtype=torch.uint8), absmax.to(torch.uint8)
        return NF4Matrix(*shapes, flat.new_empty(outer), flat.new_empty(()))
    codes, absmax = nearest(flat, nf4_code(weight.device), BLOCK_SIZE)
    offset = absmax.mean()
    nested, nested_absmax = nearest(absmax - offset, dynamic_map(weight.device), NESTED_BLOCK_SIZE)
    return NF4Matrix((codes[::2] << 4 | codes[1::2]).view(rows, -1), nested, nested_absmax, offset)


def nearest(flat: Tensor, code: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Of elements `[n]` the places of the nearest values of a code, in uint8, and the largest of each block.

    >>> code = torch.tensor([-1.0, 0.0, 1.0])
    >>> [x.tolist() for x in nearest(torch.tensor([3.0, 1.0, -0.5]), code, 2)]
    [[2, 1, 0], [3.0, 0.5]]
    """
    blocks = -(-flat.numel() // block_size)
    padded = torch.nn.functional.pad(flat, (0, blocks * block_size - flat.numel())).view(blocks, block_size)
    absmax = padded.abs().amax(-1)
    scaled = padded * (1.0 / absmax.clamp(min=1e-38))[:, None]
    places = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True)
    return places.to(torch.uint8).flatten()[: flat.numel()], absmax


def block_scales(absmax: Tensor, nested_absmax: Tensor, offset: Tensor | float, code: Tensor, size: int) -> Tensor:
    """The largest absolute value of every block, of its double quantization by a code; `size` blocks share a scale.

    >>> block_scales(torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([4.0]), 1.0, torch.tensor([0.5, 1.0]), 2)
    tensor([5., 3.])
    """
    nested = nested_absmax.repeat_interleave(min(size, len(absmax)))[: len(absmax)]
    return code[absmax.int()] * nested + offset


def look_up(values: Tensor, code: Tensor, scales: Tensor, size: int) -> Tensor:
    """Elements `[2 n]` of bytes `[n]`, each two places in a code; `size` neighbors share a scale.

    >>> look_up(torch.tensor([0x1F], dtype=torch.uint8), torch.arange(16.0), torch.tensor([2.0]), 2).tolist()
    [2.0, 30.0]
    """
    pairs = torch.cartesian_prod(code, code)  # [256, 2]: of a byte, which halves the lookups
    elements = torch.nn.functional.embedding(values.flatten().int(), pairs).flatten()
    whole = elements.numel() // size * size
    blocks = elements[:whole].view(-1, size).mul_(scales[: whole // size, None])
    if whole == elements.numel():
        return blocks.flatten()
    return torch.cat((blocks.flatten(), elements[whole:] * scales[-1]))
