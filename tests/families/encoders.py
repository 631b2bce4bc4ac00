"""Random configurations of encoders."""

from __future__ import annotations

import random
from typing import Any

import transformers

from .cases import Case, Cases, coin, llama_sizes, rope

LONGEST = 60  # positions a table has
ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu"]
SYNONYMS = ("hidden_act",)  # gelu_new and gelu_pytorch_tanh are the same


def sizes(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    heads = rng.choice([2, 3, 4])
    given: dict[str, Any] = {
        "vocab_size": rng.randint(60, 80),
        "hidden_size": heads * rng.choice([6, 8, 14]),
        "intermediate_size": rng.choice([40, 56, 72]),
        "num_hidden_layers": rng.choice([2, 3, 4]),
        "num_attention_heads": heads,
        "max_position_embeddings": LONGEST,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    return given | fixed


def bert_sizes(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    given = {
        "hidden_act": rng.choice(ACTIVATIONS),
        "type_vocab_size": rng.choice([2, 3]),
        "layer_norm_eps": rng.choice([1e-2, 1e-12]),
        "hidden_dropout_prob": rng.choice([0.0, 0.2]),
        "attention_probs_dropout_prob": rng.choice([0.0, 0.3]),
    }
    return sizes(rng, **given) | fixed


def bert(rng: random.Random) -> Case:
    config = transformers.BertConfig(**bert_sizes(rng), classifier_dropout=rng.choice([None, 0.2]))
    return Case(transformers.BertForMaskedLM, config, token_types=True, may_differ=SYNONYMS)


def bert_without_head(rng: random.Random) -> Case:
    config = transformers.BertConfig(**bert_sizes(rng))
    return Case(transformers.BertModel, config, token_types=True, may_differ=SYNONYMS)


def bert_with_both_heads(rng: random.Random) -> Case:
    config = transformers.BertConfig(**bert_sizes(rng))
    return Case(transformers.BertForPreTraining, config, token_types=True, may_differ=SYNONYMS)


def roberta_sizes(rng: random.Random) -> dict[str, Any]:
    """A padding token that no test draws; the table begins after it."""
    given = bert_sizes(rng)
    pad = given["vocab_size"] - rng.choice([1, 4])
    return given | {"pad_token_id": pad, "max_position_embeddings": LONGEST + pad + 1}


def roberta(rng: random.Random) -> Case:
    config = transformers.RobertaConfig(**roberta_sizes(rng))
    return Case(transformers.RobertaForMaskedLM, config, token_types=True, may_differ=SYNONYMS)


def roberta_without_head(rng: random.Random) -> Case:
    config = transformers.RobertaConfig(**roberta_sizes(rng))
    return Case(transformers.RobertaModel, config, token_types=True, may_differ=SYNONYMS)


def xlm_roberta(rng: random.Random) -> Case:
    config = transformers.XLMRobertaConfig(**roberta_sizes(rng))
    return Case(transformers.XLMRobertaForMaskedLM, config, token_types=True, may_differ=SYNONYMS)


def xlm_roberta_without_head(rng: random.Random) -> Case:
    config = transformers.XLMRobertaConfig(**roberta_sizes(rng))
    return Case(transformers.XLMRobertaModel, config, token_types=True, may_differ=SYNONYMS)


def camembert(rng: random.Random) -> Case:
    config = transformers.CamembertConfig(**roberta_sizes(rng))
    return Case(transformers.CamembertForMaskedLM, config, token_types=True, may_differ=SYNONYMS)


def camembert_without_head(rng: random.Random) -> Case:
    config = transformers.CamembertConfig(**roberta_sizes(rng))
    return Case(transformers.CamembertModel, config, token_types=True, may_differ=SYNONYMS)


def mpnet_config(rng: random.Random) -> transformers.MPNetConfig:
    """The table of positions begins after token 1, always its padding."""
    given = bert_sizes(rng, max_position_embeddings=LONGEST + 2, pad_token_id=1)
    del given["type_vocab_size"]
    return transformers.MPNetConfig(**given)


def mpnet(rng: random.Random) -> Case:
    return Case(transformers.MPNetForMaskedLM, mpnet_config(rng), lowest=2, attention="eager", may_differ=SYNONYMS)


def mpnet_without_head(rng: random.Random) -> Case:
    return Case(transformers.MPNetModel, mpnet_config(rng), lowest=2, attention="eager", may_differ=SYNONYMS)


def electra_config(rng: random.Random) -> transformers.ElectraConfig:
    given = bert_sizes(rng)
    return transformers.ElectraConfig(**given, embedding_size=rng.choice([10, given["hidden_size"]]))


def electra(rng: random.Random) -> Case:
    return Case(transformers.ElectraForMaskedLM, electra_config(rng), token_types=True, may_differ=SYNONYMS)


def electra_without_head(rng: random.Random) -> Case:
    return Case(transformers.ElectraModel, electra_config(rng), token_types=True, may_differ=SYNONYMS)


def electra_discriminator(rng: random.Random) -> Case:
    """Its head is kept; the hidden states are compared."""
    return Case(transformers.ElectraForPreTraining, electra_config(rng), token_types=True, may_differ=SYNONYMS)


def nomic_bert_config(rng: random.Random) -> transformers.NomicBertConfig:
    given = bert_sizes(rng) | {"hidden_act": rng.choice(["silu", "gelu", "relu"]), "pad_token_id": 0}
    rope = rope_parameters(rng, 1000.0, 900.0)
    return transformers.NomicBertConfig(**given, head_dim=rng.choice([None, 10]), rope_parameters=rope)


def nomic_bert(rng: random.Random) -> Case:
    return Case(transformers.NomicBertForMaskedLM, nomic_bert_config(rng), token_types=True)


def nomic_bert_without_head(rng: random.Random) -> Case:
    return Case(transformers.NomicBertModel, nomic_bert_config(rng), token_types=True)


def eurobert_config(rng: random.Random) -> transformers.EuroBertConfig:
    return transformers.EuroBertConfig(
        **llama_sizes(rng),
        hidden_act=rng.choice(["silu", "gelu"]),
        rms_norm_eps=rng.choice([1e-2, 1e-5]),
        attention_bias=coin(rng),
        mlp_bias=coin(rng),
        tie_word_embeddings=coin(rng),
        attention_dropout=rng.choice([0.0, 0.2]),
        rope_parameters=rope(rng),
    )


def eurobert(rng: random.Random) -> Case:
    return Case(transformers.EuroBertForMaskedLM, eurobert_config(rng))


def eurobert_without_head(rng: random.Random) -> Case:
    return Case(transformers.EuroBertModel, eurobert_config(rng))


def albert_config(rng: random.Random) -> transformers.AlbertConfig:
    given = bert_sizes(rng, num_hidden_layers=rng.choice([4, 6]))
    width = rng.choice([10, given["hidden_size"], given["hidden_size"] + 6])
    return transformers.AlbertConfig(**given, embedding_size=width, num_hidden_groups=rng.choice([1, 2]))


def albert(rng: random.Random) -> Case:
    return Case(transformers.AlbertForMaskedLM, albert_config(rng), token_types=True, may_differ=SYNONYMS)


def albert_without_head(rng: random.Random) -> Case:
    return Case(transformers.AlbertModel, albert_config(rng), token_types=True, may_differ=SYNONYMS)


def albert_with_both_heads(rng: random.Random) -> Case:
    return Case(transformers.AlbertForPreTraining, albert_config(rng), token_types=True, may_differ=SYNONYMS)


def deberta_v2_config(rng: random.Random) -> transformers.DebertaV2Config:
    """Buckets of which all are met, or a row for every distance."""
    buckets, reach = rng.choice([(8, 18), (12, 40), (-1, 20), (-1, -1), (16, -1)])
    return transformers.DebertaV2Config(
        **bert_sizes(rng, type_vocab_size=rng.choice([0, 2])),
        relative_attention=True,
        position_buckets=buckets,
        max_relative_positions=reach,
        pos_att_type=rng.choice([["p2c", "c2p"], ["c2p"], "p2c|c2p", ["p2c"]]),
        share_att_key=coin(rng),
        norm_rel_ebd=rng.choice(["layer_norm", "none"]),
        position_biased_input=coin(rng),
        pooler_hidden_act=rng.choice(["gelu", "relu"]),
    )


def deberta_v2(rng: random.Random) -> Case:
    config = deberta_v2_config(rng)
    typed = config.type_vocab_size > 0
    cls = transformers.DebertaV2ForMaskedLM
    return Case(cls, config, token_types=typed, attention="eager", may_differ=SYNONYMS)


def deberta_v2_without_head(rng: random.Random) -> Case:
    return Case(transformers.DebertaV2Model, deberta_v2_config(rng), attention="eager", may_differ=SYNONYMS)


def esm_config(rng: random.Random) -> transformers.EsmConfig:
    """Tokens are drawn from all below the padding token, the mask among them."""
    given = roberta_sizes(rng)
    del given["type_vocab_size"], given["hidden_act"]
    return transformers.EsmConfig(
        **given,
        position_embedding_type=rng.choice(["rotary", "absolute"]),
        rope_theta=rng.choice([10000.0, 500.0]),
        token_dropout=coin(rng),
        mask_token_id=7,
        emb_layer_norm_before=coin(rng),
    )


def esm(rng: random.Random) -> Case:
    return Case(transformers.EsmForMaskedLM, esm_config(rng))


def esm_without_head(rng: random.Random) -> Case:
    return Case(transformers.EsmModel, esm_config(rng))


def distilbert_config(rng: random.Random) -> transformers.DistilBertConfig:
    given = sizes(rng)
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    names["intermediate_size"] = "hidden_dim"
    return transformers.DistilBertConfig(
        **{names.get(name, name): value for name, value in given.items()},
        activation=rng.choice(["gelu", "relu"]),
        dropout=rng.choice([0.0, 0.2]),
        attention_dropout=rng.choice([0.0, 0.3]),
        sinusoidal_pos_embds=rng.random() < 0.5,
    )


def distilbert(rng: random.Random) -> Case:
    return Case(transformers.DistilBertForMaskedLM, distilbert_config(rng))


def distilbert_without_head(rng: random.Random) -> Case:
    return Case(transformers.DistilBertModel, distilbert_config(rng))


def roformer_config(rng: random.Random) -> transformers.RoFormerConfig:
    given = bert_sizes(rng)
    width = rng.choice([None, 10, given["hidden_size"] + 6])
    return transformers.RoFormerConfig(**given, embedding_size=width, rotary_value=rng.random() < 0.5)


def roformer(rng: random.Random) -> Case:
    config = roformer_config(rng)
    return Case(transformers.RoFormerForMaskedLM, config, token_types=True, attention="eager", may_differ=SYNONYMS)


def roformer_without_head(rng: random.Random) -> Case:
    config = roformer_config(rng)
    return Case(transformers.RoFormerModel, config, token_types=True, attention="eager", may_differ=SYNONYMS)


def rope_parameters(rng: random.Random, *bases: float) -> dict[str, Any]:
    given: dict[str, Any] = {"rope_theta": rng.choice(bases), "rope_type": rng.choice(["default", "linear", "yarn"])}
    if given["rope_type"] != "default":
        given["factor"] = 3.0
    if given["rope_type"] == "yarn":
        given["original_max_position_embeddings"] = 20
    return given


def modernbert_sizes(rng: random.Random) -> dict[str, Any]:
    given = sizes(rng)
    kinds = ["full_attention", "sliding_attention"]
    more = [rng.choice(kinds) for _ in range(given["num_hidden_layers"] - 2)]
    return given | {
        "hidden_activation": rng.choice(["gelu", "silu", "relu"]),
        "norm_eps": rng.choice([1e-2, 1e-5]),
        "norm_bias": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "decoder_bias": rng.random() < 0.5,
        "classifier_bias": rng.random() < 0.5,
        "classifier_activation": rng.choice(["gelu", "silu", "relu"]),
        "classifier_pooling": rng.choice(["cls", "mean"]),
        "local_attention": rng.choice([2, 8, 16, 24]),
        "layer_types": rng.choice([None, rng.sample(kinds, 2) + more]),
        "rope_parameters": {
            "full_attention": rope_parameters(rng, 160000.0, 900.0),
            "sliding_attention": rope_parameters(rng, 10000.0, 300.0),
        },
        "embedding_dropout": rng.choice([0.0, 0.1]),
        "attention_dropout": rng.choice([0.0, 0.2]),
        "mlp_dropout": rng.choice([0.0, 0.3]),
        "cls_token_id": None,
        "sep_token_id": None,
    }


def modernbert(rng: random.Random) -> Case:
    return Case(transformers.ModernBertForMaskedLM, transformers.ModernBertConfig(**modernbert_sizes(rng)))


def modernbert_without_head(rng: random.Random) -> Case:
    return Case(transformers.ModernBertModel, transformers.ModernBertConfig(**modernbert_sizes(rng)))


def modernbert_of_old(rng: random.Random) -> Case:
    """As in the first checkpoints: one integer for the layer pattern, two rotary bases."""
    config = transformers.ModernBertConfig(**modernbert_sizes(rng) | {"layer_types": None, "rope_parameters": None})
    older_fields = {
        "global_attn_every_n_layers": rng.choice([2, 3]),
        "global_rope_theta": 700.0,
        "local_rope_theta": 200.0,
    }
    older_fields |= {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "gradient_checkpointing": False}
    older_fields |= {"reference_compile": None, "repad_logits_with_grad": False}

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in fields.items() if n not in ("layer_types", "rope_parameters")} | older_fields

    may = tuple(older_fields)
    return Case(transformers.ModernBertForMaskedLM, config, older=older, may_differ=may)


CASES: Cases = {
    "bert": bert,
    "bert/without head": bert_without_head,
    "bert/with both heads": bert_with_both_heads,
    "roberta": roberta,
    "roberta/without head": roberta_without_head,
    "xlm-roberta": xlm_roberta,
    "xlm-roberta/without head": xlm_roberta_without_head,
    "camembert": camembert,
    "camembert/without head": camembert_without_head,
    "mpnet": mpnet,
    "mpnet/without head": mpnet_without_head,
    "electra": electra,
    "electra/without head": electra_without_head,
    "nomic_bert": nomic_bert,
    "nomic_bert/without head": nomic_bert_without_head,
    "eurobert": eurobert,
    "eurobert/without head": eurobert_without_head,
    "albert": albert,
    "albert/without head": albert_without_head,
    "albert/with both heads": albert_with_both_heads,
    "deberta-v2": deberta_v2,
    "deberta-v2/without head": deberta_v2_without_head,
    "esm": esm,
    "esm/without head": esm_without_head,
    "distilbert": distilbert,
    "distilbert/without head": distilbert_without_head,
    "roformer": roformer,
    "roformer/without head": roformer_without_head,
    "modernbert": modernbert,
    "modernbert/without head": modernbert_without_head,
    "modernbert/of old": modernbert_of_old,
}
