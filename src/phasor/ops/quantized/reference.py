"""Weight-only quantization as plain formulas, in the dtype of the floating-point arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_int8_ref(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers `[N, K]` and scales `[N]` of a matrix `[N, K]`: `integers = round(weight / scale)`, `|integers| <= 127`.

    >>> values, scale = quantize_int8_ref(torch.tensor([[1.0, -2.54], [0.0, 0.0]], dtype=torch.float64))
    >>> values.tolist(), scale.tolist()
    ([[50, -127], [0, 0]], [0.02, 1.0])
    """
    largest = weight.abs().amax(-1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def dequantize_ref(values: Tensor, scale: Tensor) -> Tensor:
    """The matrix that integers and scales stand for.

    >>> dequantize_ref(torch.tensor([[127, -3]], dtype=torch.int8), torch.tensor([2.0])).tolist()
    [[254.0, -6.0]]
    """
    return values.to(scale.dtype) * scale[:, None]


def int8_linear_ref(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` with the dequantized matrix.

    >>> int8_linear_ref(torch.ones(1, 2), torch.tensor([[127, -3]], dtype=torch.int8), torch.tensor([2.0])).tolist()
    [[248.0]]
    """
    y = x @ dequantize_ref(values, scale).mT
    return y if bias is None else y + bias


def int8_embedding_ref(tokens: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Rows of the dequantized matrix.

    >>> int8_embedding_ref(torch.tensor([[0]]), torch.tensor([[127, -3]], dtype=torch.int8), torch.ones(1)).tolist()
    [[[127.0, -3.0]]]
    """
    return dequantize_ref(values, scale)[tokens]


def quantize_nf4_ref(weight: Tensor, code: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """The places `[n]` of a matrix's elements in a code, and the largest absolute value of each block.

    >>> places, absmax = quantize_nf4_ref(torch.tensor([[2.0, -0.9, 0.1]]), torch.tensor([-1.0, 0.0, 1.0]), 2)
    >>> places.tolist(), absmax.tolist()
    ([2, 1, 2], [2.0, 0.10000000149011612])
    """
    blocks = weight.flatten().split(block_size)
    absmax = torch.stack([block.abs().max() for block in blocks])
    places = [(block[:, None] / most - code).abs().argmin(-1) for block, most in zip(blocks, absmax, strict=True)]
    return torch.cat(places), absmax


def dequantize_nf4_ref(places: Tensor, absmax: Tensor, code: Tensor, block_size: int = 64) -> Tensor:
    """The elements that places in a code and the largest values of blocks stand for.

    >>> dequantize_nf4_ref(torch.tensor([2, 0]), torch.tensor([3.0]), torch.tensor([-1.0, 0.0, 1.0])).tolist()
    [3.0, -3.0]
    """
    return code[places] * absmax.repeat_interleave(block_size)[: len(places)]


def nf4_linear_ref(x: Tensor, places: Tensor, absmax: Tensor, code: Tensor) -> Tensor:
    """`x W^T` with the dequantized matrix.

    >>> nf4_linear_ref(torch.ones(1, 2), torch.tensor([2, 1]), torch.tensor([3.0]), torch.tensor([-1.0, 0.0, 1.0]))
    tensor([[3.]])
    """
    return x @ dequantize_nf4_ref(places, absmax, code).view(-1, x.shape[-1]).mT


def quantize_int4_ref(weight: Tensor, scale: Tensor) -> Tensor:
    """The integers -8 to 7 of a matrix `[N, K]` by the scales `[N, K/group]` of its groups.

    >>> quantize_int4_ref(torch.tensor([[1.0, -2.6, 9.0, 0.0]]), torch.tensor([[1.0, 1.0]])).tolist()
    [[1, -3, 7, 0]]
    """
    groups = weight.unflatten(-1, (scale.shape[-1], -1)) / scale[..., None]
    return groups.round().clamp(-8, 7).flatten(-2).to(torch.int8)


def dequantize_int4_ref(values: Tensor, scale: Tensor) -> Tensor:
    """The matrix that bytes of two integers each, plus 8, and scales of groups stand for.

    >>> dequantize_int4_ref(torch.tensor([[0x1F]], dtype=torch.uint8), torch.tensor([[2.0]])).tolist()
    [[14.0, -14.0]]
    """
    integers = torch.stack([values % 16, values // 16], dim=-1).flatten(-2).to(scale.dtype) - 8
    return (integers.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def int4_linear_ref(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` with the dequantized matrix.

    >>> int4_linear_ref(torch.ones(1, 2), torch.tensor([[0x1F]], dtype=torch.uint8), torch.tensor([[2.0]])).tolist()
    [[0.0]]
    """
    y = x @ dequantize_int4_ref(values, scale).mT
    return y if bias is None else y + bias
