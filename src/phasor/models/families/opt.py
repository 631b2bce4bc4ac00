"""OPT, and Galactica, which kept its shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig, PostConfig, PreConfig
from phasor.models.entries import (
    ACTIVATIONS,
    Activation,
    Bias,
    Draft,
    EmbeddingWidth,
    Field,
    FieldEntry,
    InitStd,
    Pinned,
    Switch,
    TableLength,
)
from phasor.models.families._fairseq import block
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear


class OptEmbeddingWidth(EmbeddingWidth):
    """A model without a head projects its hidden states back to the narrow width."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        if not draft.has_logits:
            draft["head.project"] = "embedding.width" in draft.values


class RemovedFinalNorm(FieldEntry):
    """`_remove_final_layer_norm`: the norm that follows the last block, where norms stand before attention."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        removed = f.get(name, False)
        draft["final_norm"] = isinstance(draft["placement"], PreConfig) and not removed

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: isinstance(config.placement, PreConfig) and not config.ends_in_norm}


class OPT(Family):
    """Pre-norm, or post-norm (350m); learned positions from the table's third row; a table that may be narrower."""

    model_type = "opt"
    title = "OPT"
    architectures = {"lm": "OPTForCausalLM", "none": "OPTModel"}
    embedding = "model.decoder.embed_tokens.weight"
    parts = Family.parts | {"position": "learned", "position.offset": 2, "norm": "layernorm"}
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "ffn_dim": Field("hidden_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "max_position_embeddings": TableLength(default=2048),
        "learned_embeddings": Pinned(True),
        "scale_embeddings": Pinned(False),
        "enable_bias": Bias(True, feedforward=True),
        "activation_function": Activation("relu", ACTIVATIONS, written={"gelu-tanh": "gelu_new"}),
        "layer_norm_elementwise_affine": Field("norm.weight", "norm.bias", default=True),
        "do_layer_norm_before": Switch("placement", on=PreConfig(), off=PostConfig(), default=True),
        "_remove_final_layer_norm": RemovedFinalNorm(),
        "word_embed_proj_dim": OptEmbeddingWidth(),
        "dropout": Field("dropout.residual", default=0.1),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "init_std": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
    }
    harmless = frozenset({"activation_dropout", "layerdrop"})  # of training, and phasor has neither
    derived = ("model.decoder.version",)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("tokens.project.weight", "model.decoder.project_in.weight")
        yield Rule("decoder.positions.0.weight", "model.decoder.embed_positions.weight")
        yield Rule("head.project.weight", "model.decoder.project_out.weight")
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "model.decoder.final_layer_norm")
        yield from block("model.decoder.layers.{i}")


FAMILY = OPT()
