"""Kernels compiled side by side, for a GPU that need not be there, with a driver that notes launches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import threading
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from phasor.ops.compile_ahead import compile_ahead, is_available
from phasor.ops.launch import KernelLauncher

launched, launchers = [], []


class Launcher:
    def __init__(self, src, metadata):
        self.name = metadata.name
        launchers.append((self.name, threading.current_thread().name))

    def __call__(self, *args):
        launched.append(self.name)


driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            load_binary=lambda *args: (1, 2, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        ),
    )
)


@triton.jit
def add(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * 2, mask=offs < n)


@triton.jit
def wrong(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0)


assert is_available()
x, by_launcher = torch.zeros(64), KernelLauncher(double)


def step():
    add[(1,)](x, 50, BLOCK=64)
    add[(1,)](x, 50, BLOCK=128)
    by_launcher(x, {"x_ptr": x}, (1,), n=50, BLOCK=64)
    add[(1,)](x, 50, BLOCK=64)


double[(1,)](x, 50, BLOCK=32)
assert launched == ["double"] and len(launchers) == 1
launched.clear()
with compile_ahead():
    step()
    double[(1,)](x, 50, BLOCK=32)  # which was compiled before
assert launched == ["double"], launched
assert len(launchers) == 4 and all(thread.startswith("phasor-compile") for _, thread in launchers[1:]), launchers
assert not by_launcher.compiled
launched.clear()
for function in (add, double):
    for caches in function.device_caches.values():
        assert all(type(kernel).__name__ == "CompiledKernel" for kernel in caches[0].values())
step()
step()
assert launched == ["add", "add", "double", "add"] * 2, launched
for attempt in range(2):
    launched.clear()
    try:
        if attempt == 0:
            with compile_ahead():
                wrong[(1,)](x, BLOCK=64)
        else:
            wrong[(1,)](x, BLOCK=64)
    except Exception as error:
        assert "CompilationError" in type(error).__name__ or "Assert" in type(error).__name__, repr(error)
    else:
        raise AssertionError("a kernel that does not compile was launched")
with compile_ahead():
    add[(1,)](x, 50, BLOCK=512)
    other = threading.Thread(target=lambda: add[(1,)](x, 50, BLOCK=512))
    other.start()
    other.join()
    assert launched == ["add"], "another thread launches as ever"
    launched.clear()
try:
    with compile_ahead():
        add[(1,)](x, 50, BLOCK=256)
        raise KeyError("a step that fails")
except KeyError:
    pass
assert not launched
add[(1,)](x, 50, BLOCK=256)
assert launched == ["add"]
print("done")
"""


@pytest.mark.cpu_only("Triton compiles for the GPU that is there")
def test_kernels_are_compiled_and_not_launched(tmp_path):
    """In threads, once each; after that they are launched, by Triton and by launchers of phasor; errors are raised."""
    script = tmp_path / "compile_ahead_script.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "done"
