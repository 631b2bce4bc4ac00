"""What tests of the decode kernels and of the fused decoding step share: fixtures and plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from device import ON_GPU
from triton.runtime import interpreter

from phasor.generation import runners
from phasor.generation.runners.fused import FusedRunner
from phasor.ops import dispatch
from phasor.ops.decode import decode_attention, gemv
from phasor.ops.decode.tiles import Tiles

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of sums over a few hundred features


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 matrices as integers, and truncates where devices round."""
    multiply, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def round_to_bfloat16(data, old, new, mode):
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(data, old, new, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(data.shape)

    def to_float32(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(
            round_to_bfloat16(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )

    def create_dot(self, a, b, *rest):
        return multiply(self, to_float32(a), to_float32(b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", round_to_bfloat16)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on a GPU, without its graphs; the rest of the model in plain torch, which is quicker here."""
    if ON_GPU:
        return
    monkeypatch.setattr(runners, "STEP_RUNNERS", dispatch.Dispatch(dispatch.Path("fused", FusedRunner)))


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program per kernel, or a few: the interpreter takes its time over each."""
    if ON_GPU:
        return
    monkeypatch.setattr(gemv, "choose_tiles", lambda *sizes, **kind: Tiles(64, 64, 1))
    monkeypatch.setattr(decode_attention, "TILES", decode_attention.KVTiles(16, 1, 1))
    monkeypatch.setattr(decode_attention, "TARGET_FEATURES", 4 * 128)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)
