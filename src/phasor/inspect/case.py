"""One layer of a model as it would run, with stand-ins for its tensors: the arguments of dispatch tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from phasor.config import ModelConfig, PositionConfig
from phasor.config.model import Layer, Side
from phasor.generation.runners import StepSpec
from phasor.nn.adapted import adapt
from phasor.nn.attention.base import AttendShapes, AttentionContext, CalledOperation
from phasor.nn.block import Block
from phasor.nn.layer_step import LayerStep
from phasor.nn.lora import LoRA, LowRank
from phasor.nn.moe import Experts, RoutingArgs
from phasor.nn.norm import RowNorm, build_norm
from phasor.nn.positions.base import Position, build_position
from phasor.nn.quantized import QuantizedLinear
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.adamw.adamw import AdamW, StepTensors
from phasor.ops.attention import Mask, ScoreMod, SinkQueries
from phasor.ops.quantized import QuantizedMatrix
from phasor.quantization import WEIGHTS, quantize
from phasor.training.float8 import convert_to_float8
from phasor.transformer import Transformer

AttentionArgs = tuple[Tensor, Tensor, Tensor, Mask, ScoreMod]


@dataclass(frozen=True)
class Case:
    """A layer with the device, dtype and length it runs with. Its tensors have no storage."""

    config: ModelConfig
    layer: Layer
    side: Side
    device: torch.device
    dtype: torch.dtype
    length: int
    training: bool
    weights: str | None = None
    precision: str | None = None

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A stand-in of some shape, of the layer's dtype where none is given."""
        with FakeTensorMode():
            return torch.empty(shape, device=self.device, dtype=dtype or self.dtype, requires_grad=self.training)

    @property
    def queries(self) -> Tensor:
        """`[1, T, H, D]`, before positions act on them."""
        return self.tensor(1, self.length, self.config.num_heads, self.layer.attention.head_dim_of(self.config))

    @property
    def keys(self) -> Tensor:
        """`[1, T, K, D]`, and values too."""
        head_dim, num_kv_heads = self.layer.attention.heads_of(self.config)
        return self.tensor(1, self.length, num_kv_heads, head_dim)

    @property
    def hidden(self) -> Tensor:
        """`[1, T, dim]`."""
        return self.tensor(1, self.length, self.config.dim)

    @property
    def projected(self) -> Tensor:
        """What the activation of the feed-forward network takes, `[1, T, hidden]`; gate and up where it is gated."""
        wide = self.layer.feedforward.hidden_dim_of(self.config) * (2 if self.layer.feedforward.gated else 1)
        return self.tensor(1, self.length, wide)

    @property
    def router_args(self) -> tuple[Tensor, Tensor]:
        """Tokens `[T, dim]` and the logits of their router, where the layer has experts."""
        experts = self.layer.feedforward.experts
        count = 0 if experts is None else experts.num_experts
        return self.tensor(self.length, self.config.dim), self.tensor(self.length, count)

    @property
    def routing_args(self) -> RoutingArgs:
        """What the tokens of a layer with experts are routed with."""
        experts = self.block.feedforward
        assert isinstance(experts, Experts)
        return experts.routing_args(*self.router_args)

    @cached_property
    def model(self) -> Transformer:
        """The model on the meta device, as deep as its pattern of layers."""
        deep = max(1, len(self.config.layers))
        encoders = deep if self.config.num_encoder_layers is not None else None
        with torch.device("meta"):
            config = self.config.replace(num_layers=deep, num_encoder_layers=encoders, encoder=None)
            model = Transformer(config).to(self.dtype)
            return model if self.weights is None else quantize(model, WEIGHTS[self.weights])

    @cached_property
    def block(self) -> Block:
        """A block of this layer, on the meta device."""
        with torch.device("meta"):
            block = Block(self.config, self.side, self.layer).to(self.dtype)
        if self.precision == "float8":
            convert_to_float8(block)
        return block.train(self.training)

    @property
    def step_spec(self) -> StepSpec:
        """What a step runner is chosen for."""
        return StepSpec(self.model, like=self.hidden)

    @property
    def quantized_args(self) -> tuple[Tensor, QuantizedMatrix, None]:
        """What the product of one row with the model's first quantized projection is called with."""
        layer = next(part for part in self.model.modules() if isinstance(part, QuantizedLinear))
        return self.tensor(1, layer.in_features), layer.matrix, None

    @property
    def decodes(self) -> bool:
        """Whether the layer is part of a model that generates tokens."""
        return not self.training and self.config.has_logits and self.side == "decoder"

    @property
    def sparse(self) -> bool:
        """Whether the layer's attention is sparse."""
        return self.layer.attention.sparse is not None

    @property
    def mask(self) -> Mask:
        """The mask of self-attention, in a batch without padding or packed documents."""
        attention = self.layer.attention
        mask = Mask(causal=self.side == "decoder").with_window(attention.window, attention.sink_tokens)
        return mask.with_pattern(self.block.attention.pattern)

    @property
    def chooses(self) -> bool:
        """Whether the layer's attention keeps all tokens, and attends to some that it chooses."""
        cached = self.cached if self.decodes else 0
        attention = self.layer.attention
        return attention.present and not attention.keeps_state and self.attend_shapes(cached) is None

    @property
    def cached(self) -> int:
        """How many tokens a cache holds: as many as follow them, or all that a window keeps."""
        config = self.layer.attention
        return self.length if config.reach is None else min(self.length, config.sink_tokens + config.reach - 1)

    def attend_shapes(self, cached: int = 0) -> AttendShapes | None:
        """What attention to all keys is called with, where the tokens follow some in a cache."""
        return self.block.attention.attend_shapes(self.length, cached + self.length)

    def attention_args(self, cached: int = 0) -> AttentionArgs:
        """What self-attention is called with, where the tokens follow some in a cache."""
        shapes, keys = self.attend_shapes(cached), cached + self.length
        assert shapes is not None
        q = self.tensor(1, self.length, shapes.num_heads, shapes.head_dim)
        k = self.tensor(1, keys, shapes.num_kv_heads, shapes.head_dim)
        v = self.tensor(1, keys, shapes.num_kv_heads, shapes.value_dim)
        score_mod = self._score_mod(q, k, max_distance=None if cached else self.length - 1)
        return q, k, v, replace(self.mask, offset=cached) if cached else self.mask, score_mod

    @property
    def cross_attention_args(self) -> AttentionArgs:
        """What cross-attention is called with: no positions act on its scores."""
        score_mod = self._score_mod(self.queries, self.keys, max_distance=self.length - 1)
        score_mod = replace(score_mod, bias=None, sink_queries=None, pieces=())
        return self.queries, self.keys, self.keys, Mask(aligned=False), score_mod

    @cached_property
    def position(self) -> Position:
        """The layer's position scheme, on the meta device."""
        with torch.device("meta"):
            return build_position(self.layer.position, self.config.with_heads_of(self.layer.attention), self.side)

    @property
    def seq(self) -> SequenceInfo:
        """The positions of one row of tokens."""
        with FakeTensorMode():
            return SequenceInfo(torch.empty(self.length, dtype=torch.int64, device=self.device), self.length)

    @property
    def attention_operations(self) -> Iterator[CalledOperation]:
        """What the layer's attention calls besides `attend`."""
        position = Unprepared(self.position.config)
        ctx = AttentionContext(self.mask, position, LayerStep(self.mask, None), self.rotation_why_not)
        return self.block.attention.operations(self.length, self.tensor, ctx)

    @property
    def rotation_why_not(self) -> str | None:
        """Why no kernel applies positions; None where one does."""
        return self.position.why_not(self.seq, self.hidden)

    @property
    def norm(self) -> RowNorm:
        """A norm of the residual stream, on the meta device, where the model has norms."""
        with torch.device("meta"):
            return cast(RowNorm, build_norm(self.config.norm, self.config.dim))

    @property
    def adapted_args(self) -> tuple[nn.Module, Tensor]:
        """What the product of a frozen layer that has an adapter is called with, as where LoRA is trained."""
        dim = self.config.dim
        with torch.device("meta"):
            layer = nn.Linear(dim, dim, bias=False).requires_grad_(False)
            adapt(layer, "default", LoRA({"whole": LowRank(dim, dim, 16, 1.0)}, dim))
        return layer.to(self.dtype), self.hidden

    @property
    def lm_head_args(self) -> tuple[Tensor, Tensor]:
        """Hidden states `[T, dim]` and the output embedding `[V, dim]`, whose matrix product is the logits."""
        width = self.config.embedding.width or self.config.dim
        return self.tensor(self.length, width), self.tensor(self.config.vocab_size, width)

    @property
    def optimizer_args(self) -> tuple[AdamW, StepTensors]:
        """What an optimizer step is called with."""
        with FakeTensorMode():
            weight = nn.Parameter(torch.empty(self.config.dim, device=self.device, dtype=self.dtype))
            weight.grad = torch.empty_like(weight)
            optimizer = AdamW([weight], fused=True)
            return optimizer, optimizer.gather()

    def _score_mod(self, queries: Tensor, keys: Tensor, max_distance: int | None) -> ScoreMod:
        module, position = self.block.attention, self.position
        with torch.device("meta"):
            seq = SequenceInfo(torch.arange(self.length), self.length, max_distance=max_distance)
            x = torch.empty(1, self.length, self.config.dim, dtype=self.dtype)
            q, k = (torch.empty(x.shape, dtype=self.dtype) for x in (queries, keys))
            key_positions, weights = torch.arange(keys.shape[1])[None], position.layer_weights(0)
            step = LayerStep(self.mask, key_positions, counted=max_distance is not None)
            prepared = position.prepare_keys(position.prepare(seq, x), KeyInfo(seq, self.mask, key_positions), x)
            ctx = AttentionContext(self.mask, position, step, prepared, weights, seq.rows)
            ctx = ctx.for_layer(x, module.project_heads)
            capped = SinkQueries(queries, self.tensor(1, self.length)) if self.layer.attention.cap_sinks else None
            score_mod = ctx.score_mod(sink_queries=capped, **module.score_options())
            return position.on_attention(q, k, self.mask, score_mod, ctx.prepared)[2]


class Unprepared(Position):
    """A scheme for which nothing was prepared, other than why no kernel applies it."""

    def __init__(self, config: PositionConfig) -> None:
        super().__init__()
        self.config = config

    def kernel_why_not(self, prepared: str | None) -> str | None:
        return prepared
