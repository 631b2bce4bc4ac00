"""NomicBERT: BERT with rotary positions, a gated feed-forward network, and no biases in its blocks."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, GATES, Activation, Draft, Field, Pinned
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.fields import Fields
from phasor.models.layout import Parts, Rule, glu, linear
from phasor.models.rope import RopeParameters

NOT_BERTS = ("position", "attention.bias", "feedforward.bias")


class HiddenAct(Activation):
    """The activation of the gate, and of the masked-language-model head."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        if draft.has_logits:
            draft["head.activation"] = f.choose(name, ACTIVATIONS, self.default)


class NomicBert(BertLike):
    """SwiGLU and rotary positions in BERT's post-norm blocks.

    Published files name the fields as GPT-2 does, beside options of their training code that must be off here.
    """

    model_type = "nomic_bert"
    title = "NomicBERT"
    architectures = {"mlm": "NomicBertForMaskedLM", "none": "NomicBertModel"}
    classifiers = bert_classifiers("NomicBert", {"pooler.dense": "nomic_bert.pooler.dense", "head.score": "classifier"})
    prefix = "nomic_bert."
    unprefixed = ("cls.",)
    embedding = "nomic_bert.embeddings.word_embeddings.weight"
    head = "cls.predictions.decoder.weight"
    copies = {
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    }
    transform = ("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm")
    has_pooler = False
    parts = {n: part for n, part in BertLike.parts.items() if n not in NOT_BERTS}
    fields = BertLike.fields | {
        "hidden_size": Field("dim", default=768, fallback="n_embd"),
        "intermediate_size": Field("hidden_dim", default=3072, fallback="n_inner"),
        "num_hidden_layers": Field("num_layers", default=12, fallback="n_layer"),
        "num_attention_heads": Field("num_heads", default=12, fallback="n_head"),
        "head_dim": Field("head_dim", default=None),
        "max_position_embeddings": Field("max_length", default=2048),
        "hidden_act": HiddenAct("silu", GATES),
        "hidden_dropout_prob": Field("dropout.residual", "dropout.embedding", default=0.0, fallback="resid_pdrop"),
        "attention_probs_dropout_prob": Field("dropout.attention", default=0.0, fallback="attn_pdrop"),
        "layer_norm_eps": Field("norm.eps", default=1e-12, fallback="layer_norm_epsilon"),
        "rope_parameters": RopeParameters(base=1000.0),
        "activation_function": Pinned("swiglu"),
        "causal": Pinned(False),
        "mlp_fc1_bias": Pinned(False),
        "mlp_fc2_bias": Pinned(False),
        "num_experts": Pinned(0),
        "parallel_block": Pinned(False),
        "prenorm": Pinned(False),
        "qkv_proj_bias": Pinned(False),
        "rotary_emb_base": Pinned(1000),
        "rotary_emb_fraction": Pinned(1.0),
        "rotary_emb_interleaved": Pinned(False),
        "rotary_emb_scale_base": Pinned(None),
        "rotary_scaling_factor": Pinned(None),
        "scale_attn_by_inverse_layer_idx": Pinned(False),
        "scale_attn_weights": Pinned(True),
        "use_rms_norm": Pinned(False),
    }
    # Of training code, and of lengths that only another scaling of the angles reaches.
    harmless = BertLike.harmless | frozenset(
        """
        dense_seq_output embd_pdrop fused_bias_fc fused_dropout_add_ln max_trained_positions n_positions
        pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn summary_proj_to_labels use_flash_attn
        use_xentropy
        """.split()  # noqa: SIM905
    )
    unsupported = frozenset()

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        block, layer = "encoder.blocks.{i}", "nomic_bert.encoder.layers.{i}"
        yield from self.embedding_rules()
        yield from linear("encoder.embedding_norm", "nomic_bert.emb_ln")
        yield from linear(f"{block}.attention.qkv", f"{layer}.attn.Wqkv", Parts("qkv"))
        yield from linear(f"{block}.attention.out", f"{layer}.attn.out_proj")
        yield from linear(f"{block}.residual.norms.0", f"{layer}.norm1")
        yield from glu(f"{block}.feedforward.up", f"{layer}.mlp.fc12", f"{layer}.mlp.fc11")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.fc2")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.norm2")
        yield from self.head_rules(config)


FAMILY = NomicBert()
