"""AdamW as in torch, with a step that is one kernel for all parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phasor.ops import dispatch
from phasor.ops.dispatch import Dispatch, Path

if TYPE_CHECKING:
    from phasor.ops.adamw.kernels import StepTables

ALIGNMENT = 16  # bytes


def adamw_why_not(*tensors: Tensor) -> str | None:
    """Why a step over these parameters, gradients and averages is not the kernel's; None where it is.

    >>> adamw_why_not(torch.zeros(3), torch.zeros(3))
    'the tensors are not on a GPU'
    """
    if torch.compiler.is_compiling():
        return "the compiler generates its own step"
    for kind in {type(x) for x in tensors}:
        if hasattr(kind, "__tensor_flatten__"):
            return f"a {kind.__name__} is made of other tensors"
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or len({x.device for x in tensors}) > 1:
        return "parameters, gradients and averages are not of one dtype on one device"
    for dtype in dtypes.difference(dispatch.KERNEL_DTYPES):
        return f"{str(dtype)[6:]} has no kernel"
    if not all(x.is_contiguous() for x in tensors):
        return "a parameter, its gradient or its averages are not contiguous"
    return dispatch.triton_why_not(*tensors[:1])


@dataclass
class StepTensors:
    """The tensors of all parameters that have a gradient, in one order, group after group."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)

    def why_not(self) -> str | None:
        """Why a step over them is not the kernel's; None where it is."""
        if not self.params:
            return "no parameter has a gradient"
        tensors = [*self.params, *self.grads, *self.exp_avgs, *self.exp_avg_sqs]
        reason = adamw_why_not(*tensors)
        if reason is not None:
            return reason
        if {(step.dtype, step.device) for step in self.steps} != {(torch.float32, self.params[0].device)}:
            return "a step counter is not in float32 on the device of its parameter"
        stored = (x for x in tensors if type(x) in (Tensor, nn.Parameter))  # fake tensors have no address
        if any(x.data_ptr() % ALIGNMENT for x in stored):
            return f"a parameter, its gradient or its averages do not begin at a multiple of {ALIGNMENT} bytes"
        return None

    def addresses(self) -> tuple[int, ...]:
        """The addresses of all tensors but the gradients, and the sizes of the parameters."""
        kept = [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *self.steps]
        return (*(x.data_ptr() for x in kept), *(x.numel() for x in self.params))


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step is one kernel for all parameters where it can be, and torch's own elsewhere.

    The state has torch's names and dtypes, so each can continue from the other's. The kernel computes in float32 and
    rounds once. As in torch, nothing changes in a step where the tensor `found_inf` is 1. Gradients are multiplied by
    the tensor `scale` if it is set, as for clipping; the kernel does not write them.

    With a `seed`, which only the kernel takes, bfloat16 parameters are rounded stochastically, which keeps the mean of
    a step: rounded to nearest, a change of less than a 512th of its parameter is lost.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = AdamW([weight], lr=0.5, weight_decay=0.0, fused=True)
    >>> weight.grad, optimizer.scale = torch.tensor([30.0, -40.0]), torch.tensor(0.5)
    >>> optimizer.step()
    >>> weight.tolist()
    [0.5, 2.5]
    >>> optimizer.why_not()
    'the tensors are not on a GPU'
    """

    scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int | None = None
    _tables: tuple[tuple[int, ...], StepTables] | None = None
    _captured_tables: tuple[StepTables, ...] = ()  # read by CUDA graphs

    def __getstate__(self) -> dict[str, Any]:
        """The state of copies and pickles: torch's, and the seed."""
        return super().__getstate__() | {"seed": self.seed}

    def why_not(self) -> str | None:
        """Why the next step is not the kernel's; None where it is."""
        return _triton_why_not(self, self.gather())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, after the closure if there is one, whose loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ADAMW(self, self.gather())
        return loss

    def gather(self) -> StepTensors:
        """The tensors of a step over all groups; missing state is initialized as torch does it."""
        tensors = StepTensors()
        for group in self.param_groups:
            before = len(tensors.params)
            self._init_group(
                group, tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs, [], tensors.steps
            )
            tensors.group_sizes.append(len(tensors.params) - before)
        return tensors


def _triton_why_not(optimizer: AdamW, tensors: StepTensors) -> str | None:
    if getattr(optimizer, "grad_scale", None) is not None:
        return "a GradScaler scales the gradients"
    for group in optimizer.param_groups:
        if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
            return "only the fused form has a kernel, without amsgrad, maximize and differentiable"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "the betas are tensors"
    reason = tensors.why_not()
    if reason is None and optimizer.seed is not None and tensors.params[0].dtype != torch.bfloat16:
        return "only bfloat16 is rounded stochastically"
    if reason is not None or not is_capturing(tensors.params[0]):
        return reason
    if not all(group["capturable"] for group in optimizer.param_groups):
        return "it is not capturable"
    if optimizer._tables is None or optimizer._tables[0] != tensors.addresses():
        return "the first step with these tensors is captured in a CUDA graph, where no table can be built"
    return None


def _triton_step(optimizer: AdamW, tensors: StepTensors) -> None:
    from phasor.ops.adamw.kernels import GroupOptions, StepTables

    param, addresses = tensors.params[0], tensors.addresses()
    if optimizer._tables is None or optimizer._tables[0] != addresses:
        tables = StepTables(tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps)
        optimizer._tables = addresses, tables
    tables = optimizer._tables[1]
    if is_capturing(param) and tables not in optimizer._captured_tables:
        optimizer._captured_tables += (tables,)
    groups = [
        GroupOptions(
            size=size, lr=local_lr(group["lr"], param), beta1=group["betas"][0], beta2=group["betas"][1],
            eps=group["eps"], weight_decay=group["weight_decay"],
        )
        for group, size in zip(optimizer.param_groups, tensors.group_sizes, strict=True)
        if size
    ]  # fmt: skip
    scale, found_inf = (x if x is None else x.to(param.device) for x in (optimizer.scale, optimizer.found_inf))
    tables.step(tensors.grads, groups, scale, found_inf, optimizer.seed)


def _torch_step(optimizer: AdamW, tensors: StepTensors) -> None:
    if optimizer.seed is not None and tensors.params:
        raise ValueError(f"parameters cannot be rounded stochastically: {_triton_why_not(optimizer, tensors)}")
    if optimizer.scale is not None and tensors.grads:
        torch._foreach_mul_(tensors.grads, optimizer.scale)
    step: Any = torch.optim.AdamW.step
    if getattr(step, "hooked", False):  # the hooks around a step have run for ours
        step = step.__wrapped__
    step(optimizer)


ADAMW = Dispatch(
    Path("one Triton kernel for all parameters", _triton_step, _triton_why_not),
    Path("torch's own AdamW", _torch_step),
)


def is_capturing(param: Tensor) -> bool:
    """Whether operations on a parameter are being captured in a CUDA graph."""
    return param.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def local_lr(lr: float | Tensor, param: Tensor) -> float | Tensor:
    """A learning rate on the device of a parameter as the tensor it is; any other as a float."""
    return lr if isinstance(lr, Tensor) and lr.device == param.device else float(lr)
