"""StarCoder, SantaCoder and their relatives of 2023."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Draft, Field, Pinned, SameAs
from phasor.models.families._gpt import GPTLike
from phasor.models.families.gpt2 import GPT2, ScaledScores
from phasor.models.layout import SAME


class MultiQuery(Field):
    """Whether all query heads share one key/value head."""

    def decode(self, value: Any, draft: Draft) -> Any:
        return 1 if value else draft["num_heads"]

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return value == 1


class GPTBigCode(GPT2):
    """GPT-2 with one key/value head, or with heads whose queries, keys and values lie side by side."""

    model_type = "gpt_bigcode"
    title = "StarCoder"
    architectures = {"lm": "GPTBigCodeForCausalLM", "none": "GPTBigCodeModel"}
    first_choice = False
    fields = {name: entry for name, entry in GPT2.fields.items() if name != "scale_attn_by_inverse_layer_idx"} | {
        "activation_function": Activation("gelu_pytorch_tanh", ACTIVATIONS),
        "scale_attn_weights": ScaledScores(),
        "multi_query": MultiQuery("num_kv_heads", default=True),
        "num_key_value_heads": Pinned(SameAs("num_kv_heads")),
    }
    # The precision in which scores and their softmax are computed.
    harmless = GPTLike.harmless | {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"}
    qkv, matrices = SAME, SAME


FAMILY = GPTBigCode()
