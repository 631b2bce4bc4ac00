"""Tokens grouped by the experts that their router chose, so that each expert multiplies its own tokens once.

Nothing waits for the router, and no shape depends on its choices. Where kernels run, routing is two launches, and rows
are copied, or summed by their weights, in one launch each; gradients likewise.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from phasor.config import ExpertsConfig
from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import KERNEL_DTYPES, Dispatch, Path, triton_why_not
from phasor.ops.routing.arguments import CombineArgs
from phasor.ops.routing.reference import SortedRouting

MAX_EXPERTS, MAX_TOP_K = 1024, 32  # what a tile of a kernel holds


class Routing(Protocol):
    """Which tokens each expert gets, and with what weights."""

    @property
    def ends(self) -> Tensor:
        """Where the rows of each expert end, `[num_experts]`, int32."""

    def gather(self, x: Tensor) -> Tensor:
        """The rows of tokens `[N, dim]` for every choice, sorted by expert: `[N top_k, dim]`."""

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add its expert's bias, of `[num_experts, dim]`, to each row."""

    def combine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of the rows of every token with their biases, by the weights of their experts: `[N, dim]`."""


def group_by_expert(
    tokens: Tensor,
    logits: Tensor,
    config: ExpertsConfig,
    correction: Tensor | None = None,
    first_expert: int = 0,
    num_experts: int | None = None,
) -> Routing:
    """Choose experts for every token by its logits `[N, experts]`, and sort the choices by expert.

    The experts are the `num_experts` from `first_expert` where other processes hold the rest.

    >>> config = ExpertsConfig(num_experts=2, top_k=1)
    >>> routing = group_by_expert(torch.zeros(2, 1), torch.tensor([[0.0, 9.0], [9.0, 0.0]]), config)
    >>> rows = routing.gather(torch.tensor([[5.0], [6.0]]))
    >>> rows.tolist(), routing.ends.tolist()
    ([[6.0], [5.0]], [1, 2])
    >>> routing.combine(10 * rows, None).tolist()
    [[50.0], [60.0]]
    """
    num_experts = logits.shape[-1] if num_experts is None else num_experts
    routing: Routing = ROUTING(tokens, logits, config, correction, first_expert, num_experts)
    return routing


class KernelRouting:
    """Routing by Triton kernels; `rows` says which row each choice of a token becomes."""

    def __init__(
        self,
        tokens: Tensor,
        logits: Tensor,
        config: ExpertsConfig,
        correction: Tensor | None,
        first_expert: int,
        num_experts: int,
    ) -> None:
        self.logits, self.normalize = logits, config.normalize
        # The gradient of the weights goes to the logits where they are used, and this needs none.
        self.weights, self.rows, self.ends = sort_choices_op(logits.detach(), config.top_k, config.normalize)

    def gather(self, x: Tensor) -> Tensor:
        rows: Tensor = gather_op(x, self.rows)
        return rows

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return x if bias is None else add_bias_op(x, bias, self.ends)

    def clamped_swiglu(self, x: Tensor, bias: Tensor | None, limit: float, gain: float) -> Tensor:
        """`gate sigmoid(gain gate) (up + 1)` of gate and up side by side, clamped after adding their expert's bias."""
        y: Tensor = clamped_swiglu_op(x, bias, self.ends, limit, gain)
        return y

    def combine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        args = CombineArgs(x, bias, self.logits, self.weights, self.rows, self.ends, self.normalize)
        y: Tensor = combine_op(args)
        return y


def kernels_why_not(
    tokens: Tensor,
    logits: Tensor,
    config: ExpertsConfig,
    correction: Tensor | None,
    first_expert: int,
    num_experts: int,
) -> str | None:
    """Why Triton kernels do not group these tokens; None where they do."""
    reason = triton_why_not(tokens, logits) or config.kernel_why_not
    if reason is not None:
        return reason
    if num_experts < logits.shape[-1]:
        return "other processes hold some of the experts"
    if logits.shape[-1] > MAX_EXPERTS or config.top_k > MAX_TOP_K:
        return f"there are more than {MAX_EXPERTS} experts, or {MAX_TOP_K} of a token"
    if len(tokens) == 0:
        return "there are no tokens"
    for x in (tokens, logits):
        if x.dtype not in KERNEL_DTYPES:
            return f"{str(x.dtype)[6:]} has no kernel"
        if hasattr(x, "__tensor_flatten__"):
            return f"a {type(x).__name__} is made of other tensors"
    return None


@custom_op("phasor::sort_choices")
def sort_choices_op(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    from phasor.ops.routing.kernels import sort_choices

    return sort_choices(logits, top_k, normalize)


@sort_choices_op.register_fake
def _(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    weights = logits.new_empty((len(logits), top_k), dtype=torch.float32)
    ends = logits.new_empty(logits.shape[1], dtype=torch.int32)
    return weights, torch.empty_like(weights, dtype=torch.int32), ends


@custom_op("phasor::gather_rows")
def gather_op(x: Tensor, rows: Tensor) -> Tensor:
    from phasor.ops.routing.kernels import gather

    return gather(x, rows)


@gather_op.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.numel(), x.shape[1]))


@custom_op("phasor::sum_rows")
def sum_rows_op(x: Tensor, rows: Tensor) -> Tensor:
    from phasor.ops.routing.kernels import combine

    return combine(x, None, None, rows, None)


@sum_rows_op.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((len(rows), x.shape[1]))


def _gather_setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs.rows)


def _gather_backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    (rows,) = ctx.saved_tensors
    return {"x": sum_rows_op(dy, rows)}


gather_op.register_autograd(_gather_backward, setup_context=_gather_setup_context)


@custom_op("phasor::combine_rows")
def combine_op(args: CombineArgs) -> Tensor:
    from phasor.ops.routing.kernels import combine

    return combine(args.x, args.bias, args.weights, args.rows, args.ends)


@combine_op.register_fake
def _(args: CombineArgs) -> Tensor:
    return args.x.new_empty((len(args.rows), args.x.shape[1]))


@custom_op("phasor::combine_rows_backward")
def combine_backward_op(dy: Tensor, args: CombineArgs) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the logits."""
    from phasor.ops.routing.kernels import combine_backward

    return combine_backward(dy, args)


@combine_backward_op.register_fake
def _(dy: Tensor, args: CombineArgs) -> tuple[Tensor, Tensor]:
    return args.x.new_empty(args.x.shape), args.logits.new_empty(args.logits.shape)


def _combine_setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    save_record(ctx, inputs.args)


def _combine_backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    (args,) = saved_record(ctx)
    dx, dlogits = combine_backward_op(dy, args)
    needs_bias = combine_op.needs_grad(ctx, "bias")
    dbias = expert_sums_op(dx, args.ends, args.bias.dtype) if needs_bias else None
    return {"x": dx, "bias": dbias, "logits": dlogits}


combine_op.register_autograd(_combine_backward, setup_context=_combine_setup_context)


@custom_op("phasor::add_expert_bias")
def add_bias_op(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    from phasor.ops.routing.kernels import add_bias

    return add_bias(x, bias, ends)


@add_bias_op.register_fake
def _(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("phasor::expert_sums")
def expert_sums_op(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    from phasor.ops.routing.kernels import expert_sums

    return expert_sums(x, ends, dtype)


@expert_sums_op.register_fake
def _(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((len(ends), x.shape[1]), dtype=dtype)


def _add_bias_setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.dtype = inputs.bias.dtype
    ctx.save_for_backward(inputs.ends)


def _add_bias_backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    (ends,) = ctx.saved_tensors
    return {"x": dy, "bias": expert_sums_op(dy, ends, ctx.dtype) if add_bias_op.needs_grad(ctx, "bias") else None}


add_bias_op.register_autograd(_add_bias_backward, setup_context=_add_bias_setup_context)


@custom_op("phasor::clamped_swiglu")
def clamped_swiglu_op(x: Tensor, bias: Tensor | None, ends: Tensor, limit: float, gain: float) -> Tensor:
    from phasor.ops.routing.kernels import clamped_swiglu

    return clamped_swiglu(x, bias, ends, limit, gain)


@clamped_swiglu_op.register_fake
def _(x: Tensor, bias: Tensor | None, ends: Tensor, limit: float, gain: float) -> Tensor:
    return x.new_empty((len(x), x.shape[1] // 2))


@custom_op("phasor::clamped_swiglu_backward")
def clamped_swiglu_backward_op(
    dy: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor, limit: float, gain: float
) -> Tensor:
    from phasor.ops.routing.kernels import clamped_swiglu_backward

    return clamped_swiglu_backward(dy, x, bias, ends, limit, gain)


@clamped_swiglu_backward_op.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor, limit: float, gain: float) -> Tensor:
    return x.new_empty(x.shape)


def _clamped_swiglu_setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.limit, ctx.gain = inputs.limit, inputs.gain
    ctx.save_for_backward(inputs.x, inputs.bias, inputs.ends)


def _clamped_swiglu_backward(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    x, bias, ends = ctx.saved_tensors
    dx = clamped_swiglu_backward_op(dy, x, bias, ends, ctx.limit, ctx.gain)
    needs_bias = clamped_swiglu_op.needs_grad(ctx, "bias")
    return {"x": dx, "bias": expert_sums_op(dx, ends, bias.dtype) if needs_bias else None}


clamped_swiglu_op.register_autograd(_clamped_swiglu_backward, setup_context=_clamped_swiglu_setup_context)

ROUTING = Dispatch(
    Path("Triton kernels, which count the choices of each expert", KernelRouting, kernels_why_not),
    Path("torch, a stable sort of choices", SortedRouting),
)
