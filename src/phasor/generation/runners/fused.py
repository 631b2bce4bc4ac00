"""The fused step runner: five kernels per layer for one token per row, for decoders with RMS norms before sub-layers.

For one row (up to 64 in bfloat16 with quantized weights) every projection is a kernel that reads its weights once: norm
and queries, keys and values; attention; output and residual; norm, gate and up; down and residual. With more rows the
norm is another kernel, and projections are split-K GEMMs (up to 16 rows in 16 bits) or GEMMs of torch. Where heads keep
a state, the kernel of the projection convolves too, and that of attention goes on from the state and normalizes and
gates the result. A mixture of experts reads the experts in use alone, and is two kernels more, the router and its
choice; none more for a single row and a small router.

An attention or a feed-forward network that no kernel computes runs as the module it is, between the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from phasor.config import PreConfig, RMSNormConfig
from phasor.config.model import Layer
from phasor.generation.runners.cuda_graph import CudaGraphRunner, StepBuffers
from phasor.kv_cache.protocol import EncoderOutput
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.attention.base import Attention, AttentionContext
from phasor.nn.attention.fused import Biases, FusedAttention
from phasor.nn.block import Block
from phasor.nn.feed_forward import FeedForward
from phasor.nn.heads import LogitsHead
from phasor.nn.kinds import KindModule
from phasor.nn.lora_hook import adapters_of
from phasor.nn.moe import EXPERTS, Experts
from phasor.nn.norm import RMSNorm, RowNorm
from phasor.nn.quantized import NF4, Quantization, Quantized, QuantizedLinear
from phasor.nn.record import Record
from phasor.ops import compile_ahead, dispatch
from phasor.ops.decode import ACTIVATIONS, ConvolutionArgs, ExpertsArgs, NormArgs
from phasor.ops.decode.tiles import MAX_EXPERT_ROWS
from phasor.ops.launch import supports_pdl
from phasor.ops.quantized import Matrix
from phasor.quantization import quantization_of
from phasor.transformer import Stack, Transformer

T = TypeVar("T")
READ_PROMPTS: WeakSet[Transformer] = WeakSet()  # the models that have read prompts
MAX_READ_TWICE = 2048  # tokens of prompts that take less time than compiling
# Modules of torch in those of phasor.
TORCH_MODULES = (nn.Linear, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Identity, nn.Dropout)


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
        "each layer has an additional input": embedding.per_layer_width is not None,
        "the embedding has a norm, token types or another width than the model": bool(
            embedding.norm or embedding.token_types or embedding.width
        ),
        "the weights are in NF4, which its kernels do not read": quantization_of(model) == Quantization(NF4),
        "the head does more than one projection": not plain_head,
        "the weights are not float32, bfloat16 or float16, all of one dtype": not (
            dtype in (torch.float32, torch.bfloat16, torch.float16)
            and all(p.dtype == dtype and p.is_contiguous() for p in model.parameters())
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return reason or ("a part of the model was replaced" if has_other_parts(model) else None)


def has_other_parts(model: Transformer) -> bool:
    """Whether a part is not what the configuration builds, such as a projection with an adapter."""
    stack = cast(Stack, model.decoder)
    if any(adapters_of(part) for part in model.modules()):
        return True
    as_modules = {part for sub_layer in sub_layers_as_modules(stack) for part in sub_layer.modules()}
    built = {*TORCH_MODULES, *KindModule.modules_by_config.values()}  # of a kind that is defined elsewhere too
    kinds = {type(part) for part in model.modules() if part not in as_modules} - built
    if any(not kind.__module__.startswith("phasor.") for kind in kinds):
        return True
    norms = [stack.norm, *(norm for block in stack.blocks for norm in cast(Block, block).residual.norms)]
    norms_of_heads = [norm for attention in fused_parts(stack) for norm in attention.decode_norms()]
    linears_are_plain = all(isinstance(x, nn.Linear | QuantizedLinear) for x in linears_of(stack))
    norms_are_plain = all(isinstance(x, RMSNorm) for x in norms) and all(isinstance(x, RowNorm) for x in norms_of_heads)
    return not (linears_are_plain and norms_are_plain)


def fused_parts(stack: Stack) -> list[Attention]:
    """The attention of the layers for which kernels compute it."""
    return [block.attention for _, block in fused_layers(stack, attention_why_not)]


def fused_layers(stack: Stack, why_not: Callable[[Layer, Block], str | None]) -> list[tuple[Layer, Block]]:
    """The layers of which kernels compute a sub-layer, and their blocks."""
    return [(layer, block) for layer, block in layers_of(stack) if why_not(layer, block) is None]


def runs_modules(model: Transformer) -> bool:
    """Whether the step runs a sub-layer as the module it is, since no kernel computes it."""
    return bool(sub_layers_as_modules(cast(Stack, model.decoder)))


def sub_layers_as_modules(stack: Stack) -> list[nn.Module]:
    """The attention and feed-forward networks that no kernel computes."""
    layers = layers_of(stack)
    attentions = [each[1].attention for each in layers if attention_why_not(*each) is not None]
    networks = [each[1].feedforward for each in layers if network_why_not(*each) is not None]
    return [part for part in (*attentions, *networks) if part is not None]


def linears_of(stack: Stack) -> list[Any]:
    """The projections of a decoder that kernels compute."""
    networks = [block.feedforward for _, block in fused_layers(stack, network_why_not)]
    of_attention = [x for attention in fused_parts(stack) for x in attention.decode_projections()]
    return of_attention + [x for network in networks for x in network_linears(network)]


def network_linears(network: Any) -> tuple[Any, ...]:
    """The projections of a feed-forward network; of a mixture of experts its router, whose experts are no modules."""
    if not isinstance(network, Experts):
        return network.up, network.down
    return (network.router,) if network.shared is None else (network.router, *network_linears(network.shared))


def matrix(linear: nn.Linear | QuantizedLinear) -> Matrix:
    """A projection's weights as the kernels take them."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.matrix


def attention_why_not(layer: Layer, block: Block) -> str | None:
    """Why no kernel computes the attention of a layer, which then runs as a module."""
    return layer.position.decode_kernel_why_not or block.attention.decode_kernel_why_not()


def network_why_not(layer: Layer, block: Block) -> str | None:
    """Why no kernel computes the feed-forward network of a layer, which then runs as a module."""
    network, kind = layer.feedforward, layer.feedforward.activation.kind
    if not network.present:
        return "there is none"
    if network.experts is not None and network.experts.shared_gate:
        return "the shared expert has a gate"
    if network.experts is not None and network.experts.kernel_why_not is not None:
        return network.experts.kernel_why_not
    if kind in ACTIVATIONS or (network.experts is not None and network.experts.shared_dim is None):
        return None
    return f"no kernel has the activation {kind!r}"


class FusedRunner(CudaGraphRunner):
    """The CUDA-graph runner with the fused step."""

    def build_step(self, model: Transformer, compile: bool) -> FusedStep:
        self.fused = FusedStep(model, self.buffers)  # kept: a graph does not keep its buffers alive
        return self.fused

    def compile_kernels(self, step: Callable[[], Tensor]) -> None:
        """Side by side, by a step that does not launch them; its tokens and counts are discarded.

        All else that it leaves in memory are floats, and a request begins with a cache of zeros.
        """
        cache = self.buffers.cache
        if isinstance(cache, StaticKVCache) and self.fused.computes_floats and compile_ahead.is_available():
            with compile_ahead.compile_ahead():
                step()
            self.fused.clear_tokens()
            cache.continue_from(self.empty_cache)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        memory: EncoderOutput | None = None,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """As ever; the first short prompts of a model twice, so that their kernels are compiled side by side too."""
        model, tokens = self.model(), len(prompts) * max(map(len, prompts))
        assert model is not None
        if model not in READ_PROMPTS and tokens <= MAX_READ_TWICE and self.fused.computes_floats:
            READ_PROMPTS.add(model)
            if compile_ahead.is_available():
                with compile_ahead.compile_ahead():
                    super().prefill(prompts, memory, positions)
        return super().prefill(prompts, memory, positions)


class FusedStep:
    """The step over shared buffers: it reads their tokens, leaves the next ones there, and returns the logits."""

    def __init__(self, model: Transformer, buffers: StepBuffers) -> None:
        from phasor.ops.decode import (
            convolve,
            embedding,
            experts,
            experts_one_row,
            gemv,
            lm_head_argmax,
            split_k_gemm,
        )

        config, device, dtype = model.config, buffers.tokens.device, model.tokens.dtype
        rows, stack = len(buffers.tokens), cast(Stack, model.decoder)
        self.embed_tokens: Any = embedding.embed_tokens
        self.kernels: Any = gemv
        self.convolutions: Any = convolve
        self.experts: Any = experts
        self.one_row: Any = experts_one_row
        self.lm_head: Any = lm_head_argmax
        self.split_k: Any = split_k_gemm
        quantized = any(isinstance(part, QuantizedLinear) for part in linears_of(stack))  # routers are not
        self.few = rows <= (gemv.MAX_GEMV_ROWS_QUANTIZED.get(dtype, 1) if quantized else gemv.MAX_GEMV_ROWS)
        self.pdl = supports_pdl(device)
        self.sums = None if self.few or rows > split_k_gemm.MAX_ROWS else split_k_gemm.SplitKSums(rows, device)
        self.buffers, self.cache = buffers, buffers.cache
        self.positions = self.cache.next_positions.view(-1)
        self.embedding, self.head, self.norm = model.tokens, cast(LogitsHead, model.head), stack.norm
        self.table = self.head.table(model.tokens.table)
        self.multiplier = config.placement.multiplier
        self.stack, self.adds_to_input = stack, "input" in config.position.acts_on
        self.kept: dict[Hashable, Any] = {}  # the memory that layers share
        self.fused_attentions = [self.build_attention(index) for index in range(config.num_layers)]
        self.needs_contexts = any(fused is None or fused.takes_context for fused in self.fused_attentions)
        self.fused_networks = [network_why_not(*each) is None for each in layers_of(stack)]
        self.logits = self.output(config.vocab_size)
        self.x = torch.empty_like(self.output(config.dim))
        self.argmax = torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX, device=device)

    @property
    def computes_floats(self) -> bool:
        """Whether nothing but tokens that a kernel computes tells another where to read."""
        all_fused = all(self.fused_networks) and None not in self.fused_attentions
        return all_fused and not any(isinstance(part, Experts) for part in self.stack.modules())

    def clear_tokens(self) -> None:
        """As before the first step."""
        self.buffers.tokens.zero_()
        self.argmax.fill_(self.lm_head.EMPTY_ARGMAX)

    def build_attention(self, index: int) -> FusedAttention | None:
        """The attention of a layer; None where no kernel computes it."""
        layer, block = layers_of(self.stack)[index]
        if attention_why_not(layer, block) is not None:
            return None
        return block.attention.fused_attention(self, self.stack.position(self.stack.scheme_index[index]), index)

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, which layers with the same key share."""
        if key not in self.kept:
            self.kept[key] = make()
        return cast(T, self.kept[key])

    def output(self, width: int, use: str = "") -> Tensor:
        """Memory for a projection of that many features; that of a `use` is no other's."""
        shape, device = (len(self.buffers.tokens), width), self.buffers.tokens.device
        return self.share((width, use), lambda: torch.empty(shape, device=device, dtype=self.embedding.dtype))

    def __call__(self) -> Tensor:
        x = self.embed()
        contexts = self.contexts(x) if self.needs_contexts else [None] * len(self.fused_attentions)
        biases: Biases = {}
        given = zip(self.stack.blocks, self.fused_attentions, self.fused_networks, contexts, strict=True)
        for block, fused, network_is_fused, ctx in given:
            attention, network = cast(Block, block).attention, cast(Block, block).feedforward
            norms = iter(cast(Block, block).residual.norms)
            if fused is not None:
                fused(x, next(norms), ctx, biases)
            elif cast(Block, block).attends:
                self.add_module(x, partial(attention, ctx=ctx), next(norms))
            if network is None:
                continue
            if not network_is_fused:
                self.add_module(x, network, next(norms))
            elif isinstance(network, Experts):
                self.add_experts(x, network, next(norms))
            else:
                norm = next(norms)
                self.add(self.feed(x, network, norm), network.down, x)
        return self.choose(x)

    def contexts(self, x: Tensor) -> list[AttentionContext]:
        """What modules take, and a bias is computed from: masks and positions over the static cache."""
        seq = self.cache.sequence_info(self.buffers.tokens[:, None], {})
        records = Record().per_layer(len(self.stack.layers))
        return self.stack._self_attention_contexts(x[:, None], seq, None, self.cache, records)

    def add_module(self, x: Tensor, module: Callable[[Tensor], Tensor], norm: nn.Module) -> None:
        """`x += multiplier * module(norm(x))`."""
        x.add_(module(self.normalize(x, norm)[:, None])[:, 0], alpha=self.multiplier)

    def embed(self) -> Tensor:
        """The vectors of the tokens."""
        tokens, embedding = self.buffers.tokens, self.embedding
        if isinstance(embedding, Quantized):
            x = embedding(tokens)
        else:
            given = {"scale": embedding.scale_in(embedding.dtype), "pdl": self.pdl}
            x = self.embed_tokens(tokens, embedding.weight, self.x, **given)
        if not self.adds_to_input:
            return x
        return self.stack.position(0).on_input(x[:, None], self.cache.sequence_info(tokens[:, None], {}))[:, 0]

    def project(
        self,
        x: Tensor,
        linear: nn.Linear | QuantizedLinear,
        out: Tensor,
        norm: nn.Module,
        convolution: ConvolutionArgs | None = None,
        other: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`linear(norm(x))`, convolved where there is a convolution, and then the `other` of `project_convolve` too."""
        if not self.few:
            x = self.normalize(x, norm)
            y = self.multiply(x, linear, out) if self.splits(x, linear) else linear(x)
            return y if convolution is None else self.convolutions.convolve(y, convolution, pdl=self.pdl)
        given = {"norm": self.norm_args(norm), "bias": linear.bias, "pdl": self.pdl}
        if convolution is not None:
            return self.convolutions.project_convolve(x, matrix(linear), out, convolution, other=other, **given)
        return self.kernels.project(x, matrix(linear), out, **given)

    def splits(self, x: Tensor, linear: nn.Linear | QuantizedLinear) -> bool:
        """Whether `linear(x)` is by the split-K kernel."""
        plain = self.sums is not None and isinstance(linear, nn.Linear)
        return plain and self.split_k.split_k_gemm_why_not(x, linear.weight) is None

    def multiply(self, x: Tensor, linear: nn.Linear | QuantizedLinear, out: Tensor, **given: Any) -> Tensor:
        """`linear(x)` by the split-K kernel, with the activation or residual that is given."""
        given |= {"bias": linear.bias, "pdl": self.pdl}
        return cast(Tensor, self.split_k.split_k_gemm(x, linear.weight, out, self.sums, **given))

    def add(self, y: Tensor, linear: nn.Linear | QuantizedLinear, x: Tensor, norm: nn.Module | None = None) -> None:
        """`x += multiplier * linear(norm(y))`."""
        if self.few:
            given = {"residual": x, "multiplier": self.multiplier, "pdl": self.pdl}
            norm_args = None if norm is None else self.norm_args(norm)
            self.kernels.project(y, matrix(linear), x, norm=norm_args, bias=linear.bias, **given)
        elif self.splits(y, linear):
            self.multiply(y, linear, x, residual=x, multiplier=self.multiplier)
        elif isinstance(linear, nn.Linear) and linear.bias is None:
            x.addmm_(y, linear.weight.t(), alpha=self.multiplier)
        else:
            x.add_(linear(y), alpha=self.multiplier)

    def feed(self, x: Tensor, network: FeedForward, norm: nn.Module) -> Tensor:
        """The hidden features of the feed-forward network of `norm(x)`."""
        activation, glu = ACTIVATIONS[network.config.activation.kind], network.config.gated
        out = self.output(network.down.in_features)
        if not self.few:
            x = self.normalize(x, norm)
            if self.splits(x, network.up):
                return self.multiply(x, network.up, out, activation=activation, glu=glu)
            return self.kernels.activate(network.up(x), out, activation, glu=glu)
        given = {"norm": self.norm_args(norm), "bias": network.up.bias, "pdl": self.pdl}
        return self.kernels.project_activate(x, matrix(network.up), out, activation, glu=glu, **given)

    def add_experts(self, x: Tensor, network: Experts, norm: nn.Module) -> None:
        """`x += multiplier * network(norm(x))`, the shared expert's part after its hidden features are computed."""
        if network.shared is not None:
            hidden = self.feed(x, network.shared, norm)
            self.add_top_experts(x, network, norm)
            self.add(hidden, network.shared.down, x)
        else:
            self.add_top_experts(x, network, norm)

    def add_top_experts(self, x: Tensor, network: Experts, norm: nn.Module) -> None:
        """`x += multiplier * experts(norm(x))`, of the experts that the router chooses."""
        if len(x) > MAX_EXPERT_ROWS:
            y = norm(x)
            x.add_(EXPERTS(network, y, network.route_logits(y)), alpha=self.multiplier)
            return
        args, router = network.kernel_args(), matrix(network.router)
        merged = len(x) == 1 and self.one_row.router_is_small(router)
        given = {"residual": x, "multiplier": self.multiplier, "pdl": self.pdl}
        workspace = self.share((args.down.shape, args.top_k, merged), lambda: self.expert_workspace(x, args, merged))
        if merged:
            given |= {"norm": self.norm_args(norm), "router_bias": network.router.bias}
            self.one_row.experts_one_row(x, router, args, x, workspace, **given)
        elif self.few:
            logits = self.project(x, network.router, x.new_empty(len(x), len(args.up)), norm)
            self.experts.experts(x, logits, args, x, workspace, norm=self.norm_args(norm), **given)
        else:
            y = self.normalize(x, norm)
            self.experts.experts(y, network.router(y), args, x, workspace, **given)

    def expert_workspace(self, x: Tensor, args: ExpertsArgs, merged: bool) -> Any:
        """Memory of the kernels of experts; `merged` are those for one row and a small router."""
        if merged:
            return self.one_row.OneRowWorkspace(args, x.dtype, x.device)
        return self.experts.ExpertsWorkspace(len(x), args, x.dtype, x.device)

    def choose(self, x: Tensor) -> Tensor:
        """The logits; their likeliest tokens are the next ones."""
        if not self.few or (len(x) > self.kernels.MAX_GEMV_ROWS and isinstance(self.table, Tensor)):
            logits = self.head(self.normalize(x, self.norm), self.embedding.table)
            self.buffers.store_argmax(logits)
            self.cache.commit()
            return logits
        given = {"norm": self.norm_args(self.norm), "bias": self.head.bias, "pdl": self.pdl}
        self.lm_head.lm_head_argmax(x, self.table, self.logits, self.argmax, multiplier=self.head.multiplier, **given)
        tokens, history, step_index = self.buffers.tokens, self.buffers.history, self.buffers.step_index
        counters = step_index, self.cache.counts, self.positions
        self.lm_head.advance_step(self.argmax, tokens, history, *counters, pdl=self.pdl)
        return self.logits

    def normalize(self, x: Tensor, norm: nn.Module) -> Tensor:
        """`norm(x)` by its kernel, however few elements there are: a graph launches it as fast as any other."""
        if not isinstance(norm, RMSNorm):
            return cast(Tensor, norm(x))
        return cast(Tensor, self.kernels.normalize(x, self.norm_args(norm), pdl=self.pdl))

    def norm_args(self, norm: nn.Module) -> NormArgs:
        """A norm as the kernels take it."""
        rms = cast(RMSNorm, norm)
        return NormArgs(cast(Tensor, rms.weight), rms.offset, rms.eps)


def layers_of(stack: Stack) -> list[tuple[Layer, Block]]:
    """The layers of a decoder and their blocks."""
    return list(zip(stack.layers, (cast(Block, block) for block in stack.blocks), strict=True))
