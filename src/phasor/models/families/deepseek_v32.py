"""DeepSeek V3.2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, Pinned, SameAs
from phasor.models.families._latent import AdjacentRope, ExpertsByLayer, latent
from phasor.models.families.deepseek_v3 import DeepSeekV3
from phasor.models.fields import Fields
from phasor.models.layout import Layout, Piece, Rule, linear

INDEXED = "indexed_attention"


class IndexedLayers(FieldEntry):
    """`layer_types`, which are the same in every layer."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        f.expect(name, [INDEXED] * draft["num_layers"])

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if latent(config).indexer is None:
            raise ValueError("its models choose the tokens that are attended to by an indexer, and this one has none")
        return {name: [INDEXED] * config.num_layers}


@dataclass(frozen=True)
class HalvesFirst(Layout):
    """Heads of the indexer, whose rotated pairs are halves in theirs and adjacent in ours."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        attention = latent(model)
        assert attention.indexer is not None
        rope, width = attention.sizes(model).rope, attention.indexer.head_dim
        pieces = []
        for head in ours.unflatten(0, (-1, width)):
            pairs = head[:rope].unflatten(0, (-1, 2)).transpose(0, 1)
            pieces += [Piece(pairs, (rope, *ours.shape[1:])), Piece(head[rope:], tuple(head[rope:].shape))]
        return pieces


class DeepSeekV32(DeepSeekV3):
    """As DeepSeek V3, with an indexer that chooses the tokens attended to."""

    model_type = "deepseek_v32"
    title = "DeepSeek V3.2"
    architectures = {"lm": "DeepseekV32ForCausalLM", "none": "DeepseekV32Model"}
    fields = {name: entry for name, entry in DeepSeekV3.fields.items() if name != "first_k_dense_replace"} | {
        "max_position_embeddings": Field("max_length", default=163840),
        "q_lora_rank": Field("attention.q_rank", default=1536),
        "rope_parameters": AdjacentRope(),
        "mlp_bias": Pinned(False),
        "num_experts": Pinned(None, SameAs("feedforward.experts.num_experts")),
        "index_topk": Field("attention.indexer.top_k", default=2048),
        "index_head_dim": Field("attention.indexer.head_dim", default=128),
        "index_n_heads": Field("attention.indexer.num_heads", default=64),
        "mlp_layer_types": ExpertsByLayer(3),
        "layer_types": IndexedLayers(),
    }
    index_layout: Layout = HalvesFirst()

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().attention(ours, theirs)
        yield from linear(f"{ours}.indexer.q", f"{theirs}.indexer.wq_b", self.index_layout)
        yield from linear(f"{ours}.indexer.k", f"{theirs}.indexer.wk", self.index_layout)
        yield from linear(f"{ours}.indexer.k_norm", f"{theirs}.indexer.k_norm", self.index_layout)
        yield from linear(f"{ours}.indexer.head_weights", f"{theirs}.indexer.weights_proj")


FAMILY = DeepSeekV32()
