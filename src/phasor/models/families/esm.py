"""ESM-2 and ESM-1b, which read proteins: a pre-norm encoder with rotary or learned positions, and token dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, Pinned, SameAs
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.families.roberta import DENSE_CLASSIFIER, RowsAfterPadding
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.nn.positions import RotaryConfig

LENGTH, USUAL = "max_position_embeddings", 1026
ROWS = RowsAfterPadding(default=USUAL)


class PositionKind(FieldEntry):
    """Rotary positions, or a table that begins after the number of the padding token."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        draft["position"] = f.choose(name, {"absolute": "learned", "rotary": "rotary"}, "absolute")
        if draft["position"] == "rotary":
            draft.values |= {"position.base": f.get("rope_theta", 10000.0), "max_length": f.get(LENGTH, USUAL)}
        else:
            ROWS.read(f, LENGTH, draft)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if isinstance(config.position, RotaryConfig):
            return {name: "rotary", "rope_theta": config.position.base, LENGTH: config.max_length}
        return {name: "absolute"} | ROWS.write(LENGTH, config)


class TokenDropout(FieldEntry):
    """Whether masked tokens have no vectors, and which token that is."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if f.flag(name, False):
            draft["embedding.mask_token"] = f.get("mask_token_id")

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        token = config.embedding.mask_token
        return {name: False} if token is None else {name: True, "mask_token_id": token}


class Esm(BertLike):
    """The head that predicts contacts is kept, and not used."""

    model_type = "esm"
    title = "ESM-2, ESM-1b"
    architectures = {"mlm": "EsmForMaskedLM", "none": "EsmModel"}
    classifiers = bert_classifiers("Esm", DENSE_CLASSIFIER)
    prefix = "esm."
    unprefixed = ("lm_head.",)
    embedding = "esm.embeddings.word_embeddings.weight"
    head = "lm_head.decoder.weight"
    masked = "lm_head"
    transform = ("lm_head.dense", "lm_head.layer_norm")
    passthrough = ("esm.contact_head.*", "esm.embeddings.position_embeddings.weight")
    derived = ("*.embeddings.position_ids", "*rotary_embeddings.inv_freq")
    own = {"feedforward.activation": "gelu", "head.activation": "gelu", "placement": "pre"}
    parts = {path: part for path, part in BertLike.parts.items() if path not in ("position", "embedding.norm")} | own
    fields = {name: BertLike.fields[name] for name in ("vocab_size", "hidden_size", "intermediate_size")} | {
        "num_hidden_layers": BertLike.fields["num_hidden_layers"],
        "num_attention_heads": BertLike.fields["num_attention_heads"],
        "head_dim": Pinned(SameAs("head_dim")),
        "hidden_dropout_prob": Field("dropout.residual", default=0.1),
        "attention_probs_dropout_prob": BertLike.fields["attention_probs_dropout_prob"],
        "layer_norm_eps": BertLike.fields["layer_norm_eps"],
        "initializer_range": BertLike.fields["initializer_range"],
        "tie_word_embeddings": BertLike.fields["tie_word_embeddings"],
        "position_embedding_type": PositionKind(),
        "emb_layer_norm_before": Field("embedding.norm", default=False),
        "token_dropout": TokenDropout(),
        "is_folding_model": Pinned(False),
    }
    harmless = BertLike.harmless | {"esmfold_config", "hidden_act", "rope_theta", "vocab_list"}

    def matches_config(self, name: str, tensor: Tensor, config: ModelConfig) -> bool:
        """Stored frequencies are those of the configuration, as far as their dtype can tell."""
        if not name.endswith("inv_freq"):
            return super().matches_config(name, tensor, config)
        if not isinstance(config.position, RotaryConfig):
            return False
        exact = torch.tensor([float(x) for x in config.position.frequencies(config.head_dim)], dtype=torch.float64)
        # Theirs are powers of float32 numbers: a few units in the last place.
        near = 8 * torch.finfo(tensor.dtype).eps
        return tensor.shape == exact.shape and bool(((tensor - exact) / exact).abs().max() <= near)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        block, layer = "encoder.blocks.{i}", "esm.encoder.layer.{i}"
        yield from self.embedding_rules()
        yield from linear("encoder.embedding_norm", "esm.embeddings.layer_norm")
        yield from projections(f"{block}.attention", f"{layer}.attention.self", ("query", "key", "value"))
        yield from linear(f"{block}.attention.out", f"{layer}.attention.output.dense")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.attention.LayerNorm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.intermediate.dense")
        yield from linear(f"{block}.feedforward.down", f"{layer}.output.dense")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.LayerNorm")
        yield from linear("encoder.norm", "esm.encoder.emb_layer_norm_after")
        yield from linear("pooler.dense", "esm.pooler.dense")
        yield from self.head_rules(config)

    def head_rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from linear("head.dense", self.transform[0])
        yield from linear("head.norm", self.transform[1])
        yield Rule("head.weight", self.head)
        yield Rule("head.bias", "lm_head.bias")


FAMILY = Esm()
