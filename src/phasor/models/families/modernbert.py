"""ModernBERT: a pre-norm encoder with rotary positions, local and global layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import AttentionConfig, LayerNormConfig, MaskedHeadConfig, ModelConfig, PreConfig
from phasor.models.families._layers import FULL, SLIDING, read_types, vary_layers, write_types
from phasor.models.family import ACTIVATIONS, GATES, Family, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Parts, Rule, linear
from phasor.models.rope import read_rotary_by_layer, write_rotary
from phasor.nn.positions import RotaryConfig

BASES = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}


class ModernBert(Family):
    """GeGLU, an embedding norm in place of the first block's own, and two sets of rotary frequencies.

    `local_attention` counts the tokens a local layer sees on both sides.
    """

    model_type = "modernbert"
    title = "ModernBERT"
    architectures = {"mlm": "ModernBertForMaskedLM", "none": "ModernBertModel"}
    unprefixed = ("head.", "decoder.")
    embedding = "model.embeddings.tok_embeddings.weight"
    head = "decoder.weight"
    # Of training, of other heads, of fast code, and what other encoders have in these places.
    harmless = frozenset(
        """
        classifier_activation classifier_bias classifier_dropout classifier_pooling cls_token_id decoder_bias
        deterministic_flash_attn initializer_cutoff_factor layer_norm_eps position_embedding_type reference_compile
        repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
        """.split()  # noqa: SIM905
    )

    def read(self, f: Fields) -> ModelConfig:
        kind, dim, heads = self.head_kind(f), f.get("hidden_size"), f.get("num_attention_heads")
        bias, window = f.get("attention_bias", False), f.get("local_attention", 128) // 2 + 1
        f.expect("rope_theta", None)
        head: dict[str, Any] = {"kind": kind}
        if kind == "mlm":
            head["activation"] = f.choose("classifier_activation", ACTIVATIONS, "gelu")
            head |= {"bias": f.get("decoder_bias", True), "dense_bias": f.get("classifier_bias", False)}
        sizes: dict[str, Any] = {
            "shape": "encoder",
            "vocab_size": f.get("vocab_size"),
            "dim": dim,
            "hidden_dim": f.get("intermediate_size"),
            "num_layers": f.get("num_hidden_layers"),
            "num_heads": heads,
            "max_length": f.get("max_position_embeddings", 8192),
            "attention": AttentionConfig(bias=("q", "k", "v", "out") if bias else ()),
            "feedforward": {
                "activation": f.choose("hidden_activation", GATES, "gelu"),
                "bias": f.get("mlp_bias", False),
            },
            "norm": LayerNormConfig(eps=f.get("norm_eps", 1e-5), bias=f.get("norm_bias", False)),
            "placement": PreConfig(first_norm=False),
            "embedding": {"norm": True, "tied": f.get("tie_word_embeddings", True)},
            "head": head,
            "dropout": {
                "embedding": f.get("embedding_dropout", 0.0),
                "attention": f.get("attention_dropout", 0.0),
                "feedforward": f.get("mlp_dropout", 0.0),
            },
            "init": {"kind": "normal", "std": f.get("initializer_range", 0.02)},
        }
        plain = ModelConfig(**sizes)
        f.expect("head_dim", plain.head_dim)
        bases = {layer: f.get(*base) for layer, base in BASES.items()}
        schemes = read_rotary_by_layer(f, plain.head_dim, plain.max_length, bases, scaled=bases)
        seeing = {FULL: plain.attention, SLIDING: plain.attention.replace(window=window)}
        every = f.positive("global_attn_every_n_layers", 3)
        layers = read_types(f, [SLIDING if i % every else FULL for i in range(plain.num_layers)])
        return vary_layers(
            plain.replace(position=schemes[FULL]),
            position=[schemes[layer] for layer in layers],
            attention=[seeing[layer] for layer in layers],
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        norm, head = require_kind(config.norm, LayerNormConfig), config.head
        fields: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "intermediate_size": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_length,
            "hidden_activation": activation_name(config.feedforward.activation),
            "attention_bias": bool(config.attention.bias),
            "mlp_bias": config.feedforward.bias,
            "norm_eps": norm.eps,
            "norm_bias": norm.bias,
            "embedding_dropout": config.dropout.embedding,
            "attention_dropout": config.dropout.attention,
            "mlp_dropout": config.dropout.feedforward,
            "initializer_range": getattr(config.init, "std", 0.02),
        }
        if isinstance(head, MaskedHeadConfig):
            fields["classifier_activation"] = activation_name(head.activation)
            fields |= {"decoder_bias": head.bias, "classifier_bias": head.dense_bias}
        fields |= write_types(config)
        window = fields.pop("sliding_window", None)
        if window is not None:
            fields["local_attention"] = 2 * (window - 1)
        schemes = {FULL: config.position}
        schemes |= {layer: config.layer(i).position for i, layer in enumerate(fields["layer_types"])}
        fields["rope_parameters"] = {
            layer: write_rotary(require_kind(position, RotaryConfig), config) for layer, position in schemes.items()
        }
        return fields

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        return () if config.has_logits else ("head.*", "decoder.*")

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        block, layer = "encoder.blocks.{i}", "model.layers.{i}"
        yield Rule("tokens.weight", "model.embeddings.tok_embeddings.weight")
        yield from linear("encoder.embedding_norm", "model.embeddings.norm")
        yield from linear(f"{block}.attention.qkv", f"{layer}.attn.Wqkv", Parts("qkv"))
        yield from linear(f"{block}.attention.out", f"{layer}.attn.Wo")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.attn_norm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.Wi")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.Wo")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.mlp_norm")
        yield from linear("encoder.norm", "model.final_norm")
        yield from linear("head.dense", "head.dense")
        yield from linear("head.norm", "head.norm")
        yield from linear("head", "decoder")


FAMILY = ModernBert()
