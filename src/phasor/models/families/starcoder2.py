"""StarCoder2."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import ACTIVATIONS, Activation, Bias, Field, HeadDim, Pinned
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.layout import Rule, linear
from phasor.models.rope import RopeParameters


class Starcoder2(LlamaLike):
    """LayerNorm, rotary, a plain feed-forward network, biases everywhere, and a window in every layer."""

    model_type = "starcoder2"
    title = "StarCoder2"
    architectures = {"lm": "Starcoder2ForCausalLM", "none": "Starcoder2Model"}
    parts = LlamaLike.parts | {"norm": "layernorm"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(2),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=4096),
        "tie_word_embeddings": Field("embedding.tied", default=False, absent=True),
        "hidden_act": Activation("gelu_pytorch_tanh", ACTIVATIONS),
        "use_bias": Bias(True, feedforward=True),
        "sliding_window": Field("attention.window", default=None),
        "norm_epsilon": Field("norm.eps", default=1e-5),
        "residual_dropout": Field("dropout.residual", default=0.0),
        "embedding_dropout": Field("dropout.embedding", default=0.0),
        "mlp_type": Pinned("default"),
        "norm_type": Pinned("layer_norm"),
        "rope_parameters": RopeParameters(),
    }
    harmless = frozenset({"rms_norm_eps"})  # stands in files beside the epsilon of its LayerNorms

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.up", f"{theirs}.c_fc")
        yield from linear(f"{ours}.down", f"{theirs}.c_proj")


FAMILY = Starcoder2()
