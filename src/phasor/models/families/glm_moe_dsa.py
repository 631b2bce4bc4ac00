"""GLM-5."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, Pinned
from phasor.models.families._latent import LatentSize
from phasor.models.families.deepseek_v32 import DeepSeekV32
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import SAME

INDEXERS = {"F": "full", "S": "shared"}  # of a layer's own, and of the layer before it that has one


class Indexers(FieldEntry):
    """`indexer_types`: which layers have an indexer, and which take what an earlier one chose.

    Where it is missing, `index_topk_pattern` says so, or `index_topk_freq` of layers from `index_skip_topk_offset` on.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        layers, frequency = draft["num_layers"], max(f.get("index_topk_freq", 1), 1)
        offset, letters = f.get("index_skip_topk_offset", 2), f.raw("index_topk_pattern", None)
        usual = ["full" if max(i - offset + 1, 0) % frequency == 0 else "shared" for i in range(layers)]
        if letters is not None:
            usual = [INDEXERS.get(letter, letter) for letter in letters] if isinstance(letters, str | list) else letters
        types = f.raw(name, usual)
        if not isinstance(types, list) or len(types) != layers or not all(kind in INDEXERS.values() for kind in types):
            raise ValueError(f"{f.file}: {name} must be {layers} times full or shared, not {json_repr(types)}")
        draft.layers["attention.shared_index"] = [kind == "shared" for kind in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        shared = [getattr(config.layer(i).attention, "shared_index", False) for i in range(config.num_layers)]
        return {name: ["shared" if is_shared else "full" for is_shared in shared]}


class GLMMoEDSA(DeepSeekV32):
    """As DeepSeek V3.2, with pairs of the indexer that are adjacent too, and indexers that layers may share."""

    model_type = "glm_moe_dsa"
    title = "GLM-5"
    architectures = {"lm": "GlmMoeDsaForCausalLM", "none": "GlmMoeDsaModel"}
    fields = DeepSeekV32.fields | {
        "max_position_embeddings": Field("max_length", default=202752),
        "q_lora_rank": Field("attention.q_rank", default=2048),
        "v_head_dim": LatentSize("attention.value_dim", default=256),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "n_group": Field("feedforward.experts.num_groups", default=1),
        "topk_group": Field("feedforward.experts.top_groups", default=1),
        "index_n_heads": Field("attention.indexer.num_heads", default=32),
        "rope_interleave": Pinned(True),
        "indexer_rope_interleave": Pinned(True),
        "indexer_types": Indexers(),
    }
    index_layout = SAME


FAMILY = GLMMoEDSA()
