"""DeepSeek V3, R1 and those that are built like them."""

from __future__ import annotations

from phasor.config import ModelConfig
from phasor.models.entries import Field, Pinned
from phasor.models.families._latent import LatentLike
from phasor.models.families._routed import FirstDense, SharedExperts


class DeepSeekV3(LatentLike):
    """Latent attention; experts chosen by sigmoid scores with a correction, among the best groups of them."""

    model_type = "deepseek_v3"
    title = "DeepSeek V3"
    architectures = {"lm": "DeepseekV3ForCausalLM", "none": "DeepseekV3Model"}
    fields = LatentLike.fields | {
        "max_position_embeddings": Field("max_length", default=4096),
        "n_routed_experts": Field("feedforward.experts.num_experts", default=256, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=2048),
        "n_shared_experts": SharedExperts(1),
        "n_group": Field("feedforward.experts.num_groups", default=8),
        "topk_group": Field("feedforward.experts.top_groups", default=4),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=True),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=2.5),
        "first_k_dense_replace": FirstDense(3),
        "scoring_func": Pinned("sigmoid"),
        "topk_method": Pinned("noaux_tc"),
    }
    harmless = LatentLike.harmless | {"num_mtp_layers", "num_nextn_predict_layers"}

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        """The layers behind the last one, which predict further tokens in training."""
        return (f"model.layers.{config.num_layers}.*",)


FAMILY = DeepSeekV3()
