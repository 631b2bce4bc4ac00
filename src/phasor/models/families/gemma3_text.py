"""Gemma 3, its text models: norms on queries and keys, and other rotary positions in local layers."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Field, Pinned, Switch
from phasor.models.families._gemma import AROUND, GemmaLike, QueryScalar
from phasor.models.families._llama import KVHeads, score_classifiers
from phasor.models.layer_types import FULL, SLIDING, LayerTypes
from phasor.models.rope import RopeParametersByLayer


class Gemma3(GemmaLike):
    """A decoder, or with `use_bidirectional_attention` an encoder (EmbeddingGemma)."""

    model_type = "gemma3_text"
    title = "Gemma 3 (text)"
    architectures = {"lm": "Gemma3ForCausalLM", "none": "Gemma3TextModel"}
    classifiers = score_classifiers("Gemma3Text", tokens=False)
    shapes = ("decoder", "encoder")
    norms = AROUND
    parts = GemmaLike.parts | {"placement": "sandwich", "attention.qk_norm": "head"}
    fields = GemmaLike.fields | {
        "num_key_value_heads": KVHeads(4),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_activation": Activation("gelu_pytorch_tanh", GATES),
        "query_pre_attn_scalar": QueryScalar(),
        "attn_logit_softcapping": Pinned(None),
        "final_logit_softcapping": Field("head.softcap", default=None),
        "use_bidirectional_attention": Switch("shape", on="encoder", off="decoder", default=False),
        "layer_types": LayerTypes(
            lambda f, draft, i: (i + 1) % f.positive("sliding_window_pattern", 6) != 0, absent=4096
        ),
        "rope_parameters": RopeParametersByLayer(
            {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}, scaled=(FULL,)
        ),
    }
    harmless = frozenset({"_sliding_window_pattern", "cache_implementation", "hidden_act"})


FAMILY = Gemma3()
