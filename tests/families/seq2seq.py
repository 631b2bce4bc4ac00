"""Random configurations of encoder-decoders: T5, mT5, UMT5, BART, mBART, Pegasus, PLBart, Marian, M2M-100."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from torch import nn

from .cases import GATES, Case, Cases, mixed_layer_types, rope

REACH = 70  # more positions than anything here needs, for models that have a table of them


class OwnHead(transformers.T5ForConditionalGeneration):
    """T5 with an untied head, as the files of v1.1 have it; a new T5 of transformers ties it in any case."""

    def __init__(self, config: transformers.T5Config) -> None:
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))


class OwnHeadMT5(transformers.MT5ForConditionalGeneration):
    """The same for mT5."""

    def __init__(self, config: transformers.MT5Config) -> None:
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))


class OwnHeadUMT5(transformers.UMT5ForConditionalGeneration):
    """The same for UMT5."""

    def __init__(self, config: transformers.UMT5Config) -> None:
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))


# What the configuration names as the architecture.
OwnHead.__name__, OwnHeadMT5.__name__ = "T5ForConditionalGeneration", "MT5ForConditionalGeneration"
OwnHeadUMT5.__name__ = "UMT5ForConditionalGeneration"


def t5_sizes(rng: random.Random) -> dict[str, Any]:
    """Stacks of different depths, heads that are not their share of the width, and few buckets, all of them met."""
    heads = rng.choice([2, 3, 4])
    buckets, distance = rng.choice([(8, 18), (12, 30), (16, 40), (32, 128)])
    return {
        "vocab_size": rng.randint(60, 80),
        "d_model": rng.choice([24, 33, 40]),
        "d_kv": rng.choice([6, 9, 14]),
        "d_ff": rng.choice([30, 44, 51]),
        "num_layers": rng.choice([2, 3]),
        "num_decoder_layers": rng.choice([2, 3, 4]),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": distance,
        "layer_norm_epsilon": rng.choice([1e-2, 1e-6]),
        "dropout_rate": rng.choice([0.0, 0.1]),
        "feed_forward_proj": rng.choice(["relu", "gated-gelu", "gated-silu", "gated-relu", "gelu", "gelu_new", "silu"]),
        "decoder_start_token_id": rng.choice([0, 5]),
    }


def t5(rng: random.Random) -> Case:
    """The old flag of a tie says whether what the head reads is scaled; the tie is always there."""
    config = transformers.T5Config(**t5_sizes(rng), tie_word_embeddings=rng.random() < 0.5)
    return Case(transformers.T5ForConditionalGeneration, config)


def t5_own_head(rng: random.Random) -> Case:
    return Case(OwnHead, transformers.T5Config(**t5_sizes(rng), tie_word_embeddings=rng.random() < 0.5))


def t5_without_head(rng: random.Random) -> Case:
    config = transformers.T5Config(**t5_sizes(rng), tie_word_embeddings=rng.random() < 0.5)
    return Case(transformers.T5Model, config)


def t5_encoder(rng: random.Random) -> Case:
    return Case(transformers.T5EncoderModel, transformers.T5Config(**t5_sizes(rng)))


def mt5(rng: random.Random) -> Case:
    cls = rng.choice([transformers.MT5ForConditionalGeneration, OwnHeadMT5])
    return Case(cls, transformers.MT5Config(**t5_sizes(rng)))


def mt5_without_head(rng: random.Random) -> Case:
    cls = rng.choice([transformers.MT5Model, transformers.MT5EncoderModel])
    return Case(cls, transformers.MT5Config(**t5_sizes(rng)))


def umt5(rng: random.Random) -> Case:
    cls = rng.choice([transformers.UMT5ForConditionalGeneration, OwnHeadUMT5])
    return Case(cls, transformers.UMT5Config(**t5_sizes(rng)))


def umt5_without_head(rng: random.Random) -> Case:
    """The encoder alone says in transformers that it is an encoder-decoder."""
    cls = rng.choice([transformers.UMT5Model, transformers.UMT5EncoderModel])
    return Case(cls, transformers.UMT5Config(**t5_sizes(rng)), may_differ=("is_encoder_decoder",))


def switch(rng: random.Random, *classes: str) -> Case:
    """Sparse layers by their number or their step, of both sides alike or not, and rows within the capacity."""
    sizes = t5_sizes(rng) | {"num_layers": rng.choice([2, 3, 4]), "dense_act_fn": rng.choice(["relu", "gelu"])}
    del sizes["feed_forward_proj"]
    for side in ("encoder", "decoder"):
        sizes[f"num_sparse_{side}_layers"] = rng.choice([0, 1, 2, 4])
        if rng.random() < 0.3:
            sizes[f"{side}_sparse_step"] = rng.choice([1, 2, 3])
    config = transformers.SwitchTransformersConfig(
        **sizes,
        num_experts=rng.choice([3, 5]),
        expert_capacity=rng.choice([51, 64]),
        router_bias=rng.random() < 0.5,
        tie_word_embeddings=rng.random() < 0.5,
    )
    counts = tuple(f"num_sparse_{side}_layers" for side in ("encoder", "decoder"))  # which steps take precedence over
    steps = ("encoder_sparse_step", "decoder_sparse_step")
    may = (*counts, *steps, "is_encoder_decoder", "num_experts", "router_bias")  # the last two where no layer is sparse

    cls = rng.choice(classes)
    may += () if cls.endswith("Generation") else ("tie_word_embeddings",)  # of tables alone, which are one here

    def share(model: Any) -> None:
        for side in (model.encoder, getattr(model, "decoder", None)):
            if side is not None and hasattr(model, "shared"):
                side.embed_tokens.weight.copy_(model.shared.weight)

    return Case(getattr(transformers, cls), config, attention="eager", may_differ=may, touch=share)


def bart_sizes(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """Stacks of different depths; no field says a head's width or the norms' epsilon."""
    heads, hidden = rng.choice([2, 3, 4]), rng.choice([30, 44, 51])
    vocab = rng.randint(60, 80)
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "d_model": heads * rng.choice([7, 8, 10, 13]),
        "encoder_layers": rng.choice([2, 3]),
        "decoder_layers": rng.choice([2, 3, 4]),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden,
        "max_position_embeddings": REACH,
        "activation_function": rng.choice(["gelu", "relu", "swish", "gelu_new"]),
        "scale_embedding": rng.random() < 0.5,
        "dropout": rng.choice([0.0, 0.1]),
        "attention_dropout": rng.choice([0.0, 0.2]),
        "activation_dropout": rng.choice([0.0, 0.3]),
        "init_std": rng.choice([0.02, 0.03]),
        "tie_word_embeddings": rng.random() < 0.6,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": rng.choice([2, 4]),
        "forced_eos_token_id": rng.choice([None, 2]),
        "pad_token_id": vocab - rng.choice([1, 2, 3]),  # no token of a text, for models that see it in the text
    }
    return sizes | fixed


def logits_bias(name: str) -> bool:
    return name == "final_logits_bias"


def bart(rng: random.Random) -> Case:
    config = transformers.BartConfig(**bart_sizes(rng))
    return Case(transformers.BartForConditionalGeneration, config, buffers=logits_bias)


def bart_without_head(rng: random.Random) -> Case:
    return Case(transformers.BartModel, transformers.BartConfig(**bart_sizes(rng)))


def mbart(rng: random.Random) -> Case:
    config = transformers.MBartConfig(**bart_sizes(rng))
    return Case(transformers.MBartForConditionalGeneration, config, buffers=logits_bias)


def mbart_without_head(rng: random.Random) -> Case:
    return Case(transformers.MBartModel, transformers.MBartConfig(**bart_sizes(rng)))


def pegasus(rng: random.Random) -> Case:
    config = transformers.PegasusConfig(**bart_sizes(rng))
    return Case(transformers.PegasusForConditionalGeneration, config, buffers=logits_bias)


def pegasus_without_head(rng: random.Random) -> Case:
    return Case(transformers.PegasusModel, transformers.PegasusConfig(**bart_sizes(rng)))


def plbart(rng: random.Random) -> Case:
    config = transformers.PLBartConfig(**bart_sizes(rng))
    return Case(transformers.PLBartForConditionalGeneration, config, buffers=logits_bias)


def plbart_without_head(rng: random.Random) -> Case:
    return Case(transformers.PLBartModel, transformers.PLBartConfig(**bart_sizes(rng)))


def marian(rng: random.Random) -> Case:
    config = transformers.MarianConfig(**bart_sizes(rng, tie_word_embeddings=True))
    return Case(transformers.MarianMTModel, config, buffers=logits_bias)


def marian_two_vocabularies(rng: random.Random) -> Case:
    sizes = bart_sizes(rng)
    more = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": sizes["vocab_size"] + rng.choice([0, 3])}
    config = transformers.MarianConfig(**sizes, **more)
    return Case(transformers.MarianMTModel, config, buffers=logits_bias)


def marian_without_head(rng: random.Random) -> Case:
    share = {"share_encoder_decoder_embeddings": rng.random() < 0.5}
    config = transformers.MarianConfig(**bart_sizes(rng, tie_word_embeddings=True), **share)
    return Case(transformers.MarianModel, config)


def m2m_100(rng: random.Random) -> Case:
    """Positions beyond the table that transformers begins with; the padding token is never the likeliest."""
    config = transformers.M2M100Config(**bart_sizes(rng, max_position_embeddings=80))

    def unlikely(model: Any) -> None:
        model.lm_head.weight[config.pad_token_id] = 0.0

    return Case(transformers.M2M100ForConditionalGeneration, config, touch=unlikely)


def m2m_100_without_head(rng: random.Random) -> Case:
    config = transformers.M2M100Config(**bart_sizes(rng, max_position_embeddings=80))
    return Case(transformers.M2M100Model, config)


def t5gemma(rng: random.Random, cls: str = "T5GemmaForConditionalGeneration") -> Case:
    """Sides that are alike, or differ in width, heads, depth, vocabulary and windows."""
    vocab = rng.randint(60, 80)
    shared: dict[str, Any] = {
        "hidden_activation": rng.choice(GATES),
        "rms_norm_eps": rng.choice([1e-2, 1e-6]),
        "query_pre_attn_scalar": rng.choice([9, 16]),
        "attn_logit_softcapping": rng.choice([None, 3.0]),
        "final_logit_softcapping": rng.choice([None, 5.0]),
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": rope(rng),
        "max_position_embeddings": 40,
        "pad_token_id": vocab - 1,
        "dtype": "float32",  # as loading sets it inside
    }

    def side() -> dict[str, Any]:
        heads, layers = rng.choice([2, 4]), rng.choice([2, 3])
        return {
            "vocab_size": vocab + rng.choice([0, 3]),
            "hidden_size": heads * rng.choice([8, 12]),
            "intermediate_size": rng.choice([40, 56]),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([1, 2]),
            "head_dim": rng.choice([10, 16]),
            "sliding_window": rng.choice([7, 19]),
            "layer_types": rng.choice([None, mixed_layer_types(rng, layers)]),
        }

    decoder = side() | {"vocab_size": vocab}
    encoder = rng.choice([decoder, side()])
    config = transformers.T5GemmaConfig(
        encoder=transformers.T5GemmaModuleConfig(**encoder, **shared),
        decoder=transformers.T5GemmaModuleConfig(**decoder, **shared),
        tie_word_embeddings=rng.random() < 0.5,
        dropout_rate=0.1,
        attention_dropout=0.2,
        vocab_size=vocab,
    )
    return Case(getattr(transformers, cls), config, attention="eager")


CASES: Cases = {
    "t5gemma": t5gemma,
    "t5gemma/without head": lambda rng: t5gemma(rng, "T5GemmaModel"),
    "t5": t5,
    "t5/own head": t5_own_head,
    "t5/without head": t5_without_head,
    "t5/encoder": t5_encoder,
    "mt5": mt5,
    "mt5/without head": mt5_without_head,
    "switch_transformers": lambda rng: switch(rng, "SwitchTransformersForConditionalGeneration"),
    "switch_transformers/without head": lambda rng: switch(
        rng, "SwitchTransformersModel", "SwitchTransformersEncoderModel"
    ),
    "umt5": umt5,
    "umt5/without head": umt5_without_head,
    "bart": bart,
    "bart/without head": bart_without_head,
    "mbart": mbart,
    "mbart/without head": mbart_without_head,
    "pegasus": pegasus,
    "pegasus/without head": pegasus_without_head,
    "plbart": plbart,
    "plbart/without head": plbart_without_head,
    "marian": marian,
    "marian/two vocabularies": marian_two_vocabularies,
    "marian/without head": marian_without_head,
    "m2m_100": m2m_100,
    "m2m_100/without head": m2m_100_without_head,
}
