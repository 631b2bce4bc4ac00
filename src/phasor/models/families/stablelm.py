"""StableLM 3B 4E1T, StableLM 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig, ParallelConfig, PreConfig
from phasor.models.entries import GATES, Activation, Bias, Draft, Field, Pinned, SameAs, Switch
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.models.rope import RopeParameters


class HeadNorms(Field):
    """Norms without a bias on each head of queries and keys."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if self.value(f, name, draft):
            draft.values |= {"attention.qk_norm": "heads", "attention.qk_norm_bias": False}

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return value != "none"


class StableLM(LlamaLike):
    """Llama with LayerNorm, rotary on a quarter of each head, and perhaps parallel sub-layers and norms on heads."""

    model_type = "stablelm"
    title = "StableLM"
    architectures = {"lm": "StableLmForCausalLM", "none": "StableLmModel"}
    parts = LlamaLike.parts | {"norm": "layernorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(32),
        "head_dim": Pinned(SameAs("head_dim")),
        "max_position_embeddings": Field("max_length", default=4096),
        "hidden_act": Activation("silu", GATES),
        "use_qkv_bias": Bias(False, ("q", "k", "v")),
        "qk_layernorm": HeadNorms("attention.qk_norm", default=False),
        "layer_norm_eps": Field("norm.eps", default=1e-5),
        "hidden_dropout": Pinned(0.0),  # on the feed-forward network alone
        "rope_parameters": RopeParameters(partial=0.25),
        "use_parallel_residual": Switch("placement", on=ParallelConfig(), off=PreConfig(), default=False),
    }

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")
        for part in "qk":
            yield Rule(f"{ours}.{part}_norm.weight", f"{theirs}.{part}_layernorm.norms.{{e}}.weight")


FAMILY = StableLM()
