"""The ways to compute each operation of a model, fastest first, and what speaks against each.

They are asked the same functions that choose among them when the model runs, with stand-ins for its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from phasor.config import ModelConfig
from phasor.config.model import Layer, Side
from phasor.generation.runners import compiled, cuda_graph, fused
from phasor.nn.feed_forward import FeedForward
from phasor.nn.norm import LayerNorm, build_norm
from phasor.nn.positions.base import Position, build_position
from phasor.nn.positions.rotary.module import Rotary
from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch
from phasor.ops.adamw import adamw_why_not
from phasor.ops.attention import cudnn, flash
from phasor.ops.attention.attention import ScoreMod, SinkQueries, one_call_why_not
from phasor.ops.attention.bias import Bias
from phasor.ops.attention.mask import Mask
from phasor.ops.cross_entropy import CROSS_ENTROPY
from phasor.ops.float8 import float8_mlp_why_not
from phasor.ops.glu import GLU, GLU_LINEAR
from phasor.ops.norm import NORM
from phasor.quantization import quantize
from phasor.training.float8 import Float8FeedForward, convert_to_float8
from phasor.transformer import Block, Transformer


@dataclass(frozen=True)
class Case:
    """One layer of a model as it would run: what the rules look at. Its tensors are stand-ins without numbers."""

    config: ModelConfig
    layer: Layer
    side: Side
    device: torch.device
    dtype: torch.dtype
    length: int
    training: bool
    weights: str | None = None
    precision: str | None = None

    def tensor(self, *shape: int) -> Tensor:
        """A stand-in of some shape."""
        with FakeTensorMode():
            return torch.empty(shape, device=self.device, dtype=self.dtype, requires_grad=self.training)

    @property
    def queries(self) -> Tensor:
        """`[1, T, H, D]`, before positions have acted on them."""
        return self.tensor(1, self.length, self.config.num_heads, self.config.head_dim)

    @property
    def keys(self) -> Tensor:
        """`[1, T, K, D]`, and values too."""
        return self.tensor(1, self.length, self.config.num_kv_heads, self.config.head_dim)

    @property
    def hidden(self) -> Tensor:
        """`[1, T, dim]`."""
        return self.tensor(1, self.length, self.config.dim)

    @property
    def projected(self) -> Tensor:
        """What the activation of the feed-forward network takes, `[1, T, hidden]`; gate and up where it is gated."""
        wide = self.config.hidden_dim * (2 if self.layer.feedforward.gated else 1)
        return self.tensor(1, self.length, wide)

    @cached_property
    def model(self) -> Transformer:
        """The model on the meta device, as deep as its pattern of layers."""
        deep = max(1, len(self.config.layers))
        encoders = deep if self.config.num_encoder_layers is not None else None
        with torch.device("meta"):
            model = Transformer(self.config.replace(num_layers=deep, num_encoder_layers=encoders)).to(self.dtype)
            return model if self.weights is None else quantize(model, self.weights)

    @cached_property
    def block(self) -> Block:
        """A block of this layer, on the meta device."""
        with torch.device("meta"):
            block = Block(self.config, self.side, self.layer)
        if self.precision == "float8":
            convert_to_float8(block)
        return block

    @property
    def mask(self) -> Mask:
        """Who sees whom in self-attention, in a batch without padding or packed documents."""
        return Mask(causal=self.side == "decoder").narrowed(
            self.layer.attention.window, self.layer.attention.sink_tokens
        )

    @property
    def scoring(self) -> ScoreMod:
        """How self-attention makes its scores."""
        made, own = self.block.attention, self.layer.attention
        dropout = made.dropout if self.training else 0.0
        return ScoreMod(
            scale=made.scale,
            softcap=own.softcap,
            sinks=made.sinks,
            bias=self._bias() if "scores" in self.layer.position.acts_on else None,
            capped=SinkQueries(self.queries, self.tensor(1, self.length)) if own.cap_sinks else None,
            dropout=dropout,
        )

    @property
    def crossing(self) -> ScoreMod:
        """How cross-attention makes its scores: without positions."""
        return replace(self.scoring, bias=None, capped=None)

    @cached_property
    def position(self) -> Position:
        """The layer's position scheme, on the meta device."""
        with torch.device("meta"):
            return build_position(self.layer.position, self.config, self.side)

    @property
    def places(self) -> SequenceInfo:
        """Where the tokens of one row stand."""
        with FakeTensorMode():
            return SequenceInfo(torch.empty(self.length, dtype=torch.int64, device=self.device), self.length)

    @property
    def norm(self) -> nn.Module:
        """A norm of the residual stream, on the meta device."""
        with torch.device("meta"):
            return build_norm(self.config.norm, self.config.dim)

    @property
    def judged(self) -> tuple[Tensor, Tensor]:
        """Hidden states `[T, dim]` and the table `[V, dim]` whose product is the logits."""
        width = self.config.embedding.width or self.config.dim
        return self.tensor(self.length, width), self.tensor(self.config.vocab_size, width)

    def _bias(self) -> Bias | None:
        with torch.device("meta"):
            places = SequenceInfo(torch.arange(self.length), self.length)
            return self.position.on_scores(self.position.prepare(places, torch.empty(1, 1, 1, dtype=self.dtype)))


def nothing(case: Case) -> None:
    """No reason against a path: it always applies."""


@dataclass(frozen=True)
class Route:
    """A way to compute an operation, and a function that says in a sentence why it is not taken, or None."""

    name: str
    why_not: Callable[[Case], str | None] = nothing


@dataclass(frozen=True)
class Op:
    """An operation with its paths, fastest first; the last always applies.

    `applies` says whether a layer has it. An operation of the `whole` model is looked at once.
    """

    name: str
    routes: tuple[Route, ...]
    applies: Callable[[Case], bool]
    whole: bool = False


def rotates_by_kernel(case: Case) -> str | None:
    scheme = case.position
    assert isinstance(scheme, Rotary)
    return scheme.why_not(case.places, case.hidden)


def rotates_from_projection(case: Case) -> str | None:
    capped = "sink tokens meet queries at other positions" if case.layer.attention.cap_sinks else None
    return rotates_by_kernel(case) or case.block.attention.unfusable_reason or capped


def attends_in_one_call(case: Case) -> str | None:
    return one_call_why_not(case.length, case.length, case.mask, case.scoring)


def attends_by_cudnn(case: Case) -> str | None:
    inputs = case.queries, case.keys, case.keys
    return attends_in_one_call(case) or cudnn.why_not(*inputs, case.scoring.dropout, case.training, case.mask.causal)


def attends_by_intervals(case: Case) -> str | None:
    return flash.why_not(case.queries, case.keys, case.keys, case.mask, case.scoring)


def attends_by_fused_blocks(case: Case) -> str | None:
    return None if case.scoring.plain else "torch's fused attention has no soft-cap and no sink logits"


def crosses_in_one_call(case: Case) -> str | None:
    return one_call_why_not(case.length, case.length, Mask(aligned=False), case.crossing)


def crosses_by_cudnn(case: Case) -> str | None:
    inputs = case.queries, case.keys, case.keys
    return crosses_in_one_call(case) or cudnn.why_not(*inputs, case.crossing.dropout, case.training, False)


def crosses_by_intervals(case: Case) -> str | None:
    return flash.why_not(case.queries, case.keys, case.keys, Mask(aligned=False), case.crossing)


def norm_by_kernel(x: Tensor, module: nn.Module) -> str | None:
    return NORM.paths[0].why_not(x, *norm_args(module))


def norm_in_one(x: Tensor, module: nn.Module) -> str | None:
    return NORM.paths[1].why_not(x, *norm_args(module))


def norm_args(module: nn.Module) -> tuple[Any, ...]:
    weights = getattr(module, "weight", None), getattr(module, "bias", None)
    return *weights, getattr(module, "eps", 0.0), getattr(module, "offset", 0.0), isinstance(module, LayerNorm)


def loss_in_chunks(case: Case) -> str | None:
    return CROSS_ENTROPY.paths[1].why_not(*case.judged)


def loss_by_kernel(case: Case) -> str | None:
    return CROSS_ENTROPY.paths[0].why_not(*case.judged)


def gates_with_projection(case: Case) -> str | None:
    network = case.block.feedforward
    if not isinstance(network, FeedForward) or not network.fuses_glu:
        return "the network has experts, or its last projection a bias or dropout before it"
    weight = case.tensor(case.config.dim, case.config.hidden_dim)
    return GLU_LINEAR.paths[0].why_not(case.projected, weight, case.layer.feedforward.activation.kind)


def gates_in_float8(case: Case) -> str | None:
    network = case.block.feedforward
    if not isinstance(network, Float8FeedForward) or not network.is_plain_glu:
        return "the network has experts, biases or dropout"
    return float8_mlp_why_not(case.hidden, network.up.weight, network.down.weight, network.config.activation.kind)


def gates_by_kernel(case: Case) -> str | None:
    return GLU.paths[0].why_not(case.projected, case.layer.feedforward.activation.kind)


def step_on_device(case: Case) -> str | None:
    if case.device.type != "cuda":
        return "the model is not on a GPU"
    return cuda_graph.model_why_not(case.model)  # the stand-in's weights are on no device


def step_fused(case: Case) -> str | None:
    return step_on_device(case) or fused.model_why_not(case.model) or dispatch.triton_why_not(case.hidden)


def reads_bytes(case: Case) -> str | None:
    return step_fused(case) if decodes(case) else "the model does not decode"


def decodes(case: Case) -> bool:
    return not case.training and case.config.has_logits and case.side == "decoder"


def step_as_graph(case: Case) -> str | None:
    return compiled.why_not(case.model)


OPS = (
    Op(
        "rotation",
        (
            Route("Triton kernel from the projection", rotates_from_projection),
            Route("Triton kernel on queries and keys", rotates_by_kernel),
            Route("torch, a pass for each half"),
        ),
        lambda case: "queries" in case.layer.position.acts_on,
    ),
    Op(
        "attention",
        (
            Route("cuDNN's attention", attends_by_cudnn),
            Route("torch's fused attention in one call", attends_in_one_call),
            Route("Triton kernel over intervals of keys", attends_by_intervals),
            Route("torch's fused attention in blocks of queries", attends_by_fused_blocks),
            Route("plain torch in blocks of queries"),
        ),
        lambda case: True,
    ),
    Op(
        "cross-attention",
        (
            Route("cuDNN's attention", crosses_by_cudnn),
            Route("torch's fused attention in one call", crosses_in_one_call),
            Route("Triton kernel over intervals of keys", crosses_by_intervals),
            Route("plain torch in blocks of queries"),
        ),
        lambda case: case.block.cross is not None,
    ),
    Op(
        "query and key norm",
        (
            Route("Triton kernel", lambda case: norm_by_kernel(case.queries, case.block.attention.q_norm)),
            Route("one operation of torch", lambda case: norm_in_one(case.queries, case.block.attention.q_norm)),
            Route("torch in float32, then the weight"),
        ),
        lambda case: case.layer.attention.qk_norm != "none",
    ),
    Op(
        "norm",
        (
            Route("Triton kernel", lambda case: norm_by_kernel(case.hidden, case.norm)),
            Route("one operation of torch", lambda case: norm_in_one(case.hidden, case.norm)),
            Route("torch in float32, then the weight"),
        ),
        lambda case: case.config.norm.kind != "none",
    ),
    Op(
        "gated activation",
        (
            Route("Triton kernel that keeps nothing for the projection after it", gates_with_projection),
            Route("Triton kernel", gates_by_kernel),
            Route("torch, activation and product"),
        ),
        lambda case: case.layer.feedforward.gated and case.precision is None,
    ),
    Op(
        "gated activation in float8",
        (
            Route("Triton kernels that write 8 bits, one operation with both projections", gates_in_float8),
            Route("Triton kernel", gates_by_kernel),
            Route("torch, activation and product"),
        ),
        lambda case: case.layer.feedforward.gated and case.precision == "float8",
    ),
    Op(
        "cross-entropy",
        (
            Route("Triton kernel in chunks of rows", loss_by_kernel),
            Route("torch in chunks of rows", loss_in_chunks),
            Route("torch over all logits at once"),
        ),
        lambda case: case.training and case.config.has_logits,
        whole=True,
    ),
    Op(
        "optimizer step",
        (
            Route("one Triton kernel for all weights", lambda case: adamw_why_not(case.tensor(case.config.dim))),
            Route("torch's fused AdamW"),
        ),
        lambda case: case.training,
        whole=True,
    ),
    Op(
        "decoding step",
        (
            Route("five fused kernels a layer, one CUDA graph a step", step_fused),
            Route("one CUDA graph a step", step_on_device),
            Route("compiled graph where generate(compile=True) asks for it, else a cached step", step_as_graph),
            Route("a cached step, operation by operation"),
        ),
        decodes,
        whole=True,
    ),
    Op(
        "weights in int8",
        (Route("as they are in steps of few rows, else converted", reads_bytes), Route("converted layer by layer")),
        lambda case: case.weights == "int8",
        whole=True,
    ),
)
