"""The configuration of a gated short convolution."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.model import ModelConfig
from phasor.config.schema import MOST_HEAD_DIM, positive
from phasor.config.weights import Weight, Weights, linear, with_prefixes


class ShortConvolutionAttentionConfig(AttentionConfig, kind="short-convolution"):
    """A causal convolution over `conv_width` tokens in the place of attention, gated before and after (LFM2).

    Every feature is convolved by itself. `bias` adds one to the projections and to the convolution. There are no
    positions: the order of tokens is in the convolution.

    >>> from phasor.config import ModelConfig
    >>> model = ModelConfig(vocab_size=9, dim=2048, num_layers=1, num_heads=32, attention="short-convolution")
    >>> {name: kept.shape for name, kept in model.cached_per_sequence(0).items()}
    {'inputs': (2, 2048)}
    """

    takes_positions: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True

    conv_width: int = 3
    bias: bool = False

    def check(self) -> None:
        positive(self, "conv_width", most=MOST_HEAD_DIM)

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        if model.shape != "decoder":
            raise ValueError(f"{self.kind} attention is for decoders, and this is an {model.shape}")

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {}

    def gathered_elements(self, model: ModelConfig, tensor: int = 1) -> int:
        """The inputs of the convolution."""
        return model.dim // tensor

    def cached_per_sequence(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """The last inputs of the convolution."""
        return {"inputs": CachedTensor((self.conv_width - 1, model.dim))}

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        projections = {
            "gates_and_values": linear(3 * model.dim, model.dim, bias=self.bias, cut=0, pieces=3),
            "out": linear(model.dim, model.dim, bias=self.bias, cut=1),
        }
        found = {"convolution": Weight((model.dim, self.conv_width), 0)}
        if self.bias:
            found["convolution_bias"] = Weight((model.dim,), 0)
        return found | with_prefixes(projections)

    def heads_to_cut(self, model: ModelConfig) -> tuple[int, str]:
        return model.dim, "features"

    def query_width(self, model: ModelConfig) -> int:
        """Features of the gates."""
        return 2 * model.dim

    def output_width(self, model: ModelConfig) -> int:
        return model.dim

    def kv_width(self, model: ModelConfig) -> int:
        return model.dim

    def flops_per_token(self, model: ModelConfig, keys: float) -> float:
        """Products in the convolution, the same after any number of tokens."""
        return 2 * self.conv_width * model.dim

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {"short-convolution": cls(), "short-convolution-biases": cls(conv_width=4, bias=True)}
