"""MPNet: BERT without token types, with learned positions and a bias by distance that all layers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import LayerConfig, ModelConfig
from phasor.models.entries import Draft, FieldEntry, require_kind
from phasor.models.families._bert import bert_classifiers
from phasor.models.families.roberta import DENSE_CLASSIFIER, Roberta, RowsAfterPadding
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.nn.positions import T5PositionConfig

BIAS = T5PositionConfig(num_buckets=32, max_distance=128)  # transformers does not read them from a file


class RelativeBias(FieldEntry):
    """T5's bias in every layer, beside the table of positions on the input."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        f.expect(name, BIAS.num_buckets)
        draft["layers"] = (LayerConfig(position=BIAS),)

    def check(self, config: ModelConfig) -> None:
        for position in config.layer_positions():
            require_kind(position, T5PositionConfig)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: BIAS.num_buckets}


class MPNet(Roberta):
    """Positions begin after the padding token, which is always 1."""

    model_type = "mpnet"
    title = "MPNet"
    architectures = {"mlm": "MPNetForMaskedLM", "none": "MPNetModel"}
    classifiers = bert_classifiers("MPNet", DENSE_CLASSIFIER)
    prefix = "mpnet."
    embedding = "mpnet.embeddings.word_embeddings.weight"
    fields = {name: entry for name, entry in Roberta.fields.items() if name != "type_vocab_size"} | {
        "max_position_embeddings": RowsAfterPadding(always=1),
        "relative_attention_num_buckets": RelativeBias(),
    }
    unsupported = frozenset()

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        yield Rule("encoder.positions.1.weight", "mpnet.encoder.relative_attention_bias.weight")

    def attention_rules(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(f"{ours}.attention", f"{theirs}.attention.attn", ("q", "k", "v"))
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.attn.o")
        yield from linear(f"{ours}.residual.norms.0", f"{theirs}.attention.LayerNorm")


FAMILY = MPNet()
