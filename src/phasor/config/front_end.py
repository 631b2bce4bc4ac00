"""Convolutions that make the source of an encoder-decoder out of features, such as those of audio."""

from __future__ import annotations

from math import prod
from typing import Literal

from phasor.config.schema import MOST_FEATURES, MOST_WIDTH, Config, not_negative, positive
from phasor.config.weights import Weight, Weights, with_prefixes


class ConvolutionConfig(Config):
    """A convolution over frames, and its activation: `features` of every `stride`-th frame out of `width` of them.

    `padding` frames of zeros stand on either side. With `norm` all features of a source are normalized together after
    the activation, and scaled by what is learned.

    >>> ConvolutionConfig(features=384, width=3, stride=2, padding=1).frames(3000)
    1500
    """

    features: int
    width: int
    stride: int = 1
    padding: int = 0
    bias: bool = True
    activation: Literal["gelu", "tanh"] = "gelu"
    norm: bool = False

    def check(self) -> None:
        positive(self, "features", most=MOST_FEATURES)
        positive(self, "width", "stride", most=MOST_WIDTH)
        not_negative(self, "padding")
        if self.padding >= self.width:
            raise ValueError(f"ConvolutionConfig.padding ({self.padding}) must be less than width ({self.width})")

    def frames(self, count: int) -> int:
        """How many frames there are after it."""
        return max(0, (count + 2 * self.padding - self.width) // self.stride + 1)

    def weights(self, features: int) -> Weights:
        """The weights of a convolution of frames with some features, by their names in the module."""
        learned = {"weight": Weight((self.features, features, self.width))}
        if self.bias:
            learned["bias"] = Weight((self.features,))
        norm = {name: Weight((self.features,)) for name in ("weight", "bias") if self.norm}
        return with_prefixes({"convolution": learned, "norm": norm})


class FrontEndConfig(Config):
    """Convolutions, one after the other, that make the vectors of a source out of frames with `features` each.

    >>> audio = FrontEndConfig(features=80, convolutions=({"features": 384, "width": 3, "stride": 2},))
    >>> audio.length(9), audio.least
    (4, 3)
    """

    features: int
    convolutions: tuple[ConvolutionConfig, ...]

    def check(self) -> None:
        positive(self, "features", most=MOST_FEATURES)
        if not self.convolutions:
            raise ValueError("FrontEndConfig.convolutions must list at least one convolution")

    def length(self, frames: int) -> int:
        """How many vectors the source of some frames has."""
        for convolution in self.convolutions:
            frames = convolution.frames(frames)
        return frames

    @property
    def least(self) -> int:
        """The fewest frames that make a vector."""
        least = 1
        for convolution in reversed(self.convolutions):
            least = max(1, (least - 1) * convolution.stride + convolution.width - 2 * convolution.padding)
        return least

    @property
    def hop(self) -> int:
        """How many frames there are from one vector to the next."""
        return prod(convolution.stride for convolution in self.convolutions)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The features that each convolution takes."""
        return (self.features, *(convolution.features for convolution in self.convolutions[:-1]))

    def weights(self) -> Weights:
        """The weights by their names in the module."""
        each = zip(self.convolutions, self.inputs, strict=True)
        return with_prefixes({f"{i}": one.weights(features) for i, (one, features) in enumerate(each)})
