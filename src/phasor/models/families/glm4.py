"""GLM-4 as `glm4`: GLM-4-0414 and GLM-Z1."""

from __future__ import annotations

from phasor.models.families.glm import Glm


class Glm4(Glm):
    """GLM with a norm on both sides of attention and feed-forward."""

    model_type = "glm4"
    title = "GLM-4 (0414)"
    architectures = {"lm": "Glm4ForCausalLM", "none": "Glm4Model"}
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    parts = Glm.parts | {"placement": "sandwich"}


FAMILY = Glm4()
