"""Modules with quantized weights: linear layers, the token embedding, and the output projection of the head.

They hold their weights as buffers: integers, and scales that keep their dtype when the model is converted. On
a CPU, 4-bit weights are held again, as the kernels of the machine read them. Weights are not trained: linear layers in
8 bits or NF4 pass gradients on to their input, as adapters on a frozen model need it, and the rest is for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from phasor.nn.embedding import Embedding
from phasor.nn.heads import LogitsHead
from phasor.ops.quantized import (
    FrozenMatrix,
    Int4Matrix,
    Int8Matrix,
    NF4Matrix,
    PackedInt4,
    QuantizedMatrix,
    dequantize,
    frozen_linear,
    pack_int4,
    prepare_int8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
    quantized_embedding,
    quantized_linear,
)

NF4 = "nf4"


class Quantization(NamedTuple):
    """How weights are quantized: in how many bits, or "nf4", and how many share a scale in 4 bits."""

    bits: int | str = 8
    group_size: int = 32

    def quantize(self, weight: Tensor) -> QuantizedMatrix | NF4Matrix:
        """A quantized matrix. Rows that groups do not divide are in 8 bits, and so are odd ones instead of NF4.

        >>> weight = torch.randn(3, 48)
        >>> [type(Quantization(4, size).quantize(weight[:, :size])).__name__ for size in (32, 64)]
        ['Int4Matrix', 'Int8Matrix']
        """
        if self.bits == NF4:
            return quantize_int8(weight) if weight.shape[1] % 2 else quantize_nf4(weight)
        return quantize_int8(weight) if self.is_int8(weight) else quantize_int4(weight, self.group_size)

    def is_int8(self, weight: Tensor) -> bool:
        """Whether a matrix is quantized to 8 bits."""
        return self.bits == 8 or weight.shape[1] % self.group_size != 0


class Quantized(nn.Module):
    """The base of modules with quantized weights."""

    FIXED = ("weight", "scales", "nested_scales", "offset")  # tensors that keep their dtype
    PACKED = ("packed", "packed_scales", "integers", "integers_scale")  # 4-bit weights as kernels read them
    weight: Tensor
    scales: Tensor
    nested_scales: Tensor | None  # of NF4, as `offset`
    offset: Tensor | None
    packed: Tensor | None
    packed_scales: Tensor | None
    integers: Tensor | None
    integers_scale: Tensor | None

    def set_weight(self, matrix: QuantizedMatrix | NF4Matrix) -> None:
        """Hold a quantized weight, instead of one that is not."""
        if "weight" in self._parameters:
            del self._parameters["weight"]
        tensors = matrix if isinstance(matrix, NF4Matrix) else (*matrix[:2], None, None)
        scales = matrix.offset if isinstance(matrix, NF4Matrix) else matrix.scale
        if not (scales.is_meta or bool(scales.isfinite().all())):
            bits = 8 if isinstance(matrix, Int8Matrix) else 4
            raise ValueError(f"a weight is not finite, and cannot be quantized to {bits} bits")
        for name, tensor in zip(self.FIXED, tensors, strict=True):
            self.register_buffer(name, tensor)
        for name in self.PACKED:
            self.register_buffer(name, None, persistent=False)
        self.pack()

    def pack(self) -> None:
        """Hold 4-bit weights as the kernel of this machine reads them, where it has one."""
        self.unpack()
        if self.weight.dtype == torch.int8:
            prepare_int8(self.weight)
            return
        if self.nested_scales is not None:
            return
        packed = pack_int4(Int4Matrix(self.weight, self.scales))
        if packed is not None:
            self.packed, self.packed_scales, integers = packed
            self.integers, self.integers_scale = (None, None) if integers is None else integers

    def unpack(self) -> None:
        """Hold the weights once."""
        for name in self.PACKED:
            setattr(self, name, None)

    @property
    def frozen_matrix(self) -> FrozenMatrix | None:
        """The weights where gradients pass through them: in 8 bits or NF4."""
        tensors: Any = self._buffers  # which attributes of a module are found in, more slowly
        if tensors["nested_scales"] is not None:
            return NF4Matrix(*(tensors[name] for name in self.FIXED))
        return Int8Matrix(tensors["weight"], tensors["scales"]) if tensors["weight"].dtype == torch.int8 else None

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the weight that it stands for."""
        rows, width = self.weight.shape
        return torch.Size((rows, width if self.weight.dtype == torch.int8 else 2 * width))

    def full_weight(self) -> Tensor:
        """The weight that it stands for, as it is multiplied by, in float32."""
        matrix = self.matrix if self.frozen_matrix is None else self.frozen_matrix
        return dequantize(matrix, torch.float32).view(self.full_shape)

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weights, for inference."""
        if self.training:
            raise ValueError(
                "a model with quantized weights cannot be trained: train the original model, and quantize that"
            )
        tensors: Any = self._buffers  # which attributes of a module are found in, more slowly
        weight, scales = tensors["weight"], tensors["scales"]
        if weight.dtype == torch.int8:
            return Int8Matrix(weight, scales)
        packed, packed_scales, integers, integers_scale = (tensors[name] for name in self.PACKED)
        if packed is None:
            return Int4Matrix(weight, scales)
        both = None if integers is None else Int8Matrix(integers, integers_scale)
        return Int4Matrix(weight, scales, PackedInt4(packed, packed_scales, both))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pack()  # a pickle may come from a machine with other kernels

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        fixed = {name: x for name in self.FIXED if (x := self._buffers[name]) is not None and not x.is_meta}
        self.unpack()
        super()._apply(fn, recurse)
        for name, before in fixed.items():
            setattr(self, name, before.to(self.weight.device))
        self.pack()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.weight.device.type == "cpu" and self.weight.data_ptr() % 64:  # of a file that is mapped into memory
            self.weight = self.weight.clone()
        self.pack()


class QuantizedLinear(Quantized):
    """`x W^T + b` with W in 8 or 4 bits: a layer's weight quantized to 8 bits, or a matrix that is given.

    In training, W in 8 bits or NF4 has no gradient and `x` has.

    >>> layer = nn.Linear(64, 32)
    >>> x, small = torch.randn(5, 64), QuantizedLinear(layer).eval()
    >>> bool((small(x) - layer(x)).norm() < 0.02 * layer(x).norm())
    True
    >>> small.weight.dtype, small.half().scales.dtype
    (torch.int8, torch.float32)
    """

    def __init__(self, layer: nn.Linear, matrix: QuantizedMatrix | NF4Matrix | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        self.set_weight(quantize_int8(layer.weight) if matrix is None else matrix)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.frozen_matrix if self.training or self.nested_scales is not None else None
        return quantized_linear(x, self.matrix, self.bias) if frozen is None else frozen_linear(x, frozen, self.bias)

    def extra_repr(self) -> str:
        bits = 8 if self.weight.dtype == torch.int8 else 4 if self.nested_scales is None else NF4
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, bits={bits}"


class QuantizedEmbedding(Quantized, Embedding):
    """A quantized token embedding, which a tied head multiplies by without a copy."""

    like: Tensor

    def set_weight(self, matrix: QuantizedMatrix | NF4Matrix) -> None:
        like = self.weight.new_empty(0)  # of the dtype of the vectors
        super().set_weight(matrix)
        self.register_buffer("like", like, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def table(self) -> QuantizedMatrix:
        return self.matrix

    def vectors(self, tokens: Tensor) -> Tensor:
        return quantized_embedding(tokens, self.matrix, self.dtype)


class QuantizedHead(Quantized, LogitsHead):
    """A head with its own output projection in 8 or 4 bits."""

    weight: Tensor

    def table(self, tokens: Any) -> QuantizedMatrix:
        return self.matrix


def quantized_tensors(model: nn.Module) -> frozenset[str]:
    """The names of the tensors that keep their dtype when the model is converted.

    >>> sorted(quantized_tensors(nn.Sequential(QuantizedLinear(nn.Linear(64, 32)))))
    ['0.scales', '0.weight']
    """
    parts = ((name, part) for name, part in model.named_modules() if isinstance(part, Quantized))
    held = ((name, tensor) for name, part in parts for tensor in part.FIXED if part._buffers[tensor] is not None)
    return frozenset(f"{name}.{tensor}" if name else tensor for name, tensor in held)
