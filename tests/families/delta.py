"""Random configurations of Qwen's hybrids of gated delta and softmax attention: Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from .cases import Case, Cases, coin, partial_rotary_factor
from .llama_like import FULL, common_fields, hub_case
from .vision_text import interleaved_sections

LINEAR = "linear_attention"


def hybrid_fields(rng: random.Random) -> dict[str, Any]:
    """Heads of the linear layers in groups, of odd widths; layers by a list with both kinds, or by their interval."""
    fields = common_fields(rng) | {"hidden_act": "silu", "num_hidden_layers": rng.choice([3, 4])}
    key_heads = rng.choice([1, 2, 3])
    fields |= {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([5, 8]),
        "linear_value_head_dim": rng.choice([6, 7]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "rms_norm_eps": rng.choice([1e-1, 1e-2]),  # small results of a state, normalized, would show their rounding
        "attention_bias": coin(rng),
    }
    fields["rope_parameters"]["partial_rotary_factor"] = partial_rotary_factor(rng, fields)
    layers = [LINEAR, FULL, *(rng.choice([LINEAR, FULL]) for _ in range(fields["num_hidden_layers"] - 2))]
    rng.shuffle(layers)
    return fields | ({"layer_types": layers} if coin(rng) else {"full_attention_interval": 2})


def experts(rng: random.Random) -> dict[str, Any]:
    return {
        "num_experts": rng.choice([4, 6]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "shared_expert_intermediate_size": rng.choice([16, 24]),
    }


@contextmanager
def float64_for_float32() -> Iterator[None]:
    """What theirs computes in float32, whatever the weights are, is in float64 instead."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def widen(patch: pytest.MonkeyPatch, *classes: Any) -> None:
    """Theirs in float64 shall show what float32 costs, and have its states in float64 for that."""
    for cls in classes:

        def forward(self: Any, hidden_states: Any, *more: Any, own: Any = cls.forward, **args: Any) -> Any:
            with float64_for_float32() if hidden_states.dtype == torch.float64 else nullcontext():
                return own(self, hidden_states, *more, **args)

        patch.setattr(cls, "forward", forward)


def widen_states(patch: pytest.MonkeyPatch) -> None:
    """The states of gated delta attention in float64."""
    nets = modeling_qwen3_5.Qwen3_5GatedDeltaNet, modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet
    widen(patch, modeling_qwen3_next.Qwen3NextGatedDeltaNet, *nets)


def hybrid_case(rng: random.Random, cls: str, config: Any) -> Case:
    """Files on the hub name the gate of the output, and layers that predict further tokens."""
    case = hub_case(rng, cls, config, attn_output_gate=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32")
    case.patch = widen_states
    return case


def qwen3_next(rng: random.Random, cls: str = "Qwen3NextForCausalLM") -> Case:
    fields = hybrid_fields(rng) | experts(rng)
    fields |= {"norm_topk_prob": coin(rng), "mlp_only_layers": rng.choice([[], [1]])}
    return hybrid_case(rng, cls, transformers.Qwen3NextConfig(**fields))


def three_axes(rng: random.Random) -> dict[str, Any]:
    """Fields with positions of time, height and width."""
    fields = hybrid_fields(rng)
    width = rng.choice([n for n in (6, 8, 10) if n <= fields["head_dim"]])
    fields["rope_parameters"]["partial_rotary_factor"] = width / fields["head_dim"]
    pairs = int(fields["head_dim"] * (width / fields["head_dim"])) // 2
    fields["rope_parameters"] |= {"mrope_section": interleaved_sections(rng, pairs), "mrope_interleaved": True}
    return fields


def qwen3_5(rng: random.Random, cls: str = "Qwen3_5ForCausalLM") -> Case:
    return hybrid_case(rng, cls, transformers.Qwen3_5TextConfig(**three_axes(rng)))


def qwen3_5_moe(rng: random.Random, cls: str = "Qwen3_5MoeForCausalLM") -> Case:
    fields = {name: value for name, value in three_axes(rng).items() if name != "intermediate_size"}
    return hybrid_case(rng, cls, transformers.Qwen3_5MoeTextConfig(**fields, **experts(rng)))


CASES: Cases = {
    "qwen3_next": qwen3_next,
    "qwen3_next/without head": lambda rng: qwen3_next(rng, "Qwen3NextModel"),
    "qwen3_5_text": qwen3_5,
    "qwen3_5_text/without head": lambda rng: qwen3_5(rng, "Qwen3_5TextModel"),
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_moe_text/without head": lambda rng: qwen3_5_moe(rng, "Qwen3_5MoeTextModel"),
}
