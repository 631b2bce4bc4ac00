"""The kernels of a decoding step of heads with a state, against float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from decode_kernels import ROUNDING, bfloat16_in_the_interpreter, randn, rms_norm  # noqa: F401
from schemes import relative_change

from phasor.ops.decode import (
    ConvolutionArgs,
    HeadNormArgs,
    NormArgs,
    RecurrentArgs,
    RotaryArgs,
    Tiles,
    convolve_ref,
    project_convolve_ref,
    recurrent_step_ref,
)

convolve = pytest.importorskip("phasor.ops.decode.convolve")
recurrent_step = pytest.importorskip("phasor.ops.decode.recurrent_step")

GROUPS, GROUP, CONVOLVED = 3, 13, 8


def double(args):
    """Arguments in float64."""
    wide = (x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)
    return type(args)(*(double(x) if isinstance(x, HeadNormArgs) else x for x in wide))


def convolution(rows: int, taps: int, bias: bool, paged: bool, dtype: torch.dtype) -> ConvolutionArgs:
    channels, slots = GROUPS * CONVOLVED, rows + 3 if paged else rows
    weight, state = randn(channels, taps, dtype=dtype), randn(slots, taps - 1, channels, dtype=dtype)
    order = torch.randperm(slots)[:rows] if paged else None
    return ConvolutionArgs(weight, randn(channels, dtype=dtype) if bias else None, state, order, GROUP, CONVOLVED)


def convolved(x: torch.Tensor, conv: ConvolutionArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and the next states, column by column."""
    y, state = x.clone(), conv.state.clone()
    for row in range(len(x)):
        slot = row if conv.slots is None else int(conv.slots[row])
        for group in range(GROUPS):
            for own in range(CONVOLVED):
                column, channel = group * GROUP + own, group * CONVOLVED + own
                window = torch.cat((conv.state[slot, :, channel], x[row, column, None]))
                total = window @ conv.weight[channel] + (0.0 if conv.bias is None else conv.bias[channel])
                y[row, column] = total * total.sigmoid()
                state[slot, :, channel] = window[1:]
    return y, state


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "taps", "bias", "paged"),
    [(1, 4, False, False), (3, 4, True, True), (3, 2, False, True), (17, 1, True, False)],
)
def test_convolutions(rows, taps, bias, paged, dtype):
    inputs, outputs = 40, GROUPS * GROUP
    x, weight, norm_weight = (
        randn(rows, inputs, dtype=dtype),
        randn(outputs, inputs, dtype=dtype),
        randn(inputs, dtype=dtype),
    )
    own_bias, conv = randn(outputs, dtype=dtype), convolution(rows, taps, bias, paged, dtype)
    wide, norm = double(conv), NormArgs(norm_weight, 1.0, 1e-3)
    projected = rms_norm(x.double(), norm_weight.double(), 1.0, 1e-3) @ weight.double().mT + own_bias.double()
    expected, state = convolved(projected, wide)

    reference = wide._replace(state=wide.state.clone())
    given = {"norm": NormArgs(norm_weight.double(), 1.0, 1e-3), "bias": own_bias.double()}
    assert relative_change(project_convolve_ref(x.double(), weight.double(), reference, **given), expected) < 1e-13
    alone = convolve_ref(projected, wide._replace(state=wide.state.clone()))
    assert relative_change(alone, expected) < 1e-13
    tiles, before = Tiles(8, 16, 1, 2), conv.state.clone()
    other, other_out = randn(5, inputs, dtype=dtype), torch.empty(rows, 5, dtype=dtype)
    given = {"norm": norm, "bias": own_bias, "tiles": tiles, "other": (other, other_out) if rows > 1 else None}
    found = convolve.project_convolve(x, weight, torch.empty(rows, outputs, dtype=dtype), conv, **given)
    if rows > 1:
        exact = rms_norm(x.double(), norm_weight.double(), 1.0, 1e-3) @ other.double().mT
        assert relative_change(other_out.double(), exact) < ROUNDING[dtype]
    assert relative_change(found.double(), expected) < ROUNDING[dtype]
    if taps > 1:
        assert relative_change(conv.state.double(), state) < ROUNDING[dtype]
        assert relative_change(reference.state, state) < 1e-13
    conv.state.copy_(before)
    projected = projected.to(dtype)
    expected, state = convolved(projected.double(), wide)
    found = convolve.convolve(projected, conv)
    assert relative_change(found.double(), expected) < ROUNDING[dtype]
    assert torch.equal(conv.state.double(), state)


KINDS = ["gated-delta", "mamba2", "retention", "retention, rotated", "retention, adjacent"]
SIZES = {"groups": (6, 2, 5, 7), "one": (1, 1, 8, 16), "wide": (2, 2, 20, 33)}  # heads, key heads, key, value


def recurrent_args(kind: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> RecurrentArgs:
    heads, key_heads, key_dim, value_dim = sizes
    if kind == "gated-delta":
        times = {"log_rate": randn(heads, dtype=dtype), "time_bias": randn(heads, dtype=dtype) - 4.0}
        norm = HeadNormArgs(randn(value_dim, dtype=dtype), None, 1.0, 1e-3, False)
        return RecurrentArgs(key_heads, True, True, 1e-6, **times, norm=norm)
    if kind == "mamba2":
        times = {"log_rate": randn(heads, dtype=dtype), "time_bias": randn(heads, dtype=dtype)}
        return RecurrentArgs(key_heads, False, False, **times, skip=randn(heads, dtype=dtype))
    norm = HeadNormArgs(randn(heads, value_dim, dtype=dtype), randn(heads, value_dim, dtype=dtype), 0.0, 1e-3, True)
    rope = None
    if "," in kind:
        increments = torch.randint(-(2**63), 2**63 - 1, (key_dim // 4,))
        rope = RotaryArgs(increments, 1.2, 2 * (key_dim // 4), "adjacent" in kind)
    log_decay = torch.log1p(-torch.exp2(-1.0 - torch.arange(heads)))
    return RecurrentArgs(key_heads, False, True, log_decay=log_decay, norm=norm, rope=rope)


@pytest.mark.sample(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "paged"), [(1, False), (3, True)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, sizes, rows, paged, dtype, monkeypatch):
    """Against the reference in float64; that it is what modules compute is tested with the fused step."""
    heads, key_heads, key_dim, value_dim = SIZES[sizes]
    args = recurrent_args(kind, SIZES[sizes], dtype)
    width = 2 * key_heads * key_dim + 2 * heads * value_dim + (heads if kind == "mamba2" else 0)
    slots = torch.randperm(rows + 2)[:rows] if paged else None
    x, state = randn(rows, width, dtype=dtype), torch.randn(rows + 2 if paged else rows, heads, key_dim, value_dim)
    gates = randn(rows, 2 * heads, dtype=dtype) if args.is_delta else None
    given = {"slots": slots, "positions": torch.arange(rows) + 2**33}
    wide = state.double()
    expected = recurrent_step_ref(x.double(), None if gates is None else gates.double(), wide, double(args), **given)
    monkeypatch.setattr(recurrent_step, "FEW_PROGRAMS", 3 if rows == 1 else 0)
    out = torch.empty(rows, heads * value_dim, dtype=dtype)
    recurrent_step.recurrent_step(x, gates, state, out, args, **given)
    assert relative_change(out.double(), expected) < ROUNDING[dtype]
    assert relative_change(state.double(), wide) < ROUNDING[torch.float32]
    if paged:
        others = [i for i in range(rows + 2) if i not in slots.tolist()]
        assert torch.equal(state[others].double(), wide[others])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phasor.ops.decode.convolve import convolve_kernel, project_convolve_kernel
from phasor.ops.decode.recurrent_step import recurrent_step_kernel

HALF, SINGLE, WIDE = "*bf16", "*fp32", "*i64"
SCALARS = {"norm_offset": "fp32", "eps": "fp32", "rotary_factor": "fp32", "key_scale": "fp32", "key_eps": "fp32"}
SIZES = {"BLOCK_T": 4, "TAPS": 4, "GROUP": 768, "CONVOLVED": 512, "BLOCK_M": 1, "K": 2048, "BLOCK_N": 4,
         "BLOCK_K": 1024, "NUM_STAGES": 4, "INTEGER_ASM": False, "SCALE_GROUP": 0, "USE_PDL": True, "GROUP_SIZE": 2,
         "GATES": 4, "TIME": 2, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_V": 128, "ROTARY_DIM": 0, "ADJACENT": False,
         "IS_DELTA": True, "CENTERED": False, "PREFETCH": False}
DTYPES = {"slots_ptr": WIDE, "positions_ptr": WIDE, "increments_ptr": WIDE, "scale_ptr": None, "bias_ptr": None}


def compile(kernel, num_warps, **changes):
    given = {}
    for name in kernel.arg_names:
        pointer = DTYPES.get(name, HALF) if name.endswith("ptr") else "i32"
        given[name] = {**SIZES, **SCALARS, **changes}.get(name, pointer)
    signature = {name: x if isinstance(x, str) else "constexpr" for name, x in given.items()}
    constants = {name: x for name, x in given.items() if not isinstance(x, str)}
    options = {"num_warps": num_warps, "launch_pdl": True}
    compiled = triton.compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", 90, 32), options)
    print(kernel.__name__, compiled.asm["ptx"].count("griddepcontrol.wait"))


step = {"state_ptr": SINGLE, "BLOCK_K": 128}
compile(recurrent_step_kernel, 4, **step, log_decay_ptr=None, skip_ptr=None, norm_bias_ptr=None)
compile(recurrent_step_kernel, 4, **step, log_decay_ptr=None, skip_ptr=None, norm_bias_ptr=None, PREFETCH=True)
mamba2 = {"norm_ptr": None, "norm_bias_ptr": None, "VALUE_DIM": 64, "BLOCK_V": 64, "IS_DELTA": False}
compile(recurrent_step_kernel, 2, **step | mamba2, log_decay_ptr=None)
retention = {"log_decay_ptr": SINGLE, "log_rate_ptr": None, "time_bias_ptr": None, "skip_ptr": None}
compile(recurrent_step_kernel, 4, **step, **retention, IS_DELTA=False, CENTERED=True, ROTARY_DIM=128)
compile(project_convolve_kernel, 4, other_weight_ptr=None)
compile(project_convolve_kernel, 4)
compile(project_convolve_kernel, 4, BLOCK_M=16, BLOCK_N=16, BLOCK_K=256)
compile(convolve_kernel, 4, BLOCK_N=512)
"""


def test_the_kernels_compile_for_hopper(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = ["recurrent_step_kernel"] * 4 + ["project_convolve_kernel"] * 3 + ["convolve_kernel"]
    assert done.stdout.splitlines() == [f"{name} 1" for name in kernels]
