"""What GPT-2 and GPT-J share: nearly all fields, some of which have two names."""

from __future__ import annotations

from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Field, FieldEntry, InitStd
from phasor.models.family import Family


class InnerDim(Field):
    """`n_inner`, which is null where the width follows from the model's."""

    def __init__(self) -> None:
        super().__init__("hidden_dim", default=None)

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return config.given("hidden_dim")


class GPTLike(Family):
    """Fields and table as in GPT-2."""

    prefix = "transformer."
    embedding = "transformer.wte.weight"
    # causal masks of old files
    derived: ClassVar[tuple[str, ...]] = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")
    parts = Family.parts | {"norm": "layernorm", "feedforward.bias": True}
    fields: ClassVar[dict[str, FieldEntry]] = {
        "vocab_size": Field("vocab_size"),
        "n_embd": Field("dim", alias="hidden_size"),
        "n_inner": InnerDim(),
        "n_layer": Field("num_layers", alias="num_hidden_layers"),
        "n_head": Field("num_heads", alias="num_attention_heads"),
        "n_positions": Field("max_length", alias="max_position_embeddings"),
        "activation_function": Activation("gelu_new", ACTIVATIONS, written={"gelu-tanh": "gelu_new"}),
        "layer_norm_epsilon": Field("norm.eps", default=1e-5),
        "embd_pdrop": Field("dropout.embedding", default=0.1),
        "attn_pdrop": Field("dropout.attention", default=0.1),
        "resid_pdrop": Field("dropout.residual", default=0.1),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
    }
    harmless = frozenset(
        """
        n_ctx n_special output_past predict_special_tokens summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj
        """.split()  # noqa: SIM905
    )
