"""Whole models against transformers: tiny, every parameter redrawn, the same logits.

Each case writes out by hand which of their weights is which of ours. Norms use a large epsilon, so that a wrong
one would show.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from phasor import ModelConfig, Record, Transformer, preset

transformers.logging.set_verbosity_error()

EPS = 1e-2
LAYERS, DIM, HIDDEN, VOCAB, HEADS = 3, 48, 56, 61, 4
ROWS, TOKENS = 2, 23


class Theirs:
    """Their weights by name; remembers which were asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()
        self.asked: set[int] = set()

    def __call__(self, name: str) -> Tensor:
        self.asked.add(self.state[name].data_ptr())
        return self.state[name]

    def forgotten(self, model: nn.Module) -> list[str]:
        """Learned weights that no rule of the case took; tied ones count once."""
        learned = (name for name, p in model.named_parameters() if p.requires_grad)
        return [name for name in learned if self.state[name].data_ptr() not in self.asked]


@dataclass
class Case:
    theirs: nn.Module
    config: ModelConfig
    rules: Any  # from their weights to ours
    inputs: dict[str, Tensor] = field(default_factory=dict)  # beside the tokens, for theirs
    arguments: dict[str, Tensor] = field(default_factory=dict)  # the same for ours


def redraw(model: nn.Module) -> nn.Module:
    """Matrices keep activations near one; vectors (norms, biases, sinks) are standard normal."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.eval()


def qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """One projection out of three, by key/value group: the group's queries, its key, its value."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def kv(k: Tensor, v: Tensor, groups: int) -> Tensor:
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (k, v)], dim=1).flatten(0, 1)


def both(theirs: Theirs, ours: str, name: str) -> dict[str, Tensor]:
    """A weight and, where there is one, its bias."""
    found = {f"{ours}.weight": theirs(f"{name}.weight")}
    if f"{name}.bias" in theirs.state:
        found[f"{ours}.bias"] = theirs(f"{name}.bias")
    return found


def fused(theirs: Theirs, ours: str, names: list[str], join: Any) -> dict[str, Tensor]:
    """Several of their projections as one of ours, biases too."""
    found = {f"{ours}.weight": join(*(theirs(f"{name}.weight") for name in names))}
    if f"{names[0]}.bias" in theirs.state:
        found[f"{ours}.bias"] = join(*(theirs(f"{name}.bias") for name in names))
    return found


def stacked(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def llama_attention(theirs: Theirs, ours: str, layer: str, config: ModelConfig) -> dict[str, Tensor]:
    names = [f"{layer}.self_attn.{p}_proj" for p in "qkv"]
    found = fused(theirs, f"{ours}.attention.qkv", names, lambda *x: qkv(*x, config.num_kv_heads))
    found |= both(theirs, f"{ours}.attention.out", f"{layer}.self_attn.o_proj")
    for part in "qk":
        if f"{layer}.self_attn.{part}_norm.weight" in theirs.state:
            found |= both(theirs, f"{ours}.attention.{part}_norm", f"{layer}.self_attn.{part}_norm")
    return found


def llama_gated(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
    found = fused(theirs, f"{ours}.up", [f"{mlp}.gate_proj", f"{mlp}.up_proj"], stacked)
    return found | both(theirs, f"{ours}.down", f"{mlp}.down_proj")


def llama_experts(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
    return {
        f"{ours}.router.weight": theirs(f"{mlp}.gate.weight"),
        f"{ours}.up": theirs(f"{mlp}.experts.gate_up_proj").transpose(1, 2),
        f"{ours}.down": theirs(f"{mlp}.experts.down_proj").transpose(1, 2),
    }


def llama_rules(*norms: str, feedforward: Any = llama_gated) -> Any:
    """The names most decoders share; `norms` are those of a block in the order they run."""

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = both(theirs, "tokens", "model.embed_tokens") | both(theirs, "decoder.norm", "model.norm")
        if not config.embedding.tied:
            found |= both(theirs, "head", "lm_head")
        for i in range(config.num_layers):
            ours, layer = f"decoder.blocks.{i}", f"model.layers.{i}"
            found |= llama_attention(theirs, ours, layer, config)
            found |= feedforward(theirs, f"{ours}.feedforward", f"{layer}.mlp")
            for n, norm in enumerate(norms):
                found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.{norm}")
        return found

    return rules


PRE = ("input_layernorm", "post_attention_layernorm")
SIZES = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": HEADS, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OURS = {"vocab_size": VOCAB, "dim": DIM, "hidden_dim": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}


def llama(rope: dict[str, Any], extension: dict[str, Any] | None) -> Case:
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, rms_norm_eps=EPS, rope_parameters={"rope_theta": 5000.0} | rope
    )
    position = {"kind": "rotary", "base": 5000.0, "extension": extension}
    norm = {"kind": "rmsnorm", "eps": EPS}
    ours = preset("llama-3.1", **OURS, num_kv_heads=2, position=position, norm=norm)
    return Case(transformers.LlamaForCausalLM(config), ours, llama_rules(*PRE))


def llama_plain() -> Case:
    return llama({"rope_type": "default"}, None)


def llama_3() -> Case:
    theirs = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    ours = {"kind": "llama3", "factor": 8.0, "original_length": 64}
    return llama({"rope_type": "llama3", "factor": 8.0} | theirs, ours)


def llama_yarn() -> Case:
    theirs = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    return llama(theirs, {"kind": "yarn", "factor": 4.0, "original_length": 256})


def llama_left_padded() -> Case:
    case = llama_plain()
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    attention_mask[1, :9] = False
    case.inputs, case.arguments = {"attention_mask": attention_mask.long()}, {"attention_mask": attention_mask}
    return case


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, rms_norm_eps=EPS, num_local_experts=5, num_experts_per_tok=2, sliding_window=7
    )
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"]},
        attention={"window": 7},
        feedforward={"activation": "swiglu", "experts": {"num_experts": 5, "top_k": 2}},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.MixtralForCausalLM(config), ours, llama_rules(*PRE, feedforward=llama_experts))


def qwen3_moe() -> Case:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=10,
        rms_norm_eps=EPS,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=False,
    )
    experts = {"num_experts": 5, "top_k": 3, "normalize": False, "hidden_dim": 20}
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        head_dim=10,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"]},
        attention={"qk_norm": "head"},
        feedforward={"activation": "swiglu", "experts": experts},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.Qwen3MoeForCausalLM(config), ours, llama_rules(*PRE, feedforward=llama_experts))


def qwen2_moe() -> Case:
    """A shared expert behind a gate, and biases on queries, keys and values alone."""
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        rms_norm_eps=EPS,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        norm_topk_prob=True,
    )

    def feedforward(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
        found = llama_experts(theirs, ours, mlp) | llama_gated(theirs, f"{ours}.shared", f"{mlp}.shared_expert")
        return found | both(theirs, f"{ours}.shared_gate", f"{mlp}.shared_expert_gate")

    experts = {"num_experts": 5, "top_k": 2, "hidden_dim": 20, "shared_dim": 28, "shared_gate": True}
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"]},
        attention={"bias": ["q", "k", "v"]},
        feedforward={"activation": "swiglu", "experts": experts},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.Qwen2MoeForCausalLM(config), ours, llama_rules(*PRE, feedforward=feedforward))


def gpt_oss() -> Case:
    """Sink logits, every second layer local, clamped SwiGLU experts with biases, YaRN without truncation."""
    config = transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=EPS,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=0.9,
    )

    def feedforward(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
        def gate_first(x: Tensor) -> Tensor:
            return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

        return {
            f"{ours}.up": gate_first(theirs(f"{mlp}.experts.gate_up_proj")),
            f"{ours}.up_bias": gate_first(theirs(f"{mlp}.experts.gate_up_proj_bias")),
            f"{ours}.down": theirs(f"{mlp}.experts.down_proj"),
            f"{ours}.down_bias": theirs(f"{mlp}.experts.down_proj_bias"),
        } | both(theirs, f"{ours}.router", f"{mlp}.router")

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = llama_rules(*PRE, feedforward=feedforward)(theirs, config)
        for i in range(LAYERS):
            found[f"decoder.blocks.{i}.attention.sinks"] = theirs(f"model.layers.{i}.self_attn.sinks")
        return found

    attention = {"bias": ["q", "k", "v", "out"], "sink_logits": True}
    yarn = {"kind": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False}
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        head_dim=12,
        position={"kind": "rotary", "base": 150000.0, "extension": yarn},
        layers=[{"attention": attention | {"window": 6}}, {"attention": attention}],
        feedforward={
            "activation": "swiglu-clamped",
            "limit": 0.9,
            "bias": True,
            "experts": {"num_experts": 4, "top_k": 2, "router_bias": True},
        },
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.GptOssForCausalLM(config), ours, rules)


def gemma_2() -> Case:
    """Norms on both sides with 1 + weight, both soft-caps, own scale, every second layer local."""
    config = transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=10,
        rms_norm_eps=EPS,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        sliding_window=6,
        attn_implementation="eager",
    )
    attention = {"softcap": 1.5, "scale": 7**-0.5}
    ours = ModelConfig(
        **OURS,
        num_kv_heads=2,
        head_dim=10,
        position="rotary",
        layers=[{"attention": attention | {"window": 6}}, {"attention": attention}],
        feedforward={"activation": "geglu-tanh"},
        norm={"kind": "rmsnorm", "eps": EPS, "unit_offset": True},
        placement="sandwich",
        embedding={"scale": "sqrt"},
        head={"kind": "lm", "softcap": 2.0},
    )
    norms = (*PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return Case(transformers.Gemma2ForCausalLM(config), ours, llama_rules(*norms))


def olmo_2() -> Case:
    config = transformers.Olmo2Config(**SIZES, num_key_value_heads=2, rms_norm_eps=EPS)
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        attention={"qk_norm": "whole"},
        norm={"kind": "rmsnorm", "eps": EPS},
        placement="output",
    )
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return Case(transformers.Olmo2ForCausalLM(config), ours, llama_rules(*norms))


def cohere() -> Case:
    """Parallel after one norm without bias, a norm weight for every head of q and k, adjacent pairs."""
    config = transformers.CohereConfig(
        **SIZES, num_key_value_heads=2, layer_norm_eps=EPS, use_qk_norm=True, logit_scale=0.6
    )
    ours = preset(
        "palm",
        **OURS,
        num_kv_heads=2,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"], "pairing": "adjacent"},
        attention={"qk_norm": "heads"},
        norm={"kind": "layernorm", "eps": EPS, "bias": False},
        head={"kind": "lm", "multiplier": 0.6},
    )
    return Case(transformers.CohereForCausalLM(config), ours, llama_rules("input_layernorm"))


def granite() -> Case:
    """Every multiplier: embedding, attention scale, residual, logits (a division)."""
    config = transformers.GraniteConfig(
        **SIZES,
        num_key_value_heads=2,
        rms_norm_eps=EPS,
        embedding_multiplier=3.0,
        attention_multiplier=0.21,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    )
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        attention={"scale": 0.21},
        norm={"kind": "rmsnorm", "eps": EPS},
        placement={"kind": "pre", "multiplier": 0.4},
        embedding={"scale": 3.0},
        head={"kind": "lm", "multiplier": 1 / 2.5},
    )
    return Case(transformers.GraniteForCausalLM(config), ours, llama_rules(*PRE))


def gpt_2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=40,
        n_inner=HIDDEN,
        layer_norm_epsilon=EPS,
    )

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = both(theirs, "tokens", "transformer.wte") | both(theirs, "decoder.norm", "transformer.ln_f")
        found |= both(theirs, "decoder.positions.0", "transformer.wpe")
        for i in range(LAYERS):
            ours, layer = f"decoder.blocks.{i}", f"transformer.h.{i}"
            for n in (0, 1):
                found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.ln_{n + 1}")
            names = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
            for mine, name in (names | {"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}).items():
                weight, bias = theirs(f"{layer}.{name}.weight").T, theirs(f"{layer}.{name}.bias")  # stored [in, out]
                if mine == "attention.qkv":
                    weight, bias = qkv(*weight.chunk(3), HEADS), qkv(*bias.chunk(3), HEADS)
                found |= {f"{ours}.{mine}.weight": weight, f"{ours}.{mine}.bias": bias}
        return found

    ours = preset("gpt-2", **OURS, max_length=40, norm={"kind": "layernorm", "eps": EPS})
    return Case(transformers.GPT2LMHeadModel(config), ours, rules)


def same_names(prefix: str, names: dict[str, str]) -> Any:
    """Rules for models whose fused projection is already in our order, head by head q, k, v."""

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = {}
        for ours, name in names.items():
            for i in range(config.num_layers if "{}" in ours else 1):
                found |= both(theirs, ours.format(i), prefix + name.format(i))
        if not config.embedding.tied:
            found |= both(theirs, "head", "lm_head")
        return found

    return rules


def bloom(heads: int) -> Case:
    config = transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=DIM, n_layer=LAYERS, n_head=heads, layer_norm_epsilon=EPS
    )
    names = {
        "tokens": "word_embeddings",
        "decoder.embedding_norm": "word_embeddings_layernorm",
        "decoder.norm": "ln_f",
        "decoder.blocks.{}.residual.norms.0": "h.{}.input_layernorm",
        "decoder.blocks.{}.residual.norms.1": "h.{}.post_attention_layernorm",
        "decoder.blocks.{}.attention.qkv": "h.{}.self_attention.query_key_value",
        "decoder.blocks.{}.attention.out": "h.{}.self_attention.dense",
        "decoder.blocks.{}.feedforward.up": "h.{}.mlp.dense_h_to_4h",
        "decoder.blocks.{}.feedforward.down": "h.{}.mlp.dense_4h_to_h",
    }
    sizes = OURS | {"num_heads": heads, "hidden_dim": 4 * DIM}
    ours = preset("bloom", **sizes, norm={"kind": "layernorm", "eps": EPS})
    return Case(transformers.BloomForCausalLM(config), ours, same_names("transformer.", names))


def bloom_four_heads() -> Case:
    return bloom(4)


def bloom_six_heads_left_padded() -> Case:
    case = bloom(6)
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    attention_mask[0, :5] = False
    case.inputs, case.arguments = {"attention_mask": attention_mask.long()}, {"attention_mask": attention_mask}
    return case


def mpt() -> Case:
    """ALiBi, no biases, and queries, keys and values clipped."""
    config = transformers.MptConfig(
        vocab_size=VOCAB, d_model=DIM, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64, layer_norm_epsilon=1e-5
    )
    config.attn_config.clip_qkv = 0.7
    names = {
        "tokens": "wte",
        "decoder.norm": "norm_f",
        "decoder.blocks.{}.residual.norms.0": "blocks.{}.norm_1",
        "decoder.blocks.{}.residual.norms.1": "blocks.{}.norm_2",
        "decoder.blocks.{}.attention.out": "blocks.{}.attn.out_proj",
        "decoder.blocks.{}.feedforward.up": "blocks.{}.ffn.up_proj",
        "decoder.blocks.{}.feedforward.down": "blocks.{}.ffn.down_proj",
    }

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = same_names("transformer.", names)(theirs, config)
        for i in range(LAYERS):
            parts = theirs(f"transformer.blocks.{i}.attn.Wqkv.weight").chunk(3)
            found[f"decoder.blocks.{i}.attention.qkv.weight"] = qkv(*parts, HEADS)
        return found

    ours = preset("mpt", **OURS | {"hidden_dim": 4 * DIM}, attention={"clip": 0.7})
    return Case(transformers.MptForCausalLM(config), ours, rules)


def gpt_neox() -> Case:
    """Parallel with a norm each, half of each head rotated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = transformers.GPTNeoXConfig(**SIZES, layer_norm_eps=EPS, rope_parameters=rope)
    names = {
        "tokens": "gpt_neox.embed_in",
        "decoder.norm": "gpt_neox.final_layer_norm",
        "decoder.blocks.{}.residual.norms.0": "gpt_neox.layers.{}.input_layernorm",
        "decoder.blocks.{}.residual.norms.1": "gpt_neox.layers.{}.post_attention_layernorm",
        "decoder.blocks.{}.attention.qkv": "gpt_neox.layers.{}.attention.query_key_value",
        "decoder.blocks.{}.attention.out": "gpt_neox.layers.{}.attention.dense",
        "decoder.blocks.{}.feedforward.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "decoder.blocks.{}.feedforward.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    }
    ours = ModelConfig(
        **OURS,
        position={"kind": "rotary", "width": DIM // HEADS // 2},
        attention={"bias": ["q", "k", "v", "out"]},
        feedforward={"activation": "gelu", "bias": True},
        norm={"kind": "layernorm", "eps": EPS},
        placement={"kind": "parallel", "shared_norm": False},
        embedding={"tied": False},
    )
    return Case(transformers.GPTNeoXForCausalLM(config), ours, same_names("", names))


def gpt_j() -> Case:
    """Parallel after one norm, adjacent pairs of part of the head, a bias on the head's logits."""
    config = transformers.GPTJConfig(
        vocab_size=VOCAB, n_embd=DIM, n_layer=LAYERS, n_head=HEADS, n_inner=HIDDEN, rotary_dim=8, layer_norm_epsilon=EPS
    )
    names = {
        "tokens": "transformer.wte",
        "decoder.norm": "transformer.ln_f",
        "decoder.blocks.{}.residual.norms.0": "transformer.h.{}.ln_1",
        "decoder.blocks.{}.attention.out": "transformer.h.{}.attn.out_proj",
        "decoder.blocks.{}.feedforward.up": "transformer.h.{}.mlp.fc_in",
        "decoder.blocks.{}.feedforward.down": "transformer.h.{}.mlp.fc_out",
    }

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = same_names("", names)(theirs, config)
        for i in range(LAYERS):
            parts = [f"transformer.h.{i}.attn.{p}_proj" for p in "qkv"]
            found |= fused(theirs, f"decoder.blocks.{i}.attention.qkv", parts, lambda *x: qkv(*x, HEADS))
        return found

    ours = ModelConfig(
        **OURS,
        position={"kind": "rotary", "width": 8, "pairing": "adjacent"},
        feedforward={"activation": "gelu-tanh", "bias": True},
        norm={"kind": "layernorm", "eps": EPS},
        placement="parallel",
        embedding={"tied": False},
        head={"kind": "lm", "bias": True},
    )
    return Case(transformers.GPTJForCausalLM(config), ours, rules)


def opt() -> Case:
    """The 350m kind: post-norm, a narrow token table with projections in and out, positions with an offset of 2."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        ffn_dim=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=40,
        word_embed_proj_dim=20,
        do_layer_norm_before=False,
    )
    names = {
        "tokens": "embed_tokens",
        "tokens.project": "project_in",
        "head.project": "project_out",
        "decoder.positions.0": "embed_positions",
        "decoder.blocks.{}.residual.norms.0": "layers.{}.self_attn_layer_norm",
        "decoder.blocks.{}.residual.norms.1": "layers.{}.final_layer_norm",
        "decoder.blocks.{}.attention.out": "layers.{}.self_attn.out_proj",
        "decoder.blocks.{}.feedforward.up": "layers.{}.fc1",
        "decoder.blocks.{}.feedforward.down": "layers.{}.fc2",
    }

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = same_names("model.decoder.", names)(theirs, config)
        for i in range(LAYERS):
            parts = [f"model.decoder.layers.{i}.self_attn.{p}_proj" for p in "qkv"]
            found |= fused(theirs, f"decoder.blocks.{i}.attention.qkv", parts, lambda *x: qkv(*x, HEADS))
        return found

    ours = ModelConfig(
        **OURS,
        max_length=40,
        position={"kind": "learned", "offset": 2},
        attention={"bias": ["q", "k", "v", "out"]},
        feedforward={"activation": "relu", "bias": True},
        placement="post",
        embedding={"width": 20},
    )
    return Case(transformers.OPTForCausalLM(config), ours, rules)


def bert_rules(prefix: str) -> Any:
    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        names = {
            "tokens": "embeddings.word_embeddings",
            "encoder.token_types": "embeddings.token_type_embeddings",
            "encoder.embedding_norm": "embeddings.LayerNorm",
            "encoder.blocks.{}.attention.out": "encoder.layer.{}.attention.output.dense",
            "encoder.blocks.{}.residual.norms.0": "encoder.layer.{}.attention.output.LayerNorm",
            "encoder.blocks.{}.feedforward.up": "encoder.layer.{}.intermediate.dense",
            "encoder.blocks.{}.feedforward.down": "encoder.layer.{}.output.dense",
            "encoder.blocks.{}.residual.norms.1": "encoder.layer.{}.output.LayerNorm",
        }
        found = same_names(prefix, names)(theirs, config)
        for i in range(LAYERS):
            parts = [f"{prefix}encoder.layer.{i}.attention.self.{p}" for p in ("query", "key", "value")]
            found |= fused(theirs, f"encoder.blocks.{i}.attention.qkv", parts, lambda *x: qkv(*x, HEADS))
        return found

    return rules


def token_types() -> Tensor:
    return torch.randint(0, 2, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))


def right_padding() -> Tensor:
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    attention_mask[1, 15:] = False
    return attention_mask


def bert() -> Case:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=40, layer_norm_eps=EPS)

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = bert_rules("")(theirs, config) | both(theirs, "pooler.dense", "pooler.dense")
        return found | both(theirs, "encoder.positions.0", "embeddings.position_embeddings")

    ours = preset("bert", **OURS, max_length=40, norm={"kind": "layernorm", "eps": EPS})
    about = {"token_types": token_types(), "attention_mask": right_padding()}
    inputs = {"token_type_ids": token_types(), "attention_mask": right_padding().long()}
    return Case(transformers.BertModel(config), ours, rules, inputs, about)


def roformer() -> Case:
    config = transformers.RoFormerConfig(**SIZES, max_position_embeddings=40, layer_norm_eps=EPS, rotary_value=False)

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = bert_rules("roformer.")(theirs, config)
        found |= both(theirs, "head.dense", "cls.predictions.transform.dense")
        found |= both(theirs, "head.norm", "cls.predictions.transform.LayerNorm")
        return found | {"head.bias": theirs("cls.predictions.bias")}

    ours = preset("roformer", **OURS, max_length=40, norm={"kind": "layernorm", "eps": EPS})
    about = {"token_types": token_types(), "attention_mask": right_padding()}
    inputs = {"token_type_ids": token_types(), "attention_mask": right_padding().long()}
    return Case(transformers.RoFormerForMaskedLM(config), ours, rules, inputs, about)


def t5_rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
    found = both(theirs, "tokens", "shared")
    if not config.embedding.tied:
        found |= both(theirs, "head", "lm_head")
    for side in ("encoder", "decoder"):
        found |= both(theirs, f"{side}.norm", f"{side}.final_layer_norm")
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        found |= both(theirs, f"{side}.positions.0", table)
        for i in range(config.depth(side)):
            ours, layer = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            names = [f"{layer}.0.SelfAttention.{p}" for p in "qkv"]
            found |= fused(theirs, f"{ours}.attention.qkv", names, lambda *x: qkv(*x, HEADS))
            found |= both(theirs, f"{ours}.attention.out", f"{layer}.0.SelfAttention.o")
            last = 2 if side == "decoder" else 1
            for n in range(last + 1):
                found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.{n}.layer_norm")
            if side == "decoder":
                cross = f"{layer}.1.EncDecAttention"
                found |= both(theirs, f"{ours}.cross.q", f"{cross}.q")
                found |= fused(theirs, f"{ours}.cross.kv", [f"{cross}.k", f"{cross}.v"], lambda *x: kv(*x, HEADS))
                found |= both(theirs, f"{ours}.cross.out", f"{cross}.o")
            dense = f"{layer}.{last}.DenseReluDense"
            names = [f"{dense}.wi_0", f"{dense}.wi_1"] if config.feedforward.gated else [f"{dense}.wi"]
            found |= fused(theirs, f"{ours}.feedforward.up", names, stacked)
            found |= both(theirs, f"{ours}.feedforward.down", f"{dense}.wo")
    return found


def t5(name: str, **fields: Any) -> Case:
    """Heads wider than their share, more layers in the encoder, and few buckets so that all of them are met."""
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=14,
        d_ff=HIDDEN,
        num_layers=LAYERS,
        num_decoder_layers=2,
        num_heads=HEADS,
        layer_norm_epsilon=EPS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=18,
        **fields,
    )
    ours = preset(
        name,
        **OURS | {"num_layers": 2, "num_encoder_layers": LAYERS, "head_dim": 14},
        position={"kind": "t5", "num_buckets": 8, "max_distance": 18},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    inputs = {"attention_mask": right_padding().long()}
    return Case(
        transformers.T5ForConditionalGeneration(config), ours, t5_rules, inputs, {"attention_mask": right_padding()}
    )


def t5_10() -> Case:
    return t5("t5", feed_forward_proj="relu")


def t5_11() -> Case:
    case = t5("t5-1.1", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    case.theirs.lm_head.weight = nn.Parameter(torch.empty(VOCAB, DIM))  # a head of its own, as the checkpoints have
    return case


def marian() -> Case:
    """An encoder-decoder of 2017 with sines and cosines in halves."""
    config = transformers.MarianConfig(
        vocab_size=VOCAB,
        d_model=DIM,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        max_position_embeddings=40,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=0,
    )

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = both(theirs, "tokens", "model.shared")
        found["head.bias"] = theirs("final_logits_bias")[0]
        for side in ("encoder", "decoder"):
            for i in range(LAYERS):
                ours, layer = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
                names = [f"{layer}.self_attn.{p}_proj" for p in "qkv"]
                found |= fused(theirs, f"{ours}.attention.qkv", names, lambda *x: qkv(*x, HEADS))
                found |= both(theirs, f"{ours}.attention.out", f"{layer}.self_attn.out_proj")
                norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
                for n, norm in enumerate(norms if side == "decoder" else norms[::2]):
                    found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.{norm}")
                if side == "decoder":
                    cross = [f"{layer}.encoder_attn.{p}_proj" for p in "qkv"]
                    found |= both(theirs, f"{ours}.cross.q", cross[0])
                    found |= fused(theirs, f"{ours}.cross.kv", cross[1:], lambda *x: kv(*x, HEADS))
                    found |= both(theirs, f"{ours}.cross.out", f"{layer}.encoder_attn.out_proj")
                found |= both(theirs, f"{ours}.feedforward.up", f"{layer}.fc1")
                found |= both(theirs, f"{ours}.feedforward.down", f"{layer}.fc2")
        return found

    ours = preset(
        "transformer-base",
        **OURS,
        position={"kind": "sinusoidal", "layout": "halves"},
        attention={"bias": ["q", "k", "v", "out"]},
        feedforward={"activation": "silu", "bias": True},
        norm={"kind": "layernorm"},
        head={"kind": "lm", "bias": True},
    )
    inputs = {"attention_mask": right_padding().long()}
    case = Case(transformers.MarianMTModel(config), ours, rules, inputs, {"attention_mask": right_padding()})
    case.theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
    return case


CASES = [
    llama_plain,
    llama_3,
    llama_yarn,
    llama_left_padded,
    mixtral,
    qwen3_moe,
    qwen2_moe,
    gpt_oss,
    gemma_2,
    olmo_2,
    cohere,
    granite,
    gpt_2,
    bloom_four_heads,
    bloom_six_heads_left_padded,
    mpt,
    gpt_neox,
    gpt_j,
    opt,
    bert,
    roformer,
    t5_10,
    t5_11,
    marian,
]


def make(build: Any) -> tuple[Case, Transformer]:
    """Their model redrawn, and ours with the same weights: every one of theirs used, every one of ours given."""
    case = build()
    redraw(case.theirs)
    theirs = Theirs(case.theirs)
    model = Transformer(case.config).eval()
    model.load_state_dict(case.rules(theirs, case.config), strict=True)
    assert theirs.forgotten(case.theirs) == []
    return case, model


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
@torch.no_grad()
def test_logits_are_those_of_transformers(build):
    case, model = make(build)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    target = torch.randint(0, VOCAB, (ROWS, 17), generator=generator)
    seq2seq = case.config.shape == "encoder-decoder"
    every = torch.ones(ROWS, 17 if seq2seq else TOKENS, dtype=torch.bool)
    real = every if seq2seq else case.arguments.get("attention_mask", every)

    record = Record()
    ours = model(tokens, *([target] if seq2seq else []), **case.arguments, record=record)
    more = {"decoder_input_ids": target} if seq2seq else {}
    out = case.theirs(input_ids=tokens, **case.inputs, **more)
    theirs = out.logits if hasattr(out, "logits") else out.last_hidden_state
    assert float(theirs.std()) > 0.1
    # logits of size one after three layers: float32 sums of fifty terms leave 1e-6 to 5e-6
    assert float((ours - theirs)[real].abs().max()) <= 2e-5
    if hasattr(out, "pooler_output"):
        assert float((record.pooled - out.pooler_output).abs().max()) <= 2e-5
