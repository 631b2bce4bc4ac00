"""Operations with their own kernels: in `torch.library` where torch has to see them, called directly elsewhere."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

PLAIN_TENSORS = (Tensor, nn.Parameter)
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
# The dispatch keys that torch includes everywhere, in eager code too.
DEFAULT_KEYS = (KEYS(KEY.ADInplaceOrView) | KEYS(KEY.BackendSelect)).raw_repr()


class CustomOp:
    """A function of tensors and scalars that returns tensors, with its own gradient.

    Parameters may be records (`NamedTuple`s) of tensors and scalars too. Operations of torch take no records, so there
    a record's fields take its place; all functions that are registered here see the record.

    Compilers, torch modes and tensor subclasses see an operation of `torch.library`. Eager code calls the function
    directly, or through an autograd function of the same forward and backward: torch's dispatcher takes longer to find
    a custom operation than a device takes to run it.

    >>> @custom_op("phasor::doctest_double")
    ... def double(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> double.register_fake(torch.empty_like)
    >>> double.register_autograd(lambda ctx, grad: {"x": double(grad)}, setup_context=lambda ctx, inputs, output: None)
    >>> x = torch.ones(2, requires_grad=True)
    >>> double(x).sum().backward()
    >>> x.grad.tolist()
    [2.0, 2.0]
    """

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self.name, self.forward = name, forward
        hints = get_type_hints(forward)
        returned = hints.pop("return")
        self.parameters: Any = namedtuple("Inputs", hints)  # type: ignore[misc]
        # For each parameter the class of its record, if it is one.
        self.records = [hint if hasattr(hint, "_fields") else None for hint in hints.values()]
        self.has_records = any(record is not None for record in self.records)
        arguments: dict[str, Any] = {}
        for parameter, hint in hints.items():
            arguments |= get_type_hints(hint) if hasattr(hint, "_fields") else {parameter: hint}
        self.arguments = tuple(arguments)
        flat_forward = self.with_flat_signature(arguments, returned)
        # Not by `torch.library.custom_op`: what it adds to a call takes the host longer than the rest of it.
        namespace, short = name.split("::")
        self.library = torch.library.Library(namespace, "FRAGMENT")
        schema = torch.library.infer_schema(flat_forward, mutates_args=())
        self.library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.library.impl(short, flat_forward, "CompositeExplicitAutograd")
        self.op = getattr(getattr(torch.ops, namespace), short).default
        self.backward: Callable[..., dict[str, Tensor | None]] = self.raise_no_gradient
        self.setup_context: Callable[..., None] = lambda ctx, inputs, output: None
        self.differentiable: Callable[..., Any] = self.op
        torch.library.register_autograd(
            name, self.flat_backward, setup_context=self.flat_setup_context, lib=self.library
        )

    def raise_no_gradient(self, *args: Any) -> dict[str, Tensor | None]:
        raise RuntimeError(f"{self.name}: no autograd formula was registered")

    def with_flat_signature(self, arguments: dict[str, Any], returned: Any) -> Callable[..., Any]:
        """The function as torch infers a schema from it, without records."""
        if not self.has_records:
            return self.forward

        def forward(*flat: Any) -> Any:
            return self.forward(*self.group(flat))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind, annotation=hint) for name, hint in arguments.items()]
        forward.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        return forward

    def flatten(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs with the fields of records in their places."""
        if not self.has_records:
            return inputs
        flat: list[Any] = []
        for record, x in zip(self.records, inputs, strict=True):
            if record is None:
                flat.append(x)
            else:
                flat.extend(x)
        return flat

    def group(self, flat: Sequence[Any]) -> Any:
        """The inputs by name, with records in the places of their fields."""
        if not self.has_records:
            return self.parameters(*flat)
        rest = iter(flat)
        return self.parameters(
            *(next(rest) if record is None else record(*islice(rest, len(record._fields))) for record in self.records)
        )

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register the function that returns empty results of the right shapes and dtypes, as in `torch.library`."""
        torch.library.register_fake(self.name, lambda *flat: fake(*self.group(flat)), lib=self.library)

    def register_autograd(
        self, backward: Callable[..., dict[str, Tensor | None]], *, setup_context: Callable[..., None]
    ) -> None:
        """Register the gradient as in `torch.library`, except that inputs and gradients have names.

        `setup_context(ctx, inputs, output)` gets the inputs as a named tuple. `backward(ctx, *grads)` returns the
        gradients by the names of parameters and of the fields of records; others have none.
        """
        self.backward, self.setup_context = backward, setup_context

        def forward(ctx: Any, *flat: Any) -> Any:
            inputs = self.group(flat)
            output = self.forward(*inputs)
            setup_context(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(self.flat_backward)}
        function = type(self.name.replace("::", "_"), (torch.autograd.Function,), methods)
        # That of the base class: its own prepares inputs for `torch.func`, which gets the operation itself.
        self.differentiable = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def flat_setup_context(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        self.setup_context(ctx, self.group(inputs), output)

    def flat_backward(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        by_name = self.backward(ctx, *grads)
        return tuple(map(by_name.get, self.arguments))

    def needs_grad(self, ctx: Any, *names: str) -> bool:
        """Whether any of these parameters or fields needs a gradient, in the backward pass."""
        return any(ctx.needs_input_grad[self.arguments.index(name)] for name in names)

    def __call__(self, *inputs: Any) -> Any:
        flat = self.flatten(inputs)
        if needs_dispatcher():
            return self.op(*flat)
        needs_grad = False
        for x in flat:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN_TENSORS:
                    return self.op(*flat)
                needs_grad = needs_grad or x.requires_grad
        return self.differentiable(*flat) if needs_grad and torch.is_grad_enabled() else self.forward(*inputs)


def save_record(ctx: Any, record: Any, *tensors: Tensor) -> None:
    """Keep a record of tensors and scalars, and some tensors, for the backward pass."""
    ctx.save_for_backward(*tensors, *(x if isinstance(x, Tensor) else None for x in record))
    ctx.record = type(record)(*(None if isinstance(x, Tensor) else x for x in record))


def saved_record(ctx: Any) -> tuple[Any, ...]:
    """The record that `save_record` kept, and then the tensors."""
    record, saved = ctx.record, ctx.saved_tensors
    count = len(saved) - len(record)
    return type(record)(*map(_first_given, saved[count:], record)), *saved[:count]


def _first_given(x: Any, y: Any) -> Any:
    return y if x is None else x


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
