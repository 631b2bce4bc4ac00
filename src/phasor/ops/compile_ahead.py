"""Triton kernels compiled side by side: all that a function launches, before it runs for the first time."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

TRITON_VERSIONS = (3, 6), (3, 9)  # that are known to compile in this way


def nothing(*args: Any) -> None:
    """What the launch of a pending kernel does."""


NO_LAUNCH = {"launch_metadata": nothing, "run": nothing, "function": None, "packed_metadata": None}


class PendingKernel:
    """What Triton takes for a kernel while that is compiled: launches of this thread do nothing, others wait for it.

    Later it is the kernel itself.
    """

    def __init__(self, compiled: Future[Any]) -> None:
        self.compiled, self.is_pending, self.thread = compiled, True, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if not self.is_pending or threading.get_ident() != self.thread:
            return getattr(self.compiled.result(), name)
        if name in NO_LAUNCH:
            return NO_LAUNCH[name]
        raise AttributeError(name)


class Compilation:
    """What Triton asks to compile kernels instead of doing it at once."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self.kernels: dict[str, PendingKernel] = {}
        self.finalizers: list[tuple[PendingKernel, Callable[[Any], None]]] = []

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None], *_: Any
    ) -> PendingKernel:
        """Start to compile a kernel; `finalize` takes it once it is compiled."""
        if key not in self.kernels:
            self.kernels[key] = PendingKernel(self.executor.submit(with_launcher, compile_kernel))
        self.finalizers.append((self.kernels[key], finalize))
        return self.kernels[key]

    def launch_again(self) -> None:
        """Let launches wait for their kernels."""
        for kernel in self.kernels.values():
            kernel.is_pending = False

    def finish(self) -> None:
        """Hand all kernels to Triton."""
        for kernel, finalize in self.finalizers:
            finalize(kernel.compiled.result())


def with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """A compiled kernel, after the host's part of its launch, for which Triton 3.6 runs a C compiler."""
    from triton.runtime import driver

    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@functools.cache
def is_available() -> bool:
    """Whether this version of Triton leaves compiling to others, and compiles at all.

    >>> is_available() in (True, False)
    True
    """
    try:
        import triton
        from triton.runtime import _async_compile
    except ImportError:
        return False
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = TRITON_VERSIONS[0] <= version <= TRITON_VERSIONS[1]
    return known and hasattr(_async_compile, "active_mode") and not triton.knobs.runtime.interpret


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Within, kernels that were not compiled yet are compiled side by side and not launched; at its end all are.

    So what kernels compute there is any numbers: it may be read as floats, but not tell where to read or write.
    """
    from triton.runtime._async_compile import active_mode

    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="phasor-compile") as executor:
        compilation = Compilation(executor)
        before = active_mode.set(compilation)
        try:
            yield
        finally:
            active_mode.reset(before)
            compilation.launch_again()
        compilation.finish()
