"""The fused step runner: five kernels per layer for one token per row, for models built as most decoders are.

Up to 16 rows (64 in bfloat16 with quantized weights) every projection is a GEMV kernel that reads its weights once:
norm and queries, keys and values; attention; output and residual; norm, gate and up; down and residual. With more rows
the projections are GEMMs of torch, and the kernels do what lies between them. A mixture of experts reads the experts in
use alone, and is two kernels more, the router and its choice; none more for a single row and a small router.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor.config import PreConfig, RMSNormConfig
from phasor.config.model import Layer
from phasor.generation.runners.cuda_graph import CudaGraphRunner, StepBuffers
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.attention.softmax.module import SoftmaxAttention
from phasor.nn.block import Block
from phasor.nn.feed_forward import FeedForward
from phasor.nn.heads import LogitsHead
from phasor.nn.moe import Experts
from phasor.nn.norm import RMSNorm
from phasor.nn.quantized import Quantized, QuantizedLinear
from phasor.ops import dispatch
from phasor.ops.decode import ACTIVATIONS, NormArgs, QKNormArgs, RotaryArgs
from phasor.ops.decode.tiles import MAX_EXPERT_ROWS
from phasor.ops.launch import supports_pdl
from phasor.ops.quantized import Matrix
from phasor.transformer import Stack, Transformer

TORCH_MODULES = (nn.Linear, nn.ModuleList, nn.ParameterDict, nn.Identity, nn.Dropout)  # modules of torch in phasor's


def fused_step_why_not(model: Transformer, weight: Tensor | None = None) -> str | None:
    """Why the fused step is not for this model; None where it is.

    >>> from phasor import preset
    >>> with dispatch.force_path("triton"):
    ...     fused_step_why_not(Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)))
    'the norm is not an RMS norm with a weight'
    """
    return model_why_not(model) or dispatch.triton_why_not(model.tokens.weight if weight is None else weight)


def model_why_not(model: Transformer) -> str | None:
    """Why the fused step could not run this model on any device."""
    config, dtype = model.config, model.tokens.dtype
    placement, embedding, head = config.placement, config.embedding, model.head
    plain_head = isinstance(head, LogitsHead) and head.dense is None and head.project is None and head.softcap is None
    reasons = {
        "it is not a decoder": config.shape != "decoder",
        "the norm is not an RMS norm with a weight": not (
            isinstance(config.norm, RMSNormConfig) and config.norm.weight
        ),
        "the placement is not a norm before every sub-layer and at the end": not (
            isinstance(placement, PreConfig)
            and not placement.normed_stream
            and placement.first_norm
            and config.ends_in_norm
        ),
        "the output of blocks is scaled": placement.block_scale,
        "layers share their weights": config.layers_per_block > 1,
        "layers have inputs of their own": embedding.per_layer_width is not None,
        "the embedding has a norm, token types or another width than the model": bool(
            embedding.norm or embedding.token_types or embedding.width
        ),
        "positions are added to the embeddings": "input" in config.position.acts_on,
        "the head does more than one projection": not plain_head,
        "the weights are not float32, bfloat16 or float16, all of one dtype": not (
            dtype in (torch.float32, torch.bfloat16, torch.float16)
            and all(p.dtype == dtype and p.is_contiguous() for p in model.parameters())
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None:
        blocks = cast(Stack, model.decoder).blocks
        layers = ((config.layer(i), cast(Block, block)) for i, block in enumerate(blocks))
        reason = next(filter(None, (layer_why_not(layer, block) for layer, block in layers)), None)
    return reason or ("a part of the model was replaced" if has_other_parts(model) else None)


def has_other_parts(model: Transformer) -> bool:
    """Whether a part is not what the configuration builds, such as a projection with an adapter."""
    kinds = {type(part) for part in model.modules()} - set(TORCH_MODULES)
    if any(not kind.__module__.startswith("phasor.") for kind in kinds):
        return True
    stack = cast(Stack, model.decoder)
    blocks, linears = [cast(Block, block) for block in stack.blocks], linears_of(stack)
    norms = [stack.norm, *(norm for block in blocks for norm in block.residual.norms)]
    attentions = [softmax_attention(block) for block in blocks]
    norms += [norm for x in attentions if x.has_qk_norm for norm in (x.q_norm, x.k_norm)]
    plain = all(isinstance(x, nn.Linear | QuantizedLinear) for x in linears) and all(
        isinstance(x, RMSNorm) for x in norms
    )
    return not plain


def softmax_attention(block: nn.Module) -> SoftmaxAttention:
    """The attention of a block, of the kind that the decode kernels compute."""
    return cast(SoftmaxAttention, cast(Block, block).attention)


def linears_of(stack: Stack) -> list[Any]:
    """The projections of a decoder."""
    blocks = [cast(Block, block) for block in stack.blocks]
    attention = [x for b in map(softmax_attention, blocks) for x in (b.qkv, b.out)]
    return attention + [x for b in blocks for x in network_linears(b.feedforward)]


def network_linears(network: Any) -> tuple[Any, ...]:
    """The projections of a feed-forward network; of a mixture of experts its router, whose experts are no modules."""
    return (network.router,) if isinstance(network, Experts) else (network.up, network.down)


def matrix(linear: nn.Linear | QuantizedLinear) -> Matrix:
    """A projection's weights as the kernels take them."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.matrix


def layer_why_not(layer: Layer, block: Block) -> str | None:
    """Why the fused step is not for a layer."""
    reason = layer.position.decode_kernel_why_not or block.attention.decode_kernel_why_not()
    if reason is not None:
        return reason
    network = layer.feedforward
    if network.hidden_dim is not None:
        return "the hidden width of some layers is not the model's"
    if network.experts is not None:
        has_shared = network.experts.shared_dim is not None
        return "a mixture of experts has a shared one" if has_shared else network.experts.kernel_why_not
    kind = network.activation.kind
    return None if kind in ACTIVATIONS else f"no kernel has the activation {kind!r}"


class FusedLayer(NamedTuple):
    """One layer as the step uses it."""

    block: Block
    keys: Tensor
    values: Tensor
    sinks: int
    rope: RotaryArgs | None
    qk_norm: QKNormArgs | None
    sink_logits: Tensor | None


class FusedRunner(CudaGraphRunner):
    """The CUDA-graph runner with the fused step."""

    def build_step(self, model: Transformer, compile: bool) -> FusedStep:
        self.fused = FusedStep(model, self.buffers)  # kept: a graph does not keep its buffers alive
        return self.fused


class FusedStep:
    """The step over shared buffers: it reads their tokens, leaves the next ones there, and returns the logits."""

    def __init__(self, model: Transformer, buffers: StepBuffers) -> None:
        from phasor.ops.decode import decode_attention, embedding, experts, experts_one_row, gemv, lm_head_argmax

        config, device, dtype = model.config, buffers.tokens.device, model.tokens.dtype
        rows, stack = len(buffers.tokens), cast(Stack, model.decoder)
        self.attend: Any = decode_attention.decode_attention
        self.embed_tokens: Any = embedding.embed_tokens
        self.kernels: Any = gemv
        self.experts: Any = experts
        self.one_row: Any = experts_one_row
        self.expert_workspaces: dict[Any, Any] = {}  # by the sizes of experts, which layers share
        self.lm_head: Any = lm_head_argmax
        small = dtype == torch.bfloat16 and all(isinstance(part, QuantizedLinear) for part in linears_of(stack))
        most = gemv.MAX_GEMV_ROWS_QUANTIZED if small else gemv.MAX_GEMV_ROWS
        self.few = rows == 1 or (rows <= most and dtype != torch.float16)  # whose range is too small
        self.pdl = supports_pdl(device)
        self.buffers, self.cache = buffers, buffers.cache
        self.positions = self.cache.next_positions.view(-1)
        self.embedding, self.head, self.norm = model.tokens, cast(LogitsHead, model.head), stack.norm
        self.table = self.head.table(model.tokens.table)
        self.multiplier = config.placement.multiplier
        self.layers = [layer_parts(stack, self.cache, index) for index in range(config.num_layers)]

        def empty(width: int) -> Tensor:
            return torch.empty(rows, width, device=device, dtype=dtype)

        attention = softmax_attention(stack.blocks[0])
        self.workspace = decode_attention.SplitKWorkspace(
            rows, attention.num_kv_heads, attention.queries_per_kv, attention.head_dim, device
        )
        self.x = empty(config.dim)
        self.qkv, self.heads = empty(attention.qkv.out_features), empty(attention.out.in_features)
        self.hidden, self.logits = empty(config.hidden_dim), empty(config.vocab_size)
        self.argmax = torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX, device=device)

    def __call__(self) -> Tensor:
        x = self.embed()
        for layer in self.layers:
            block = layer.block
            attention, network = softmax_attention(block), block.feedforward
            before, between = block.residual.norms
            qkv = self.project(x, attention.qkv, self.qkv, before)
            heads = self.attend(
                qkv,
                layer.keys,
                layer.values,
                self.cache.counts,
                self.positions,
                self.heads,
                self.workspace,
                scale=attention.scale,
                rope=layer.rope,
                qk_norm=layer.qk_norm,
                sink_logits=layer.sink_logits,
                sink_tokens=layer.sinks,
                pdl=self.pdl,
            )
            self.add(heads, attention.out, x)
            if isinstance(network, Experts):
                self.add_experts(x, network, between)
            else:
                self.add(self.feed(x, network, between), network.down, x)
        return self.choose(x)

    def embed(self) -> Tensor:
        """The vectors of the tokens."""
        tokens, embedding = self.buffers.tokens, self.embedding
        if isinstance(embedding, Quantized):
            return embedding(tokens)
        given = {"scale": embedding.scale_in(embedding.dtype), "pdl": self.pdl}
        return self.embed_tokens(tokens, embedding.weight, self.x, **given)

    def project(self, x: Tensor, linear: nn.Linear | QuantizedLinear, out: Tensor, norm: nn.Module) -> Tensor:
        """`linear(norm(x))`."""
        if not self.few:
            return linear(norm(x))
        given = {"norm": self.norm_args(norm), "bias": linear.bias, "pdl": self.pdl}
        return self.kernels.project(x, matrix(linear), out, **given)

    def add(self, y: Tensor, linear: nn.Linear | QuantizedLinear, x: Tensor) -> None:
        """`x += multiplier * linear(y)`."""
        if self.few:
            given = {"residual": x, "multiplier": self.multiplier, "pdl": self.pdl}
            self.kernels.project(y, matrix(linear), x, bias=linear.bias, **given)
        elif isinstance(linear, nn.Linear) and linear.bias is None:
            x.addmm_(y, linear.weight.t(), alpha=self.multiplier)
        else:
            x.add_(linear(y), alpha=self.multiplier)

    def feed(self, x: Tensor, network: FeedForward, norm: nn.Module) -> Tensor:
        """The hidden features of the feed-forward network of `norm(x)`."""
        activation, glu = ACTIVATIONS[network.config.activation.kind], network.config.gated
        if not self.few:
            return self.kernels.activate(network.up(norm(x)), self.hidden, activation, glu=glu)
        given = {"norm": self.norm_args(norm), "bias": network.up.bias, "pdl": self.pdl}
        return self.kernels.project_activate(x, matrix(network.up), self.hidden, activation, glu=glu, **given)

    def add_experts(self, x: Tensor, network: Experts, norm: nn.Module) -> None:
        """`x += multiplier * network(norm(x))`."""
        if len(x) > MAX_EXPERT_ROWS:
            x.add_(network(norm(x)), alpha=self.multiplier)
            return
        args, router = network.kernel_args(), matrix(network.router)
        merged = len(x) == 1 and self.one_row.router_is_small(router)
        key = args.down.shape, args.top_k, merged
        if key not in self.expert_workspaces:
            self.expert_workspaces[key] = (
                self.one_row.OneRowWorkspace(args, x.dtype, x.device)
                if merged
                else self.experts.ExpertsWorkspace(len(x), args, x.dtype, x.device)
            )
        given = {"residual": x, "multiplier": self.multiplier, "pdl": self.pdl}
        workspace = self.expert_workspaces[key]
        if merged:
            given |= {"norm": self.norm_args(norm), "router_bias": network.router.bias}
            self.one_row.experts_one_row(x, router, args, x, workspace, **given)
        elif self.few:
            logits = self.project(x, network.router, x.new_empty(len(x), len(args.up)), norm)
            self.experts.experts(x, logits, args, x, workspace, norm=self.norm_args(norm), **given)
        else:
            y = norm(x)
            self.experts.experts(y, network.router(y), args, x, workspace, **given)

    def choose(self, x: Tensor) -> Tensor:
        """The logits; their likeliest tokens are the next ones."""
        if not self.few:
            logits = self.head(self.norm(x), self.embedding.table)
            self.buffers.store_argmax(logits)
            self.cache.commit()
            return logits
        given = {"norm": self.norm_args(self.norm), "bias": self.head.bias, "pdl": self.pdl}
        self.lm_head.lm_head_argmax(x, self.table, self.logits, self.argmax, multiplier=self.head.multiplier, **given)
        tokens, history, step_index = self.buffers.tokens, self.buffers.history, self.buffers.step_index
        counters = step_index, self.cache.counts, self.positions
        self.lm_head.advance_step(self.argmax, tokens, history, *counters, pdl=self.pdl)
        return self.logits

    def norm_args(self, norm: nn.Module) -> NormArgs:
        """A norm as the kernels take it."""
        rms = cast(RMSNorm, norm)
        return NormArgs(cast(Tensor, rms.weight), rms.offset, rms.eps)


def layer_parts(stack: Stack, cache: StaticKVCache, index: int) -> FusedLayer:
    """What the step needs of a layer."""
    block, layout = cast(Block, stack.blocks[index]), cache.layouts[index]
    attention, scheme = softmax_attention(block), stack.position(stack.scheme_index[index])
    keys, values = cache.layers[index]["keys"], cache.layers[index]["values"]
    rope, qk_norm = scheme.rotary_args(cache.length, keys.device), None
    if attention.has_qk_norm:
        q, k = cast(RMSNorm, attention.q_norm), cast(RMSNorm, attention.k_norm)
        qk_norm = QKNormArgs(cast(Tensor, q.weight), cast(Tensor, k.weight), q.offset, q.eps)
    return FusedLayer(block, keys, values, layout.sinks, rope, qk_norm, attention.sinks)
