"""Triton's interpreter, with less to do for the same results.

At every launch, and at every call of one kernel by another, it looks through all of `triton.language` for what it
replaces; here it is looked for once. It makes its table of dtypes whenever it needs one of them. And it computes every
sum and product of integers again in 64 bits, for an assertion that it then leaves out unless it debugs.
"""

import dataclasses
import functools
import inspect

import numpy as np
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

dtype_from_table = interpreter._get_np_dtype


@functools.cache
def builtin_names(owner):
    return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]


def patch_builtins(owner, *rest):
    for name in builtin_names(owner):
        member = getattr(owner, name)
        if is_builtin(member):
            interpreter._patch_attr(owner, name, member, *rest)


@functools.cache
def scalar_dtype(kind):
    return dtype_from_table(kind)


def numpy_dtype(kind):
    kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else scalar_dtype(kind)


def shorten():
    """Replace these parts of the interpreter, for the rest of the process."""
    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
