"""Triton's interpreter, with less to do for the same results.

At every launch, and at every call of one kernel by another, it looks through all of `triton.language` for what it
replaces; here it is looked for once, and replaced once per launch. It makes its table of dtypes whenever it needs one
of them, and the shape of every tensor three times, of which there are few. It compares types that are the same. And it
computes every sum and product of integers again in 64 bits, for an assertion that it then leaves out unless it debugs.
"""

import dataclasses
import functools
import inspect

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.core import is_builtin
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

dtype_from_table = interpreter._get_np_dtype
broadcast, to_one_type = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
patch_language = interpreter._patch_lang


@functools.cache
def builtin_names(owner):
    return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]


def patch_builtins(owner, *rest):
    for name in builtin_names(owner):
        member = getattr(owner, name)
        if is_builtin(member):
            interpreter._patch_attr(owner, name, member, *rest)


in_use = set()  # the globals of the functions for which this launch has replaced the language


class LaunchScope(interpreter._LangPatchScope):
    def restore(self):
        in_use.clear()
        super().restore()


def patch_once(function):
    if id(function.__globals__) not in in_use:
        in_use.add(id(function.__globals__))
        return patch_language(function)
    return None  # a call of one kernel by another, which restores nothing


@functools.cache
def scalar_dtype(kind):
    return dtype_from_table(kind)


def numpy_dtype(kind):
    kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else scalar_dtype(kind)


@functools.cache
def shapes(sizes):
    """The shape of a type, that of its tensors, and their number of elements."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return tl.tuple(sizes), tl.tuple([tl.constexpr(size) for size in sizes]), validate_block_shape(sizes)


def build_block_type(self, element_ty, shape):
    self.element_ty = element_ty
    shape = shape.value if isinstance(shape, tl.constexpr) else shape
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    self.shape, self.shape_of_tensors, self.numel = shapes(sizes)


def build_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = SCALAR
    if isinstance(type, tl.block_type):
        self.shape, self.numel = type.shape_of_tensors, tl.constexpr(type.numel)


def broadcast_unless_alike(self, lhs, rhs):
    return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


def have_one_type(lhs, rhs):
    both = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
    return both and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and not lhs.dtype.is_ptr()


def to_one_type_unless_alike(self, lhs, rhs, *given, **named):
    divides = len(given) > 2 or "div_or_mod" in named  # by which types change
    return (lhs, rhs) if have_one_type(lhs, rhs) and not divides else to_one_type(self, lhs, rhs, *given, **named)


SCALAR = tl.tuple([]), tl.constexpr(1)


def shorten():
    """Replace these parts of the interpreter, for the rest of the process."""
    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = numpy_dtype
    tl.block_type.__init__, tl.tensor.__init__ = build_block_type, build_tensor
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike
    TritonSemantic.binary_op_type_checking_impl = to_one_type_unless_alike
    interpreter._patch_lang, interpreter._LangPatchScope = patch_once, LaunchScope
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
