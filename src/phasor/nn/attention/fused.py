"""Attention in the fused decoding step: what a kind of attention is given there, and what it is built as."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, nn

from phasor.ops.decode import ConvolutionArgs

if TYPE_CHECKING:
    from phasor.nn.attention.base import AttentionContext

T = TypeVar("T")
Biases = dict[tuple[int, int], Tensor]  # of scores, by scheme and keys


class FusedAttention(Protocol):
    """The attention of one layer, by kernels for one token per row."""

    takes_context: bool  # of the layer

    def __call__(self, x: Tensor, norm: nn.Module, ctx: AttentionContext | None, biases: Biases) -> None:
        """`x += multiplier * attention(norm(x))`."""


class DecodingStep(Protocol):
    """The step that a layer's attention is a part of: its cache, its memory, and its kernels of projections."""

    cache: Any  # a static cache, or one of a pool of pages
    positions: Tensor  # of the new tokens, `[B]`
    few: bool  # whether projections of so few rows are kernels that take a norm along
    pdl: bool  # whether a kernel may start while the one before it runs

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, which layers with the same key share."""

    def output(self, width: int, use: str = "") -> Tensor:
        """Memory for a projection of that many features; that of a `use` is no other's."""

    def project(
        self,
        x: Tensor,
        linear: Any,
        out: Tensor,
        norm: nn.Module,
        convolution: ConvolutionArgs | None = None,
        other: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`linear(norm(x))`, convolved where there is a convolution, and then the `other` of `project_convolve` too."""

    def add(self, y: Tensor, linear: Any, x: Tensor, norm: nn.Module | None = None) -> None:
        """`x += multiplier * linear(norm(y))`."""

    def normalize(self, x: Tensor, norm: nn.Module) -> Tensor:
        """`norm(x)`."""
