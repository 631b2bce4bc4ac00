"""A mixture of experts: a router sends each token to a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ExpertsConfig, FeedForwardConfig, NormConfig, RMSNormConfig, SwiGLUClampedConfig
from phasor.config.schema import quote
from phasor.nn.checks import describe_tensor
from phasor.nn.feed_forward import FeedForward, activate
from phasor.nn.grouped_matmul import fits_grouped_mm, grouped_matmul
from phasor.nn.norm import NoNorm, at_least_float32, build_norm
from phasor.nn.record import Record
from phasor.ops import dispatch
from phasor.ops.decode.arguments import ACTIVATIONS, ExpertsArgs
from phasor.ops.decode.tiles import MAX_EXPERT_ROWS
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.glu import GLU_ACTIVATIONS
from phasor.ops.launch import on_device
from phasor.ops.routing import (
    EXPERT_LOADS,
    ROUTING,
    GroupedExpertsArgs,
    KernelRouting,
    Routing,
    SortedRouting,
    grouped_experts_op,
)
from phasor.ops.routing import kernels_why_not as routing_why_not

DEFAULT_NORM = RMSNormConfig()
RoutingArgs = tuple[Tensor, Tensor, ExpertsConfig, Tensor | None, int, int]


class Experts(nn.Module):
    """`sum_e weight_e(x) expert_e(x)` over the `top_k` experts that the router chooses, plus a shared one.

    Nothing waits for the router, and no shape depends on its choices. A few tokens are multiplied by the experts that
    any of them chose. Many are sorted by expert, so that each expert multiplies its own tokens once.

    The router's `correction` is no parameter, but a buffer that is saved with the model and stays in float32.
    """

    correction: Tensor | None

    def __init__(
        self,
        config: FeedForwardConfig,
        dim: int,
        hidden_dim: int,
        dropout: float = 0.0,
        norm: NormConfig = DEFAULT_NORM,
    ) -> None:
        super().__init__()
        assert config.experts is not None
        self.config, self.experts = config, config.experts
        count, hidden = self.experts.num_experts, self.experts.hidden_dim or hidden_dim
        self.router = nn.Linear(dim, count, bias=self.experts.router_bias)
        self.register_buffer("correction", torch.zeros(count) if self.experts.correction else None)
        latent = self.experts.latent_dim
        width = latent or dim
        self.up = nn.Parameter(torch.empty(count, width, hidden * (2 if config.gated else 1)))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.up_bias = nn.Parameter(torch.zeros(count, self.up.shape[-1])) if config.bias else None
        self.down_bias = nn.Parameter(torch.zeros(count, width)) if config.bias else None
        self.latent_down = nn.Identity() if latent is None else nn.Linear(dim, latent, bias=False)
        self.latent_up = nn.Identity() if latent is None else nn.Linear(latent, dim, bias=False)
        self.first_expert: int | None = None  # of those this module holds, where other processes hold the rest
        self.dropout = nn.Dropout(dropout)
        shared = self.experts.shared_dim
        self.shared = None if shared is None else FeedForward(config, dim, shared, dropout)
        self.shared_gate = nn.Linear(dim, 1, bias=False) if self.experts.shared_gate else None
        self.router_norm = build_norm(norm, dim) if self.experts.router_norm else None
        self.expert_scale = nn.Parameter(torch.ones(count)) if self.experts.expert_scale else None
        # Before and after the shared expert, then before and after the others.
        self.norms = nn.ModuleList(build_norm(norm, dim) if self.experts.branch_norms else NoNorm() for _ in range(4))

    @property
    def routers(self) -> tuple[nn.Linear, ...]:
        """The layers that decide how much of which expert a token gets."""
        return (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.correction
        super()._apply(fn, recurse)
        if before is not None and self.correction is not None and self.correction.dtype != before.dtype:
            self.correction = before.to(self.correction.device)
        return self

    def kernel_args(self) -> ExpertsArgs:
        """The experts as kernels take them."""
        activation, name, limits = self.config.activation, self.config.activation.kind, (0.0, 0.0)
        if isinstance(activation, SwiGLUClampedConfig):
            limits = activation.limit, activation.gain
        return ExpertsArgs(
            self.up,
            self.down,
            self.up_bias,
            self.down_bias,
            ACTIVATIONS.get(name, name),
            self.config.gated,
            self.experts.top_k,
            self.experts.normalize,
            *limits,
        )

    def forward(self, x: Tensor, router_logits: list[Tensor] | None = None) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, dim]
        logits = self.route_logits(tokens)  # [N, experts]
        if router_logits is not None:
            router_logits.append(logits.view(*x.shape[:-1], -1))
        before_shared, after_shared, before, after = self.norms
        y = self.mix_experts(self.latent_down(before(tokens)), logits)
        y = after(self.latent_up(y))  # [N, dim]
        if self.shared is not None:
            extra = after_shared(self.shared(before_shared(tokens)))  # [N, dim]
            y = y + (extra if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * extra)
        return y.view(x.shape)

    def mix_experts(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The routed experts of tokens `[N, dim or latent]`, by the router's logits `[N, experts]`."""
        y: Tensor = EXPERTS(self, tokens, logits)
        return y

    def multiply(self, x: Tensor, name: str, ends: Tensor) -> Tensor:
        """Rows sorted by expert, where those of each end at `ends`, times their expert's matrix of this name."""
        return grouped_matmul(x, getattr(self, name), ends)

    def route_logits(self, tokens: Tensor) -> Tensor:
        """The router's logits `[N, experts]`, in at least float32 but where kernels route."""
        if self.router_norm is not None:
            tokens = self.router_norm(tokens) * tokens.shape[-1] ** -0.5
        if self.experts.kernel_why_not is None or type(self.router) is not nn.Linear:
            logits: Tensor = self.router(tokens)
            return logits
        bias = None if self.router.bias is None else at_least_float32(self.router.bias)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(at_least_float32(tokens), at_least_float32(self.router.weight), bias)

    def by_kernels(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The routed experts of a few tokens, of which only those in use are read."""
        from phasor.ops.decode.experts import ExpertsWorkspace, experts

        args, tokens = self.kernel_args(), tokens.contiguous()
        with on_device(tokens):
            workspace = ExpertsWorkspace(len(tokens), args, tokens.dtype, tokens.device)
            return experts(tokens, logits.contiguous(), args, torch.empty_like(tokens), workspace)

    def kernels_why_not(self, tokens: Tensor, logits: Tensor) -> str | None:
        """Why the kernels for a few tokens do not apply; None where they do."""
        if len(tokens) > MAX_EXPERT_ROWS:
            return f"more than {MAX_EXPERT_ROWS} tokens are grouped by expert"
        if self.first_expert is not None:
            return "other processes hold some of the experts"
        if torch.compiler.is_compiling():
            return "the compiler takes grouped matrix products"
        reason = dispatch.triton_why_not(tokens, self.up) or self.experts.kernel_why_not
        if reason is not None:
            return reason
        if dispatch.needs_grad(tokens, logits, *self.parameters()):
            return "the kernels for a few tokens have no gradients"
        if self.training and self.dropout.p > 0:
            return "hidden features are dropped out"
        weights = [w for w in (self.up, self.down, self.up_bias, self.down_bias) if w is not None]
        if tokens.dtype not in dispatch.KERNEL_DTYPES or any(w.dtype != tokens.dtype for w in weights):
            return "tokens and weights are not all float32, bfloat16 or float16"
        if any(hasattr(x, "__tensor_flatten__") for x in (tokens, *weights)):
            return "tokens or weights are made of other tensors"
        return None if all(w.is_contiguous() for w in weights) else "the weights are not contiguous"

    def by_one_operation(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The routed experts of tokens that are sorted by expert, with a gradient by hand."""
        activation, limits = self.config.activation, (0.0, 0.0)
        if isinstance(activation, SwiGLUClampedConfig):
            limits = activation.limit, activation.gain
        weights, config = (self.up, self.down, self.up_bias, self.down_bias), self.experts
        args = GroupedExpertsArgs(logits, *weights, config.top_k, config.normalize, activation.kind, *limits)
        y, *_ = grouped_experts_op(tokens, args)
        return y

    def one_operation_why_not(self, tokens: Tensor, logits: Tensor) -> str | None:
        """Why the routed experts are not one operation; None where they are."""
        reason = routing_why_not(*self.routing_args(tokens, logits))
        if reason is not None:
            return reason
        if not dispatch.needs_grad(tokens, logits, self.up, self.down):
            return "no gradient is needed"
        if self.training and self.dropout.p > 0:
            return "hidden features are dropped out"
        activation = self.config.activation
        if activation.kind not in GLU_ACTIVATIONS and not isinstance(activation, SwiGLUClampedConfig):
            return "the activation has no kernel"
        if dispatch.compute_dtype(tokens) != tokens.dtype:
            return "autocast sets another dtype"
        if not (fits_grouped_mm(tokens, self.up) and fits_grouped_mm(tokens, self.down)):
            return "torch's grouped matrix product does not take these sizes and dtypes"
        made_of_others = any(hasattr(w, "__tensor_flatten__") for w in (self.up, self.down))
        return "the weights are made of other tensors" if made_of_others else None

    def routing_args(self, tokens: Tensor, logits: Tensor) -> RoutingArgs:
        """What tokens are routed with."""
        return tokens, logits, self.experts, self.correction, self.first_expert or 0, len(self.up)

    def by_groups(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The routed experts of tokens that are sorted by expert."""
        routing: Routing = ROUTING(*self.routing_args(tokens, logits))
        hidden = self.multiply(routing.gather(tokens), "up", routing.ends)  # [N top_k, hidden], twice if gated
        hidden = self.activate(routing, hidden)  # [N top_k, hidden]
        if self.training and self.dropout.p > 0:
            hidden = self.dropout(hidden)
        if self.expert_scale is not None:
            assert isinstance(routing, SortedRouting)
            own = self.expert_scale[self.first_expert or 0 :][: len(self.up)]  # of those that this process has
            hidden = hidden * own[routing.expert, None].to(hidden.dtype)
        return routing.combine(self.multiply(hidden, "down", routing.ends), self.down_bias)

    def activate(self, routing: Routing, hidden: Tensor) -> Tensor:
        """Add their experts' biases to rows sorted by expert, and apply the activation."""
        activation = self.config.activation
        if isinstance(routing, KernelRouting) and isinstance(activation, SwiGLUClampedConfig):
            return routing.clamped_swiglu(hidden, self.up_bias, activation.limit, activation.gain)
        return activate(routing.add_bias(hidden, self.up_bias), activation)

    def waits_for_router(self, rows: int, device: torch.device) -> bool:
        """Whether the host has to wait for the router of a decoding step of that many rows on a GPU."""
        dtype = self.up.dtype
        by_kernels = rows <= MAX_EXPERT_ROWS and self.experts.kernel_why_not is None
        if by_kernels and dispatch.TRITON_INSTALLED and dtype in dispatch.KERNEL_DTYPES:
            return False
        if dtype == torch.bfloat16 and torch.cuda.is_available():
            return torch.cuda.get_device_capability(device) < (9, 0)
        return dtype != torch.bfloat16


# The routed experts, asked with the module, tokens `[N, dim]` and the router's logits `[N, experts]`.
EXPERTS = Dispatch(
    Path("Triton kernels that read the experts in use", Experts.by_kernels, Experts.kernels_why_not),
    Path("grouped matrix products, as one operation", Experts.by_one_operation, Experts.one_operation_why_not),
    Path("grouped matrix products", Experts.by_groups),
)


def balancing_loss(
    router_logits: list[Tensor], top_k: int | Sequence[int], attention_mask: Tensor | None = None
) -> Tensor:
    """The load-balancing loss of routers: experts times the sum of (fraction of tokens x mean probability).

    It is `top_k` where every expert gets the same share. `top_k` is an integer, or one per router where they differ.
    Add the loss to that of the model with a small weight.

    >>> float(balancing_loss([torch.zeros(1, 8, 4)], top_k=4))
    4.0
    """
    if not isinstance(router_logits, Sequence) or not router_logits:
        raise ValueError("router_logits must be a list of the routers' logits, such as record.router, and not empty")
    per_router = [top_k] * len(router_logits) if not isinstance(top_k, Sequence) else top_k
    if len(per_router) != len(router_logits):
        raise ValueError(f"top_k must be an integer, or one per router ({len(router_logits)}), not {quote(top_k)}")
    for logits, k in zip(router_logits, per_router, strict=True):
        if type(k) is not int or not 1 <= k <= logits.shape[-1]:
            raise ValueError(f"top_k must be an integer between 1 and the {logits.shape[-1]} experts, not {quote(k)}")
        if attention_mask is not None and (
            attention_mask.dtype != torch.bool or attention_mask.shape != logits.shape[:-1]
        ):
            raise ValueError(
                f"attention_mask must be boolean {list(logits.shape[:-1])}, not {describe_tensor(attention_mask)}"
            )
    routed = [
        RoutedTokens(logits, ExpertsConfig(num_experts=logits.shape[-1], top_k=k), None, attention_mask)
        for logits, k in zip(router_logits, per_router, strict=True)
    ]
    return balance_of(routed)


class RoutedTokens(NamedTuple):
    """The logits `[B, T, experts]` of a router, what it chooses by, and how much each token counts, `[B, T]`."""

    logits: Tensor
    config: ExpertsConfig
    correction: Tensor | None
    counted: Tensor | None = None


def mixtures_of(module: nn.Module) -> list[Experts]:
    """The mixtures of experts in a module, in order."""
    return [part for part in module.modules() if isinstance(part, Experts)]


def routed_tokens(model: Any, record: Record) -> list[list[RoutedTokens]]:
    """What a forward recorded of the routers of each side of a model, of an encoder-decoder the decoder's first."""
    sides = [(model.decoder or model.encoder, record)]
    if record.encoder is not record:
        sides.append((model.encoder, record.encoder))
    return [
        [RoutedTokens(x, part.experts, part.correction) for x, part in zip(kept.router or [], mixtures, strict=True)]
        for kept, mixtures in ((kept, mixtures_of(stack)) for stack, kept in sides)
    ]


def balance_of(routed: Sequence[RoutedTokens], sum_over: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
    """The balancing loss of routers, whose probabilities are their scores over the sum of these.

    Where other processes have more tokens, which `sum_over` sums over, it is this process's part of their loss.
    """
    alike: dict[Any, list[RoutedTokens]] = {}  # layers that are computed at once
    for each in routed:
        key = each.config, each.logits.shape, each.logits.dtype, id(each.counted)
        alike.setdefault(key, []).append(each)
    total = torch.zeros((), device=routed[0].logits.device)
    for layers in alike.values():
        _, config, correction, mask = layers[0]
        logits = torch.stack([each.logits for each in layers]).flatten(1, -2)  # [L, N, experts]
        if correction is not None:
            correction = torch.stack([each.correction for each in layers if each.correction is not None])[:, None]
        counted = None if mask is None else mask.flatten().float()
        chose, probabilities = EXPERT_LOADS(logits, config, correction, counted)  # [L, experts] each
        tokens = chose.new_full((), logits.shape[1]) if counted is None else counted.sum()
        sums = sum_over(torch.cat((chose, tokens.expand(len(layers), 1)), dim=1))
        share, tokens = sums[:, :-1] / sums[:, -1:], sums[:, -1:]
        total = total + config.num_experts * (share * probabilities / tokens).sum()
    return total / len(routed)
