"""Operations with their own kernels: in `torch.library` where torch has to see them, called directly elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN_TENSORS = (Tensor, nn.Parameter)
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
# The dispatch keys that torch includes everywhere, in eager code too.
DEFAULT_KEYS = (KEYS(KEY.ADInplaceOrView) | KEYS(KEY.BackendSelect)).raw_repr()


class CustomOp:
    """A function of tensors and scalars that returns tensors, with its own gradient.

    Compilers, torch modes and tensor subclasses see an operation of `torch.library`. Eager code calls the function
    directly, or through an autograd function of the same forward and backward: torch's dispatcher takes longer to find
    a custom operation than a device takes to run it.

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
        self.name, self.forward = name, forward
        # Not by `torch.library.custom_op`: what it adds to a call takes the host longer than the rest of it.
        namespace, short = name.split("::")
        self.library = torch.library.Library(namespace, "FRAGMENT")
        schema = torch.library.infer_schema(forward, mutates_args=())
        self.library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.library.impl(short, forward, "CompositeExplicitAutograd")
        self.op = getattr(getattr(torch.ops, namespace), short).default
        self.backward: Callable[..., Any] = self.raise_no_gradient
        self.setup_context: Callable[..., None] = lambda ctx, inputs, output: None
        self.differentiable: Callable[..., Any] = self.op
        torch.library.register_autograd(
            name,
            lambda ctx, *grads: self.backward(ctx, *grads),
            setup_context=lambda ctx, inputs, output: self.setup_context(ctx, inputs, output),
            lib=self.library,
        )

    def raise_no_gradient(self, *args: Any) -> None:
        raise RuntimeError(f"{self.name}: no autograd formula was registered")

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register the function that returns empty results of the right shapes and dtypes, as in `torch.library`."""
        torch.library.register_fake(self.name, fake, lib=self.library)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the gradient, as in `torch.library`."""
        self.backward, self.setup_context = backward, setup_context

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = self.forward(*inputs)
            setup_context(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function = type(self.name.replace("::", "_"), (torch.autograd.Function,), methods)
        # That of the base class: its own prepares inputs for `torch.func`, which gets the operation itself.
        self.differentiable = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def __call__(self, *inputs: Any) -> Any:
        if needs_dispatcher():
            return self.op(*inputs)
        needs_grad = False
        for x in inputs:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN_TENSORS:
                    return self.op(*inputs)
                needs_grad = needs_grad or x.requires_grad
        return (self.differentiable if needs_grad and torch.is_grad_enabled() else self.forward)(*inputs)


def needs_dispatcher() -> bool:
    """Whether torch has to see every operation here: for a compiler, a tracer, `vmap` or another mode.

    >>> needs_dispatcher(), torch.func.vmap(lambda x: x + needs_dispatcher())(torch.zeros(2)).tolist()
    (False, [1.0, 1.0])
    """
    if torch.compiler.is_compiling():
        return True
    return bool(torch._C._dispatch_tls_local_include_set().raw_repr() & ~DEFAULT_KEYS)


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """Decorate a function to make it a `CustomOp`, which takes positional arguments only."""
    return lambda forward: CustomOp(name, forward)
