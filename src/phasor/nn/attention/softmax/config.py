"""The configuration of softmax attention."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.model import ModelConfig
from phasor.config.parts import LayerNormConfig, NoNormConfig, NormConfig
from phasor.config.schema import MOST_FEATURES, MOST_HEAD_DIM, not_negative, positive
from phasor.config.sparse import ChunkedConfig, SparseConfig
from phasor.config.weights import Weight, Weights, linear, with_prefixes

Projection = Literal["q", "k", "v", "out"]

QK_NORMS = {
    "none": "queries and keys as projected",
    "head": "each head normalized, one weight shared by all heads (Qwen 3, Gemma 3)",
    "heads": "each head normalized, one weight per head (Cohere, StableLM)",
    "whole": "all heads normalized together (OLMo 2)",
}


class SoftmaxAttentionConfig(AttentionConfig, kind="softmax"):
    """softmax(q k^T * scale) v: multi-head, grouped-query or multi-query, by ModelConfig's numbers of heads.

    `head_dim` and `num_kv_heads` stand for the model's in the layers with this attention. `window` is the number of
    keys a query attends to, its own included; `sink_tokens` keep the first tokens visible beyond it, at their true
    distance or, with `cap_sinks`, at most as far as window and sinks are long. `sink_logits` gives every head a learned
    logit in the softmax. `qk_norm_bias=False` leaves the bias out of the norms of queries and keys where the model's
    other norms have one (StableLM), and `qk_norm_weight=False` leaves out all that is learned (Llama 4). With
    `qk_norm_after_positions` what is normalized are rotated queries and keys (HunYuan, Llama 4). `sparse` is a pattern
    of the keys that a query attends to, out of those that the mask and the window show. With `value_is_key` values are
    not projected: they are the projected keys, before the norm of keys and positions. `v_norm` normalizes the values of
    each head, with nothing learned. With `shared_kv` a layer projects queries alone, and attends to the keys and values
    of the last layer before it that has the same attention but for this field, and the same positions. With
    `output_gate` every feature of the results is multiplied by the sigmoid of a projection of the input (Qwen3-Next).
    `bias` names the projections that have one, out of those that there are; gates have one where queries, keys and
    values do.

    >>> SoftmaxAttentionConfig(window=4096, sink_tokens=4).sink_tokens
    4
    """

    supports_cross: ClassVar[bool] = True

    head_dim: int | None = None
    num_kv_heads: int | None = None
    bias: tuple[Projection, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    qk_norm: Literal["none", "head", "heads", "whole"] = "none"
    qk_norm_bias: bool = True
    qk_norm_weight: bool = True
    qk_norm_after_positions: bool = False
    value_is_key: bool = False
    v_norm: bool = False
    shared_kv: bool = False
    output_gate: bool = False
    clip: float | None = None
    sink_logits: bool = False
    window: int | None = None
    sink_tokens: int = 0
    cap_sinks: bool = False
    sparse: SparseConfig | None = None

    def check(self) -> None:
        positive(self, "scale", "softcap", "clip", "window")
        positive(self, "head_dim", most=MOST_HEAD_DIM)
        positive(self, "num_kv_heads", most=MOST_FEATURES)
        not_negative(self, "sink_tokens")
        name = type(self).__name__
        if self.sink_tokens and self.window is None:
            raise ValueError(
                f"{name}.sink_tokens={self.sink_tokens} needs a window: without one all tokens are visible"
            )
        if not self.qk_norm_bias and self.qk_norm == "none":
            raise ValueError(f"{name}.qk_norm_bias=False needs qk_norm: there is no norm to leave the bias out of")
        if not self.qk_norm_weight and self.qk_norm == "none":
            raise ValueError(f"{name}.qk_norm_weight=False needs qk_norm: there is no norm to leave the weight out of")
        if self.qk_norm_after_positions and self.qk_norm == "none":
            raise ValueError(f"{name}.qk_norm_after_positions needs qk_norm: there is no norm to move")
        if self.cap_sinks and not self.sink_tokens:
            raise ValueError(f"{name}.cap_sinks needs sink_tokens: it caps the distance to them")
        if self.cap_sinks and self.shared_kv:
            raise ValueError(f"{name}.cap_sinks is for layers that project their own keys, and shared_kv is set")
        if self.output_gate and self.shared_kv:
            raise ValueError(f"{name}.output_gate is projected along with keys, and shared_kv leaves those out")
        if len(set(self.bias)) != len(self.bias):
            raise ValueError(f"{name}.bias names a projection twice: {list(self.bias)}")
        if self.sparse is not None and self.sink_tokens:
            raise ValueError(
                f"{name}.sink_tokens={self.sink_tokens} is for a window without a pattern, and sparse is "
                f"{self.sparse.kind!r}"
            )
        if self.sparse is not None and self.window is not None and not self.sparse.takes_window:
            raise ValueError(
                f"{name}.window={self.window} would hide blocks that the pattern {self.sparse.kind!r} shows: "
                "leave it out"
            )

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        name = type(self).__name__
        if self.shared_kv and model.shape == "encoder-decoder":
            raise ValueError(f"{name}.shared_kv is for self-attention alone, and this is an encoder-decoder")
        if self.output_gate and model.shape == "encoder-decoder":
            raise ValueError(f"{name}.output_gate is for self-attention alone, and this is an encoder-decoder")
        if model.num_heads % self.num_kv_heads_of(model):
            raise ValueError(
                f"ModelConfig.num_heads ({model.num_heads}) is not divisible by {name}.num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.sparse is not None and self.sparse.causal_only and model.shape != "decoder":
            raise ValueError(
                f"the sparse attention pattern {self.sparse.kind!r} is for decoders, and this is an {model.shape}"
            )
        if self.qk_norm != "none" and isinstance(model.norm, NoNormConfig):
            raise ValueError(f"{name}.qk_norm is {self.qk_norm!r}, but the model's norm is 'none'")
        if self.qk_norm_after_positions:
            self.check_rotated_once(model)
        if self.v_norm and isinstance(model.norm, NoNormConfig):
            raise ValueError(f"{name}.v_norm normalizes values, but the model's norm is 'none'")

    def check_rotated_once(self, model: ModelConfig) -> None:
        """Raise ValueError for positions that rotate keys again after they are normalized."""
        layers = (model.layer(index) for index in range(max(1, len(model.layers))))
        for position in (part for layer in layers if layer.attention == self for part in layer.position.parts):
            if not position.takes_latent_keys:
                raise ValueError(
                    f"{type(self).__name__}.qk_norm_after_positions takes positions that are done with queries and "
                    f"keys before their product, and not {position.kind!r}"
                )

    def with_window(self, window: int, sink_tokens: int, cap_sinks: bool) -> Self:
        return self.replace(window=window, sink_tokens=sink_tokens, cap_sinks=cap_sinks)

    @property
    def projected(self) -> str:
        """Which of queries, keys and values are projected, by their first letters."""
        return "q" if self.shared_kv else "qk" if self.value_is_key else "qkv"

    @property
    def shared_source(self) -> AttentionConfig | None:
        return self.replace(shared_kv=False) if self.shared_kv else None

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {} if self.shared_kv else super().cached_per_token(model)

    def head_dim_of(self, model: ModelConfig) -> int:
        return model.head_dim if self.head_dim is None else self.head_dim

    def num_kv_heads_of(self, model: ModelConfig) -> int:
        return model.num_kv_heads if self.num_kv_heads is None else self.num_kv_heads

    def resolve(self, model: ModelConfig) -> Self:
        """The scale filled in; heads that are the model's, and biases of projections that there are not, left out."""
        scale = self.head_dim_of(model) ** -0.5 if self.scale is None else self.scale
        head_dim = None if self.head_dim == model.head_dim else self.head_dim
        num_kv_heads = None if self.num_kv_heads == model.num_kv_heads else self.num_kv_heads
        bias = tuple(sorted({*self.projected, "out"} & set(self.bias)))
        return self.replace(head_dim=head_dim, num_kv_heads=num_kv_heads, scale=scale, bias=bias)

    def weights(self, model: ModelConfig, *, cross: bool = False) -> Weights:
        """Projections are cut by key/value heads, with the query heads that share them.

        A bias of some of the parts of a projection is a weight of each of those parts.
        """
        head_dim, num_kv_heads = self.heads_of(model)
        heads = {"q": model.num_heads, "k": num_kv_heads, "v": num_kv_heads}
        projections: dict[str, Weights] = {}
        partial: Weights = {}
        for name in ("q", "kv") if cross else ("qkv",):
            parts = [part for part in name if part in self.projected]
            biased = [part for part in parts if part in self.bias]
            gates = model.num_heads if self.output_gate and not cross else 0
            rows = (sum(heads[part] for part in parts) + gates) * head_dim
            columns = model.for_side("encoder").dim if name == "kv" else model.dim
            projections[name] = linear(rows, columns, bias=len(biased) == len(parts), cut=0)
            if len(biased) < len(parts):
                partial |= {part: Weight((heads[part], head_dim), 0) for part in biased}
        projections["out"] = linear(model.dim, self.output_width(model), bias="out" in self.bias, cut=1)
        norms = {f"{part}_norm": self.norm_weights(model, heads[part]) for part in "qk" if part in self.projected}
        sinks = {"sinks": Weight((model.num_heads,), 0)} if self.sink_logits else {}
        return with_prefixes(projections | norms | {"partial_qkv_bias": partial}) | sinks

    def norm_of_heads(self, model: ModelConfig) -> NormConfig:
        """The norm of queries and keys, less what they lack of the model's."""
        norm = model.norm if self.qk_norm_weight else model.norm.without_weights()
        return norm.replace(bias=False) if isinstance(norm, LayerNormConfig) and not self.qk_norm_bias else norm

    def norm_weights(self, model: ModelConfig, heads: int) -> Weights:
        """The weights of the norm of queries or of keys."""
        norm, head_dim = self.norm_of_heads(model), self.head_dim_of(model)
        if self.qk_norm == "none":
            return {}
        if self.qk_norm == "heads":
            return norm.weights(heads, head_dim, cut=0)
        return norm.weights(head_dim if self.qk_norm == "head" else heads * head_dim)

    @property
    def uncuttable_reason(self) -> str | None:
        return "qk_norm 'whole' normalizes all heads together and cannot be cut" if self.qk_norm == "whole" else None

    def saved_elements(self, model: ModelConfig) -> int:
        """The inputs of the norms of queries, keys and values too, gates, and the results that they multiply."""
        norms = 0 if self.qk_norm == "none" else self.query_width(model) + self.kv_width(model) // 2
        norms += self.kv_width(model) // 2 if self.v_norm else 0
        gates = 2 * self.output_width(model) if self.output_gate else 0
        return super().saved_elements(model) + norms + gates

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        return {
            "softmax": cls(),
            "softmax-window": cls(window=4, sink_tokens=2, qk_norm="head", softcap=20.0),
            "softmax-biases": cls(bias=("q", "v", "out"), qk_norm="heads", sink_logits=True, clip=4.0),
            "softmax-heads": cls(head_dim=12, num_kv_heads=4, qk_norm="heads", bias=("k",), window=5),
            "softmax-value-is-key": cls(value_is_key=True, v_norm=True, qk_norm="head", bias=("q", "k", "v", "out")),
            "softmax-norm-after-positions": cls(qk_norm="head", qk_norm_after_positions=True),
            "softmax-gated": cls(output_gate=True, qk_norm="head", bias=("q", "k", "v", "out")),
            "softmax-chunked": cls(bias=("q", "k", "v"), sparse=ChunkedConfig(chunk=4)),
        }
