"""Functions of tensors, recorded once and replayed: their operations as straight code, without the choices before them.

Eager code chooses in every call which kernels run and with which arguments, and autograd makes a node for every
operation. For small models that takes the host longer than the device takes to compute. Where all choices depend on
shapes, strides and dtypes only, a `Recorder` keeps the operations of torch and the launches of one call, and of its
gradient, and `Recording` writes them as two Python functions. Tensors other than phasor's constants are never kept:
memory is allocated as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableAutocast
from torch.utils._python_dispatch import TorchDispatchMode

from phasor.ops import launch
from phasor.ops.constants import cached_constants
from phasor.ops.custom_op import CustomOp

aten, Tag = torch.ops.aten, torch.Tag
# Methods of tensors that take the arguments of an operation after its first, and functions that take all of them: each
# in less time than the operation itself.
METHODS = {
    aten.view.default: "view",
    aten._unsafe_view.default: "view",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.select.int: "select",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.expand.default: "expand",
    aten.unbind.int: "unbind",
    aten.split_with_sizes.default: "split_with_sizes",
    aten.new_empty.default: "new_empty",
}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.linear.default: torch.nn.functional.linear,
    aten.empty_like.default: torch.empty_like,
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.cat.default: torch.cat,
    aten.sum.dim_IntList: torch.sum,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.relu.default: torch.relu,
}
RESHAPES = (aten.view.default, aten._unsafe_view.default)
WRITTEN_OUT = (bool, int, str, type(None))  # constants that are written into the code; others have names


class UnrecordableError(Exception):
    """Why a function is not replayed."""


@dataclass
class Statement:
    """One statement, the variables that it sets and reads, and whether it does nothing else than set them."""

    text: str
    sets: list[str]
    reads: set[str]
    is_pure: bool = False


@dataclass
class Code:
    """Statements in order."""

    lines: list[Statement] = field(default_factory=list)

    def written(self, name: str, inputs: str, results: Sequence[str], kept: set[str]) -> str:
        """A function of these statements; variables other than the kept ones are deleted after their last use."""
        live, lines = set(results) | kept, [f"    return {tuple_of(results)}"]
        for line in reversed(self.lines):
            if line.is_pure and not live.intersection(line.sets):
                continue
            last = sorted((line.reads | set(line.sets)) - live)
            if last:
                lines.append(f"    del {', '.join(last)}")
            lines.append(f"    {line.text}")
            live |= line.reads
        return "\n".join([f"def {name}({inputs}):", "    stream = current_stream()", *reversed(lines)]) + "\n"


class Recorder(TorchDispatchMode):
    """Keeps the operations of torch, below autograd, and the launches of kernels while it is entered.

    A tensor is known by its memory and its layout: autograd hands out other objects for what it saved.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.code, self.device, self.thread = Code(), device, threading.get_ident()
        self.names: dict[tuple[Any, ...], str] = {}
        self.owners: dict[int, str] = {}  # the first variable with some memory
        self.given: set[str] = set()  # the inputs
        self.tensors: list[Tensor] = []  # kept alive, or their memory would be given to others
        self.constants: dict[str, Any] = {"current_stream": current_stream_function(device)}
        self.constant_names: dict[int, str] = {}
        self.reshaped: dict[tuple[Any, ...], Tensor] = {}  # what a view is a view of, if only its shape is another
        self.reads: set[str] = set()  # of the statement that is being written

    def add_input(self, x: Tensor, name: str) -> None:
        """Name a tensor that is given."""
        if layout(x) in self.names:
            raise UnrecordableError("two of its inputs are one tensor")
        self.define(x, name)
        self.given.add(name)

    def check_writes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise an error before an operation changes an input: recording a call must not count as another one."""
        arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        for argument in func._schema.arguments:
            x = kwargs.get(argument.name, arguments.get(argument.name))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(x, Tensor) and self.owners.get(x.untyped_storage()._cdata) in self.given:
                raise UnrecordableError(f"{func} writes to one of its inputs")

    def define(self, x: Tensor, name: str) -> None:
        self.names[layout(x)] = name
        self.owners.setdefault(x.untyped_storage()._cdata, name)
        self.tensors.append(x)

    def new_name(self, x: Any) -> str:
        """A variable for what an operation returned."""
        if not isinstance(x, Tensor):
            return "_"
        name = f"t{len(self.tensors)}"
        self.define(x, name)
        return name

    def name_of(self, x: Tensor) -> str:
        name = self.names.get(layout(x))
        if name is None:
            owner = self.owners.get(x.untyped_storage()._cdata)
            if owner is None and any(x is known for known in cached_constants()):
                return self.constant(x)
            if owner is None:
                raise UnrecordableError(f"it reads a tensor of shape {tuple(x.shape)} that is none of its inputs")
            name = f"t{len(self.tensors)}"
            text = f"{name} = as_strided({owner}, {tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"
            self.constants["as_strided"] = torch.as_strided
            self.code.lines.append(Statement(text, [name], {owner}, is_pure=True))
            self.define(x, name)
        self.reads.add(name)
        return name

    def constant(self, value: Any) -> str:
        """What stands for a value in the code."""
        if type(value) in WRITTEN_OUT:
            return repr(value)
        name = self.constant_names.setdefault(id(value), f"c{len(self.constants)}")
        self.constants[name] = value
        return name

    def expression(self, value: Any, address: bool = False) -> str:
        """An argument, in which tensors are variables, or their addresses."""
        if isinstance(value, Tensor):
            return self.name_of(value) + (".data_ptr()" if address else "")
        if type(value) is tuple:
            return tuple_of([self.expression(x, address) for x in value])
        if isinstance(value, list | torch.Size):
            return f"[{', '.join(self.expression(x, address) for x in value)}]"
        return self.constant(value)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any], address: bool = False) -> str:
        positional = [self.expression(x, address) for x in args]
        return ", ".join([*positional, *(f"{name}={self.expression(x, address)}" for name, x in kwargs.items())])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        custom = CustomOp.by_overload.get(func)
        if custom is not None:
            with self:
                return custom.forward(*args, **(kwargs or {}))
        check_static(func, args)
        self.check_writes(func, args, kwargs or {})
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory" or value}
        source = self.reshaped.get(layout(args[0])) if func in RESHAPES else None
        arguments = self.arguments(args if source is None else (source, *args[1:]), kwargs)
        reads, self.reads = self.reads, set()
        output = func(*args, **kwargs)
        if func is aten._to_copy.default and output.device != self.device:
            raise UnrecordableError(f"it copies a tensor to {output.device}, where the host may read it")
        outputs = list(output) if isinstance(output, tuple | list) else [output]
        known = [isinstance(x, Tensor) and layout(x) in self.names for x in outputs]
        aliases = [r.alias_info for r in func._schema.returns]
        is_view = any(a is not None and not a.is_write for a in aliases)
        if is_view and all(known):
            return output
        if func in RESHAPES and args[0].is_contiguous():
            self.reshaped[layout(output)] = args[0] if source is None else source
        writes = any(a is not None and a.is_write for a in aliases)
        sets = [] if writes else [self.new_name(x) for x in outputs]
        call = f"{self.constant(FUNCTIONS.get(func, func._op))}({arguments})"
        if func in METHODS:
            first, _, rest = arguments.partition(", ")
            call = f"{first}.{METHODS[func]}({rest})"
        target = f"{tuple_of(sets) if isinstance(output, tuple | list) else sets[0]} = " if sets else ""
        is_pure = not writes and Tag.nondeterministic_seeded not in func.tags
        self.code.lines.append(Statement(target + call, [name for name in sets if name != "_"], reads, is_pure))
        return output

    def add_call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Keep a call of Python that returns nothing, such as a launch by Triton itself."""
        self._add(f"{self.constant(function)}({self.arguments(args, kwargs)})")

    def add_launch(self, compiled: launch.DirectLaunch, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """Keep the launch of a compiled kernel."""
        kernel = ", ".join(map(self.constant, (compiled.function, compiled.metadata, None, None, None)))
        run, places = self.constant(compiled.run), ", ".join(map(str, grid))
        self._add(f"{run}({places}, stream, {kernel}, {self.arguments(args, {}, address=True)})")

    def _add(self, text: str) -> None:
        self.code.lines.append(Statement(text, [], self.reads))
        self.reads = set()


@dataclass(frozen=True)
class Recording:
    """A function and its gradient as code: `forward(*inputs)` returns the result, and what `backward` takes."""

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    source: str
    grad_stride: tuple[int, ...]
    is_random: bool = False


def record(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Recording:
    """Record a function of no arguments, which reads the inputs and no other tensor, and its gradient.

    >>> x, w = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
    >>> recording = record(lambda: torch.nn.functional.linear(x, w), [x, w])
    >>> y, saved = recording.forward(2 * x, w)
    >>> torch.equal(y, 2 * x @ w.T), [g is None for g in recording.backward(torch.ones(2, 4), *saved)]
    (True, [True, False])
    """
    if not any(x.requires_grad for x in inputs):
        raise UnrecordableError("none of its inputs needs a gradient")
    if any(x.requires_grad and not x.is_leaf for x in inputs):
        raise UnrecordableError("one of its inputs is computed from others, which would get its gradient too")
    recorder = Recorder(inputs[0].device)
    given = [f"a{i}" for i in range(len(inputs))]
    for x, name in zip(inputs, given, strict=True):
        recorder.add_input(x, name)
    with launch.recording_by(recorder), torch.autograd.set_multithreading_enabled(False):
        with recorder, torch.enable_grad():
            y = function()
        if not y.requires_grad:
            raise UnrecordableError("its result has no gradient")
        forward, result = recorder.code, recorder.name_of(y)
        recorder.code, recorder.reads, grad = Code(), set(), torch.ones_like(y)
        recorder.add_input(grad, "grad")
        wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
        with recorder, _DisableAutocast():  # gradients are computed outside of it
            grads = torch.autograd.grad(y, [inputs[i] for i in wanted], grad, allow_unused=True)
        found = dict(zip(wanted, ("None" if g is None else recorder.name_of(g) for g in grads), strict=True))
    backward, results = recorder.code, [found.get(i, "None") for i in range(len(inputs))]
    before = {*given, *(name for line in forward.lines for name in line.sets)}
    saved = sorted(before & ({name for line in backward.lines for name in line.reads} | set(results)))
    source = forward.written("forward", ", ".join(given), [result, tuple_of(saved)], {*given, *saved})
    source += "\n" + backward.written("backward", ", ".join(["grad", *saved]), results, {"grad", *saved, "None"})
    functions = dict(recorder.constants)
    exec(compile(source, "<recording>", "exec"), functions)
    return Recording(functions["forward"], functions["backward"], source, grad.stride())


def check_static(func: Any, args: Sequence[Any]) -> None:
    """Raise an error for an operation whose result the host reads, or whose size depends on values."""
    if Tag.data_dependent_output in func.tags:
        raise UnrecordableError(f"{func} reads a value on the host")
    if Tag.dynamic_output_shape in func.tags:
        indices = args[1] if func is aten.index.Tensor else ()
        if not indices or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices):
            raise UnrecordableError(f"{func} returns as many elements as values ask for")


def layout(x: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from all others that are alive."""
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype


def tuple_of(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def current_stream_function(device: torch.device) -> Callable[[], int]:
    """What gives the stream that kernels on a device are launched on."""
    if device.type != "cuda":
        return lambda: 0
    index, current = device.index, torch._C._cuda_getCurrentRawStream
    return lambda: current(index)
