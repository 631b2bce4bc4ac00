"""What the decoders before Llama share: fields with two names, and the sizes of GPT-2 and GPT-J."""

from __future__ import annotations

from typing import Any

from phasor.config import (
    ActivationConfig,
    GELUTanhConfig,
    HeadConfig,
    LanguageHeadConfig,
    LayerNormConfig,
    ModelConfig,
    NoHeadConfig,
)
from phasor.config.parts import Projection
from phasor.models.family import ACTIVATIONS, Family, activation_name
from phasor.models.fields import Fields

EVERY: tuple[Projection, ...] = ("q", "k", "v", "out")  # where either all of them have a bias or none has


def either(f: Fields, name: str, other: str) -> Any:
    """A field that has two names; where a file has both, they have to agree."""
    value = f.get(other if other in f and name not in f else name)
    f.expect(other, value)
    return value


def plain_head(kind: str) -> HeadConfig:
    """A language model's head without anything special, or none."""
    return LanguageHeadConfig() if kind == "lm" else NoHeadConfig()


def older_name(activation: ActivationConfig) -> str:
    """Their name for an activation, the one these families were published with.

    >>> from phasor.config import ReLUConfig
    >>> older_name(GELUTanhConfig()), older_name(ReLUConfig())
    ('gelu_new', 'relu')
    """
    return "gelu_new" if isinstance(activation, GELUTanhConfig) else activation_name(activation)


class GPTLike(Family):
    """Fields and table as in GPT-2."""

    prefix = "transformer."
    embedding = "transformer.wte.weight"
    derived = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")  # causal masks of old files
    harmless = frozenset(
        """
        n_ctx n_special output_past predict_special_tokens summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj
        """.split()  # noqa: SIM905
    )

    def sizes(self, f: Fields) -> dict[str, Any]:
        """Sizes, norm, dropout, activation and head."""
        return {
            "vocab_size": f.get("vocab_size"),
            "dim": either(f, "n_embd", "hidden_size"),
            "hidden_dim": f.get("n_inner", None),
            "num_layers": either(f, "n_layer", "num_hidden_layers"),
            "num_heads": either(f, "n_head", "num_attention_heads"),
            "max_length": either(f, "n_positions", "max_position_embeddings"),
            "feedforward": {"activation": f.choose("activation_function", ACTIVATIONS, "gelu_new"), "bias": True},
            "norm": LayerNormConfig(eps=f.get("layer_norm_epsilon", 1e-5)),
            "dropout": {
                "embedding": f.get("embd_pdrop", 0.1),
                "attention": f.get("attn_pdrop", 0.1),
                "residual": f.get("resid_pdrop", 0.1),
            },
            "head": plain_head(self.head_kind(f)),
        }

    def write_sizes(self, config: ModelConfig, norm: LayerNormConfig) -> dict[str, Any]:
        """The fields `sizes` reads."""
        return {
            "vocab_size": config.vocab_size,
            "n_embd": config.dim,
            "n_inner": config.given("hidden_dim"),
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_positions": config.max_length,
            "activation_function": older_name(config.feedforward.activation),
            "layer_norm_epsilon": norm.eps,
            "embd_pdrop": config.dropout.embedding,
            "attn_pdrop": config.dropout.attention,
            "resid_pdrop": config.dropout.residual,
            "initializer_range": getattr(config.init, "std", 0.02),
        }
