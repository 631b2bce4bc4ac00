"""Gemma 2: soft-caps, norms on both sides, every second layer local."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Field, Pinned
from phasor.models.families._gemma import AROUND, GemmaLike, QueryScalar
from phasor.models.families._llama import KVHeads, score_classifiers
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import RopeParameters


class Gemma2(GemmaLike):
    """The scores' scale is a field; a soft-cap of null is none, one left out is the usual."""

    model_type = "gemma2"
    title = "Gemma 2"
    architectures = {"lm": "Gemma2ForCausalLM", "none": "Gemma2Model"}
    classifiers = score_classifiers("Gemma2")
    norms = AROUND
    parts = GemmaLike.parts | {"placement": "sandwich"}
    fields = GemmaLike.fields | {
        "num_key_value_heads": KVHeads(4),
        "hidden_activation": Activation("gelu_pytorch_tanh", GATES),
        "query_pre_attn_scalar": QueryScalar(),
        "attn_logit_softcapping": Field("attention.softcap", default=None, absent=50.0),
        "final_logit_softcapping": Field("head.softcap", default=None, absent=30.0),
        "use_bidirectional_attention": Pinned(False),
        "layer_types": LayerTypes(lambda f, draft, i: i % 2 == 0, absent=4096),
        "rope_parameters": RopeParameters(),
    }
    # older files repeat hidden_activation and sliding_window under names nothing reads
    harmless = frozenset({"cache_implementation", "hidden_act", "sliding_window_size"})


FAMILY = Gemma2()
