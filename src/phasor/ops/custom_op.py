"""Operations with kernels of their own: known to torch where it has to know of them, and called directly elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN_TENSORS = (Tensor, nn.Parameter)
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
ALWAYS = (KEYS(KEY.ADInplaceOrView) | KEYS(KEY.BackendSelect)).raw_repr()  # what torch's dispatcher goes by anywhere


class CustomOp:
    """A function that computes tensors from tensors and numbers, with its own gradient.

    To compilers, to modes of torch and to tensors of other classes it is an operation of `torch.library`. Eager code,
    where torch takes longer to find such an operation than a device to do it, gets a plain call, or an autograd
    function of the same two halves.

    >>> @custom_op("phasor::doctest_double")
    ... def double(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> double.register_fake(torch.empty_like)
    >>> double.register_autograd(lambda ctx, grad: double(grad), setup_context=lambda ctx, inputs, output: None)
    >>> x = torch.ones(2, requires_grad=True)
    >>> double(x).sum().backward()
    >>> x.grad.tolist()
    [2.0, 2.0]
    """

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self.name, self.forward = name.replace("::", "_"), forward
        self.op = torch.library.custom_op(name, forward, mutates_args=())
        self.function: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Give the shapes and types of the result, as `torch.library` has it."""
        self.op.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Give the gradient, as `torch.library` has it."""
        self.op.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = self.forward(*inputs)
            setup_context(ctx, inputs, output)
            return output

        made = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.function = type(self.name, (torch.autograd.Function,), made)

    def __call__(self, *inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if needs_dispatcher() or any(type(x) not in PLAIN_TENSORS for x in tensors):
            return self.op(*inputs)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return self.forward(*inputs)
        return self.op(*inputs) if self.function is None else self.function.apply(*inputs)


def needs_dispatcher() -> bool:
    """Whether torch has to see every operation here, for a compiler, a tracer, a map over batches or another mode.

    >>> needs_dispatcher(), torch.func.vmap(lambda x: x + needs_dispatcher())(torch.zeros(2)).tolist()
    (False, [1.0, 1.0])
    """
    if torch.compiler.is_compiling():
        return True
    return bool(torch._C._dispatch_tls_local_include_set().raw_repr() & ~ALWAYS)


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """Make a function an operation, to be called by its parameters' places."""
    return lambda forward: CustomOp(name, forward)
