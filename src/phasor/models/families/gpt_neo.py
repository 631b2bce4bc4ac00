"""GPT-Neo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Draft, Field, FieldEntry, InitStd, TableLength
from phasor.models.families._gpt import InnerDim
from phasor.models.family import Family
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, linear, projections

GLOBAL, LOCAL = "global", "local"


class AttentionTypes(FieldEntry):
    """`attention_types`: lists of global and local layers, each with how often it repeats, and the local window."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        count, given = draft.config().num_layers, f.get(name, [[[GLOBAL, LOCAL], 12]])
        try:
            types = [kind for kinds, times in given for kind in list(kinds) * min(times, count)]
        except (TypeError, ValueError):
            types = []
        if len(types) != count or not all(kind in (GLOBAL, LOCAL) for kind in types):
            raise ValueError(
                f"{f.file}: {name} must give {count} times {GLOBAL} or {LOCAL}, as in "
                f"[[[{GLOBAL!r}, {LOCAL!r}], {count // 2}]], not {json_repr(given)}"
            )
        f.expect("attention_layers", types)
        window = f.get("window_size", 256)
        draft.layers["attention.window"] = [window if kind == LOCAL else None for kind in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        windows = [config.layer(i).attention.window for i in range(config.num_layers)]
        types = [GLOBAL if window is None else LOCAL for window in windows]
        period = next(n for n in range(1, len(types) + 1) if types[n:] == types[:-n] and len(types) % n == 0)
        fields = {name: [[types[:period], len(types) // period]], "attention_layers": types}
        window = next((window for window in windows if window is not None), None)
        return fields if window is None else fields | {"window_size": window}


class GPTNeo(Family):
    """Pre-norm, a learned table of positions, scores as they are, windows in every other layer."""

    model_type = "gpt_neo"
    title = "GPT-Neo"
    architectures = {"lm": "GPTNeoForCausalLM", "none": "GPTNeoModel"}
    prefix = "transformer."
    embedding = "transformer.wte.weight"
    derived = ("transformer.h.*.attn.attention.bias", "transformer.h.*.attn.attention.masked_bias")
    parts = Family.parts | {
        "position": "learned",
        "norm": "layernorm",
        "attention.scale": 1.0,
        "attention.bias": ("out",),
        "feedforward.bias": True,
    }
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "intermediate_size": InnerDim(),
        "num_layers": Field("num_layers", alias="num_hidden_layers"),
        "num_heads": Field("num_heads", alias="num_attention_heads"),
        "max_position_embeddings": TableLength(default=2048),
        "activation_function": Activation("gelu_new", ACTIVATIONS, written={"gelu-tanh": "gelu_new"}),
        "layer_norm_epsilon": Field("norm.eps", default=1e-5),
        "embed_dropout": Field("dropout.embedding", default=0.0),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "resid_dropout": Field("dropout.residual", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "attention_types": AttentionTypes(),
    }
    harmless = frozenset(
        """
        classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj
        """.split()  # noqa: SIM905
    )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("decoder.positions.0.weight", "transformer.wpe.weight")
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "transformer.ln_f")
        block, layer = "decoder.blocks.{i}", "transformer.h.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.ln_1")
        yield from projections(f"{block}.attention", f"{layer}.attn.attention")
        yield from linear(f"{block}.attention.out", f"{layer}.attn.attention.out_proj")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.ln_2")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.c_fc")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.c_proj")


FAMILY = GPTNeo()
