"""Kernels in C++ of this folder, compiled on first use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

BUILT: dict[str, bool] = {}


def load_kernel(name: str) -> bool:
    """Compile and load a kernel; False where no C++ compiler is found, or where it fails.

    A function that is being compiled itself has those kernels that were loaded before.
    """
    if name not in BUILT and not torch.compiler.is_compiling():
        BUILT[name] = build(name)
    return BUILT.get(name, False)


def build(name: str) -> bool:
    """Compile a kernel, or find it on disk, and load it."""
    from torch._inductor.codecache import CppCodeCache  # importing the compiler takes a while

    try:
        CppCodeCache.load(Path(__file__).with_name(f"{name}.cpp").read_text())
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return False
    return True
