"""A front end: convolutions that make the vectors of a source out of features, such as those of audio."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config.front_end import ConvolutionConfig, FrontEndConfig
from phasor.nn.checks import describe_tensor
from phasor.nn.sequence import SequenceInfo

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "tanh": torch.tanh}


class Convolution(nn.Module):
    """`norm(activation(x * w + b))` over the frames of `[B, features, frames]`, with a norm where there is one."""

    def __init__(self, config: ConvolutionConfig, features: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(
            features, config.features, config.width, config.stride, config.padding, bias=config.bias
        )
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.GroupNorm(1, config.features) if config.norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.activation(self.convolution(x)))
        return y


class FrontEnd(nn.Sequential):
    """The vectors of a source, `[B, S, dim]`, of its features `[B, frames, features]`.

    >>> config = FrontEndConfig(features=80, convolutions=({"features": 32, "width": 3, "stride": 2, "padding": 1},))
    >>> FrontEnd(config)(torch.zeros(1, 9, 80)).shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, config: FrontEndConfig) -> None:
        super().__init__(*map(Convolution, config.convolutions, config.inputs))
        self.config = config

    def places(self, features: Tensor) -> Tensor:
        """A place for every vector, `[B, S]`, of features that are checked: what stands for tokens, none padding.

        >>> config = FrontEndConfig(features=80, convolutions=({"features": 32, "width": 3, "stride": 2},))
        >>> FrontEnd(config).places(torch.zeros(1, 9, 80))
        tensor([[-1, -1, -1, -1]])
        """
        self.check(features)
        device = next(self.parameters()).device
        if features.device != device:
            raise ValueError(f"features are on {features.device}, and the model's weights on {device}")
        count = self.config.length(features.shape[1])
        return torch.full((len(features), count), -1, dtype=torch.int64, device=device)

    def forward(self, features: Tensor, seq: SequenceInfo | None = None) -> Tensor:
        vectors: Tensor = super().forward(features.mT.to(next(self.parameters()).dtype))
        return vectors.mT

    def check(self, features: object) -> None:
        """Raise ValueError for what are no features of sources."""
        count, least = self.config.features, self.config.least
        fits = isinstance(features, Tensor) and features.is_floating_point() and features.dim() == 3
        if not fits or features.shape[-1] != count or features.shape[1] < least:  # type: ignore[attr-defined]
            raise ValueError(
                f"the source of this model are features, floats [batch, frames, {count}] with at least {least} frames, "
                f"not {describe_tensor(features)}"
            )
