"""AdamW as torch has it, its step in one kernel for all weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasor.ops import dispatch

if TYPE_CHECKING:
    from phasor.ops.adamw.kernels import Plan

ALIGNED = 16  # bytes


def why_not(*tensors: Tensor) -> str | None:
    """Why a step over these weights, gradients and averages is torch's own; None where it is the kernel's.

    >>> why_not(torch.zeros(3), torch.zeros(3))
    'the tensors are not on a GPU'
    """
    if torch.compiler.is_compiling():
        return "the compiler makes a step of its own"
    for kind in {type(x) for x in tensors}:
        if hasattr(kind, "__tensor_flatten__"):
            return f"a {kind.__name__} is made of other tensors"
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or len({x.device for x in tensors}) > 1:
        return "weights, gradients and averages are not of one type on one device"
    for dtype in dtypes.difference(dispatch.KERNEL_DTYPES):
        return f"{str(dtype)[6:]} has no kernel"
    if not all(x.is_contiguous() for x in tensors):
        return "a weight, its gradient or its averages are not contiguous"
    return dispatch.triton_why_not(*tensors[:1])


@dataclass
class Lists:
    """The tensors of some weights that have a gradient, in the same order."""

    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def why_not(self) -> str | None:
        """Why a step over them is torch's own; None where it is the kernel's."""
        if not self.weights:
            return "no weight has a gradient"
        read = [*self.weights, *self.gradients, *self.means, *self.squares]
        reason = why_not(*read)
        if reason is not None:
            return reason
        if {(step.dtype, step.device) for step in self.steps} != {(torch.float32, self.weights[0].device)}:
            return "a count of steps is not in float32 where its weight is"
        if any(x.data_ptr() % ALIGNED for x in read):
            return f"a weight, its gradient or its averages do not begin at a multiple of {ALIGNED} bytes"
        return None

    def places(self) -> tuple[int, ...]:
        """Where all lie but the gradients, and how many weights there are in each."""
        kept = [*self.weights, *self.means, *self.squares, *self.steps]
        return (*(x.data_ptr() for x in kept), *(x.numel() for x in self.weights))


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step is one kernel for all weights where it can be, and torch's own elsewhere.

    State, its names and its types are torch's: each goes on where the other stopped. The kernel computes in float32
    and rounds once. As with torch's own, nothing changes at a step where the tensor `found_inf` is 1. Gradients are
    multiplied by the tensor `scale` where there is one, as for clipping; by the kernel without writing them.

    With a `seed`, which only the kernel takes, bfloat16 weights are rounded up or down at random so that the mean of
    an update is kept: rounded to the nearest, one below a 512th of its weight is lost.

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
    _plan: tuple[tuple[int, ...], Plan] | None = None
    _captured: tuple[Plan, ...] = ()  # what CUDA graphs read

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: as torch has it, and the seed."""
        return super().__getstate__() | {"seed": self.seed}

    def why_not(self) -> str | None:
        """Why the next step is torch's own; None where it is the kernel's."""
        return self._why_not(self._gathered()[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, after the closure if there is one, whose loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists, counts = self._gathered()
        reason = self._why_not(lists)
        if reason is None:
            self._step(lists, counts)
        elif self.seed is not None and lists.weights:
            raise ValueError(f"weights cannot be rounded at random: {reason}")
        else:
            if self.scale is not None and lists.gradients:
                torch._foreach_mul_(lists.gradients, self.scale)
            torch_step(self)
        return loss

    def _gathered(self) -> tuple[Lists, list[int]]:
        """The tensors of all groups, and how many each has; state is made as torch makes it."""
        lists, counts = Lists(), []
        for group in self.param_groups:
            before = len(lists.weights)
            self._init_group(group, lists.weights, lists.gradients, lists.means, lists.squares, [], lists.steps)
            counts.append(len(lists.weights) - before)
        return lists, counts

    def _why_not(self, lists: Lists) -> str | None:
        if getattr(self, "grad_scale", None) is not None:
            return "a GradScaler scales the gradients"
        for group in self.param_groups:
            if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
                return "only the fused form has a kernel, without amsgrad, maximize and differentiable"
            if any(isinstance(beta, Tensor) for beta in group["betas"]):
                return "the betas are tensors"
        reason = lists.why_not()
        if reason is None and self.seed is not None and lists.weights[0].dtype != torch.bfloat16:
            return "only bfloat16 is rounded at random"
        if reason is not None or not capturing(lists.weights[0]):
            return reason
        if not all(group["capturable"] for group in self.param_groups):
            return "it is not capturable"
        if self._plan is None or self._plan[0] != lists.places():
            return "the first step with these tensors is captured in a CUDA graph, where no table can be made"
        return None

    def _step(self, lists: Lists, counts: list[int]) -> None:
        from phasor.ops.adamw.kernels import Plan, Shared

        weight, places = lists.weights[0], lists.places()
        if self._plan is None or self._plan[0] != places:
            self._plan = places, Plan(lists.weights, lists.means, lists.squares, lists.steps)
        plan = self._plan[1]
        if capturing(weight) and plan not in self._captured:
            self._captured += (plan,)
        groups = [
            Shared(
                tensors=count, rate=rate_beside(weight, group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1],
                eps=group["eps"], decay=group["weight_decay"],
            )
            for group, count in zip(self.param_groups, counts, strict=True)
            if count
        ]  # fmt: skip
        scale, wrong = (x if x is None else x.to(weight.device) for x in (self.scale, self.found_inf))
        plan.step(lists.gradients, groups, scale, wrong, self.seed)


def capturing(weight: Tensor) -> bool:
    """Whether what happens to a weight now is kept in a CUDA graph."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def rate_beside(weight: Tensor, rate: float | Tensor) -> float | Tensor:
    """A rate that lies where a weight does stays there; any other is a number."""
    return rate if isinstance(rate, Tensor) and rate.device == weight.device else float(rate)


def torch_step(optimizer: torch.optim.AdamW) -> None:
    """The step of torch's own class, without the hooks that it runs around a step: those of ours have run."""
    step: Any = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
