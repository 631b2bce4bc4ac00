"""Random configurations of the decoders of the time before Llama: GPT, GPT-2, GPT-J, GPT-NeoX, OPT, Falcon, ..."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from .cases import EPS, TRAINED, Case, Cases, coin, rope

ROOM = 83  # positions of a learned table: all that is decoded, and some
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


SLOPED = (1, 3, 4, 6, 12)  # heads for ALiBi; only 12 have slopes that are no powers of two


def sizes(rng: random.Random, *names: str, choice: tuple[int, ...] = (1, 2, 3, 4, 6)) -> dict[str, Any]:
    """Vocabulary, width, layers and heads, under their names in a family; heads are often no power of two."""
    heads = rng.choice(choice)
    drawn = (rng.randint(60, 80), heads * rng.choice([6, 10, 16]), rng.choice([2, 3, 4]), heads)
    return dict(zip(names, drawn, strict=True)) | NO_TOKENS


GPT = ("vocab_size", "n_embd", "n_layer", "n_head")
USUAL = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def gpt2_config(rng: random.Random) -> transformers.GPT2Config:
    return transformers.GPT2Config(
        **sizes(rng, *GPT),
        n_positions=ROOM,
        n_inner=rng.choice([None, 40, 72]),
        activation_function=rng.choice(["gelu_new", "gelu", "relu", "silu"]),
        layer_norm_epsilon=rng.choice(EPS),
        scale_attn_weights=coin(rng),
        scale_attn_by_inverse_layer_idx=coin(rng),
        reorder_and_upcast_attn=coin(rng),
        tie_word_embeddings=coin(rng),
    )


def gpt2(rng: random.Random) -> Case:
    return Case(transformers.GPT2LMHeadModel, gpt2_config(rng))


def gpt2_without_head(rng: random.Random) -> Case:
    return Case(transformers.GPT2Model, gpt2_config(rng))


def gpt_neo_config(rng: random.Random) -> transformers.GPTNeoConfig:
    given = sizes(rng, "vocab_size", "hidden_size", "num_layers", "num_heads")
    kinds = ["global", "local", *rng.choices(["global", "local"], k=given["num_layers"] - 2)]
    return transformers.GPTNeoConfig(
        **given,
        attention_types=rng.choice([[[kinds, 1]], [[[kind], 1] for kind in kinds]]),
        window_size=rng.choice([7, 19]),
        max_position_embeddings=ROOM,
        intermediate_size=rng.choice([None, 40, 72]),
        activation_function=rng.choice(["gelu_new", "gelu", "relu", "silu"]),
        layer_norm_epsilon=rng.choice(EPS),
        resid_dropout=0.1,
        embed_dropout=0.2,
        attention_dropout=0.3,
        tie_word_embeddings=coin(rng),
    )


def gpt_neo(rng: random.Random, cls: Any = transformers.GPTNeoForCausalLM) -> Case:
    """Layers come back as the shortest list that repeats to them."""
    return Case(cls, gpt_neo_config(rng), attention="eager", may_differ=("attention_types",))


def gpt_neo_without_head(rng: random.Random) -> Case:
    return gpt_neo(rng, transformers.GPTNeoModel)


def gpt_bigcode(rng: random.Random, cls: Any = transformers.GPTBigCodeForCausalLM) -> Case:
    config = transformers.GPTBigCodeConfig(
        **sizes(rng, *GPT, choice=(2, 3, 4, 6)),
        n_positions=ROOM,
        n_inner=rng.choice([None, 40, 72]),
        activation_function=rng.choice(["gelu_pytorch_tanh", "gelu", "relu"]),
        layer_norm_epsilon=rng.choice(EPS),
        scale_attn_weights=coin(rng),
        multi_query=coin(rng),
        attention_softmax_in_fp32=coin(rng),
        tie_word_embeddings=coin(rng),
    )
    return Case(cls, config)


def gpt_bigcode_without_head(rng: random.Random) -> Case:
    return gpt_bigcode(rng, transformers.GPTBigCodeModel)


def openai_gpt(rng: random.Random, cls: Any = transformers.OpenAIGPTLMHeadModel) -> Case:
    config = transformers.OpenAIGPTConfig(
        **sizes(rng, *GPT),
        n_positions=ROOM,
        afn=rng.choice(["gelu", "relu", "silu"]),
        layer_norm_epsilon=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
    )
    return Case(cls, config, attention="eager")


def openai_gpt_without_head(rng: random.Random) -> Case:
    return openai_gpt(rng, transformers.OpenAIGPTModel)


def codegen(rng: random.Random, cls: Any = transformers.CodeGenForCausalLM) -> Case:
    """Heads of four shards."""
    given = sizes(rng, *GPT, choice=(4, 8))
    width = given["n_embd"] // given["n_head"]
    config = transformers.CodeGenConfig(
        **given,
        n_positions=ROOM,
        n_inner=rng.choice([None, 40, 72]),
        rotary_dim=rng.choice([2, 4, width]),
        activation_function=rng.choice(["gelu_new", "gelu", "relu"]),
        layer_norm_epsilon=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
    )
    return Case(cls, config, attention="eager")


def codegen_without_head(rng: random.Random) -> Case:
    return codegen(rng, transformers.CodeGenModel)


def gptj_config(rng: random.Random) -> transformers.GPTJConfig:
    given = sizes(rng, *GPT)
    width = given["n_embd"] // given["n_head"]
    return transformers.GPTJConfig(
        **given,
        n_positions=ROOM,
        n_inner=rng.choice([None, 40, 72]),
        rotary_dim=rng.choice([2, 4, width]),
        activation_function=rng.choice(["gelu_new", "gelu", "relu"]),
        layer_norm_epsilon=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
    )


def gptj(rng: random.Random) -> Case:
    return Case(transformers.GPTJForCausalLM, gptj_config(rng), attention="eager")


def gptj_without_head(rng: random.Random) -> Case:
    return Case(transformers.GPTJModel, gptj_config(rng), attention="eager")


def gpt_neox_config(rng: random.Random, parameters: dict[str, Any]) -> transformers.GPTNeoXConfig:
    heads, width, share = rng.choice([(2, 16, 0.25), (3, 16, 0.5), (4, 20, 0.4), (6, 10, 1.0)])
    return transformers.GPTNeoXConfig(
        **sizes(rng, *USUAL) | {"hidden_size": heads * width, "num_attention_heads": heads},
        intermediate_size=rng.choice([40, 72]),
        hidden_act=rng.choice(["gelu", "gelu_pytorch_tanh", "relu"]),
        max_position_embeddings=TRAINED,
        layer_norm_eps=rng.choice(EPS),
        use_parallel_residual=coin(rng),
        attention_bias=coin(rng),
        tie_word_embeddings=coin(rng),
        rope_parameters=parameters | {"partial_rotary_factor": share},
    )


def gpt_neox(rng: random.Random) -> Case:
    return Case(transformers.GPTNeoXForCausalLM, gpt_neox_config(rng, rope(rng)))


def gpt_neox_by_length(rng: random.Random) -> Case:
    """Dynamic NTK, whose frequencies depend on the sequence's length."""
    parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": rng.choice([2.0, 5.0])}
    return Case(transformers.GPTNeoXForCausalLM, gpt_neox_config(rng, parameters), crossing=True)


def gpt_neox_without_head(rng: random.Random) -> Case:
    return Case(transformers.GPTNeoXModel, gpt_neox_config(rng, rope(rng)))


def opt_config(rng: random.Random) -> transformers.OPTConfig:
    given = sizes(rng, *USUAL)
    before = coin(rng)
    return transformers.OPTConfig(
        **given,
        ffn_dim=rng.choice([40, 72]),
        max_position_embeddings=ROOM,
        word_embed_proj_dim=rng.choice([None, 14, 100]),
        do_layer_norm_before=before,
        _remove_final_layer_norm=before and coin(rng),
        enable_bias=coin(rng),
        layer_norm_elementwise_affine=coin(rng),
        activation_function=rng.choice(["relu", "gelu", "gelu_new"]),
        tie_word_embeddings=coin(rng),
    )


def opt(rng: random.Random) -> Case:
    return Case(transformers.OPTForCausalLM, opt_config(rng))


def opt_without_head(rng: random.Random) -> Case:
    """Of a narrow token table, hidden states come out in its width."""
    return Case(transformers.OPTModel, opt_config(rng))


BLOOM_GELU = 1e-8  # theirs has sqrt(2 / pi) to eight digits, 0.79788456


def bloom_config(rng: random.Random) -> transformers.BloomConfig:
    return transformers.BloomConfig(
        **sizes(rng, "vocab_size", "hidden_size", "n_layer", "n_head", choice=SLOPED),
        layer_norm_epsilon=rng.choice(EPS),
        apply_residual_connection_post_layernorm=coin(rng),
        tie_word_embeddings=coin(rng),
    )


def bloom(rng: random.Random) -> Case:
    return Case(transformers.BloomForCausalLM, bloom_config(rng), attention="eager", limit_float64=BLOOM_GELU)


def bloom_without_head(rng: random.Random) -> Case:
    return Case(transformers.BloomModel, bloom_config(rng), attention="eager", limit_float64=BLOOM_GELU)


def mpt_config(rng: random.Random, **attention: Any) -> transformers.MptConfig:
    return transformers.MptConfig(
        **sizes(rng, "vocab_size", "d_model", "n_layers", "n_heads", choice=SLOPED),
        max_seq_len=ROOM,
        layer_norm_epsilon=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        attn_config={
            "clip_qkv": rng.choice([None, 0.7]),
            "softmax_scale": rng.choice([None, 0.3]),
            "dtype": "float32",  # transformers puts it here when it loads a model, and not when it makes one
            **attention,
        },
    )


def mpt(rng: random.Random) -> Case:
    return Case(transformers.MptForCausalLM, mpt_config(rng), attention="eager")


def mpt_other_slopes(rng: random.Random) -> Case:
    """transformers computes the slopes for `alibi_bias_max` 8, not for the file's: theirs is given the file's."""

    def use_alibi_bias_max(patch: pytest.MonkeyPatch) -> None:
        def build(model: Any, heads: int, length: int, device: torch.device) -> torch.Tensor:
            most = model.config.attn_config.alibi_bias_max
            return modeling_mpt.build_mpt_alibi_tensor(heads, length, most, device)

        patch.setattr(modeling_mpt.MptModel, "build_mpt_alibi_tensor", build)

    config = mpt_config(rng, alibi_bias_max=rng.choice([4, 16]))
    return Case(transformers.MptForCausalLM, config, attention="eager", patch=use_alibi_bias_max)


def mpt_without_head(rng: random.Random) -> Case:
    return Case(transformers.MptModel, mpt_config(rng), attention="eager")


def falcon_config(rng: random.Random, heads: int, **kind: Any) -> transformers.FalconConfig:
    return transformers.FalconConfig(
        **sizes(rng, *USUAL) | {"hidden_size": heads * rng.choice([6, 10, 16]), "num_attention_heads": heads},
        ffn_hidden_size=rng.choice([None, 40, 72]),
        max_position_embeddings=TRAINED,
        activation=rng.choice(["gelu", "relu", "gelu_pytorch_tanh"]),
        layer_norm_epsilon=rng.choice(EPS),
        bias=coin(rng),
        tie_word_embeddings=coin(rng),
        **kind,
    )


def falcon_older(rng: random.Random, **fixed: Any) -> transformers.FalconConfig:
    """The architecture of the 7B: one key/value head or as many as queries, parallel or in turn."""
    kind = {"multi_query": coin(rng), "parallel_attn": coin(rng)}
    return falcon_config(rng, rng.choice([2, 3, 6]), **kind, rope_parameters=rope(rng), **fixed)


def falcon(rng: random.Random) -> Case:
    return Case(transformers.FalconForCausalLM, falcon_older(rng))


def falcon_newer(rng: random.Random) -> Case:
    """The architecture of the 40B: grouped heads, a norm for each branch or one for both."""
    norms = rng.choice([None, 1, 2])
    heads, groups = rng.choice([(6, 3), (6, 2), (4, 2)] if norms == 1 else [(6, 3), (4, 2), (5, 5), (3, 1)])
    kind = {"new_decoder_architecture": True, "num_kv_heads": groups, "num_ln_in_parallel_attn": norms}
    return Case(transformers.FalconForCausalLM, falcon_config(rng, heads, **kind, rope_parameters=rope(rng)))


def falcon_newer_as_older(rng: random.Random) -> Case:
    """With one norm and no groups the newer architecture is the older one, and comes back as such."""
    kind = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": rng.choice([1, 3])}
    spelling = (*kind, "multi_query")
    return Case(transformers.FalconForCausalLM, falcon_config(rng, 3, **kind), may_differ=spelling)


def falcon_alibi(rng: random.Random) -> Case:
    """The RW models. transformers rounds these slopes to bfloat16; theirs is given BLOOM's, the formula in float32.

    Its own attention code ("eager") counts the bias twice, so the fused one is compared.
    """

    def use_float32_slopes(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)

    kind = {"alibi": True, "multi_query": coin(rng), "parallel_attn": coin(rng)}
    config = falcon_config(rng, rng.choice([3, 12, 17]), **kind)
    return Case(transformers.FalconForCausalLM, config, patch=use_float32_slopes)


def falcon_without_head(rng: random.Random) -> Case:
    return Case(transformers.FalconModel, falcon_older(rng))


CASES: Cases = {
    "gpt2": gpt2,
    "gpt2/without head": gpt2_without_head,
    "gpt_neo": gpt_neo,
    "gpt_neo/without head": gpt_neo_without_head,
    "gpt_bigcode": gpt_bigcode,
    "gpt_bigcode/without head": gpt_bigcode_without_head,
    "openai-gpt": openai_gpt,
    "openai-gpt/without head": openai_gpt_without_head,
    "codegen": codegen,
    "codegen/without head": codegen_without_head,
    "gptj": gptj,
    "gptj/without head": gptj_without_head,
    "gpt_neox": gpt_neox,
    "gpt_neox/by length": gpt_neox_by_length,
    "gpt_neox/without head": gpt_neox_without_head,
    "opt": opt,
    "opt/without head": opt_without_head,
    "bloom": bloom,
    "bloom/without head": bloom_without_head,
    "mpt": mpt,
    "mpt/other slopes": mpt_other_slopes,
    "mpt/without head": mpt_without_head,
    "falcon": falcon,
    "falcon/newer": falcon_newer,
    "falcon/newer as older": falcon_newer_as_older,
    "falcon/alibi": falcon_alibi,
    "falcon/without head": falcon_without_head,
}
