"""GLM-5."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, Pinned
from phasor.models.families._latent import LatentSize
from phasor.models.families.deepseek_v32 import DeepSeekV32
from phasor.models.fields import Fields
from phasor.models.layout import SAME


class OwnIndexers(FieldEntry):
    """`indexer_types`: every layer has to have an indexer of its own, and take no other layer's choice.

    Where it is missing, `index_topk_pattern` or `index_topk_freq` says so.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        own = ["full"] * draft["num_layers"]
        said = {name: own, "index_topk_pattern": "F" * len(own), "index_topk_freq": 1}
        for field, value in said.items():
            if f.raw(field, value) not in (value, own):
                raise ValueError(
                    f"{f.file}: {field} has layers without an indexer of their own, which take the tokens that an "
                    "earlier layer chose: phasor does not share the choice between layers"
                )

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: ["full"] * config.num_layers}


class GLMMoEDSA(DeepSeekV32):
    """As DeepSeek V3.2, with pairs of the indexer that are adjacent too."""

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
        "indexer_types": OwnIndexers(),
    }
    harmless = DeepSeekV32.harmless | {"index_skip_topk_offset"}
    index_layout = SAME


FAMILY = GLMMoEDSA()
