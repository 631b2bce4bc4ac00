"""Soft-caps compiled for Hopper: one instruction for queries of half precision, exact for those of float32."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton.compiler")

KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phasor.ops.attention.flash_tiles import score_tile

@triton.jit
def kernel(x_ptr, y_ptr, scale, softcap):
    offs = tl.arange(0, 128)
    x = tl.load(x_ptr + offs)
    scores, _ = score_tile(x.to(tl.float32), scale, softcap, True, x.dtype)
    tl.store(y_ptr + offs, scores)

for dtype in ("bf16", "fp16", "fp32"):
    signature = {"x_ptr": "*" + dtype, "y_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    ptx = triton.compile(ASTSource(kernel, signature), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(dtype, ptx.count("tanh.approx.f32"), ptx.count("ex2.approx"))
"""


def test_the_tangent_of_half_precision_is_one_instruction(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    script = tmp_path / "compile_softcap.py"
    script.write_text(KERNEL, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = {name: (int(tanh), int(exp)) for name, tanh, exp in map(str.split, done.stdout.splitlines())}
    assert counts["bf16"] == counts["fp16"] == (1, 0)
    assert counts["fp32"][0] == 0
    assert counts["fp32"][1] > 0
