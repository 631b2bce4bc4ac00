"""The configuration of Mamba-2."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.attention import AttentionConfig
from phasor.config.model import ModelConfig
from phasor.config.parts import RMSNormConfig
from phasor.config.recurrent import RecurrentAttentionConfig
from phasor.config.weights import Weight, Weights, with_prefixes


class Mamba2AttentionConfig(RecurrentAttentionConfig, kind="mamba2"):
    """Mamba-2 (SSD): a state per head, which decays by as much as each token says, and is written as strongly.

    Its `C`, `B` and `x` are queries, keys and values here: `num_key_heads` is the number of groups of heads that share
    `B` and `C`, `key_dim` the size of their state and `value_dim` the width of a head. Values pass the state by too,
    times a number that is learned for each head. The result is gated and then normalized over the heads of a group.
    There are no positions: the order of tokens is in the state.

    >>> from phasor.config import ModelConfig
    >>> attention = Mamba2AttentionConfig(num_heads=80, num_key_heads=1, key_dim=128, value_dim=64)
    >>> model = ModelConfig(vocab_size=9, dim=2560, num_layers=1, num_heads=20, attention=attention)
    >>> {name: kept.shape for name, kept in model.cached_per_sequence(0).items()}
    {'state': (80, 128, 64), 'inputs': (3, 5376)}
    """

    gates_per_head: ClassVar[int] = 1  # how strongly a token is written, and how much it lets decay

    conv_width: int | None = 4
    conv_bias: bool = True
    norm_eps: float = 1e-5

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        sizes = self.sizes(model)
        norm = RMSNormConfig().weights(sizes.key_heads, self.output_width(model) // sizes.key_heads, cut=0)
        by_head = dict.fromkeys(("A_log", "dt_bias", "D"), Weight((sizes.heads,), 0))
        return super().weights(model, cross=cross) | by_head | with_prefixes({"norm": norm})

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {
            "mamba2": cls(),
            "mamba2-groups": cls(num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, conv_width=3, norm_eps=1e-2),
            "mamba2-biases": cls(conv_bias=False, bias=True),
        }
