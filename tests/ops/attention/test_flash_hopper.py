"""The attention kernels for Hopper GPUs: against float64 where there is one, and compiled for it anywhere.

Triton's interpreter does not run Gluon, the language they are written in.
"""

import builtins
import json
import math
import os
import subprocess
import sys
from types import FunctionType, SimpleNamespace

import pytest
import torch
from device import DEVICE, ON_GPU
from references import normal

from phasor.ops.attention import (
    DistanceBias,
    FIREBias,
    Mask,
    ScoreMod,
    SumBias,
    attention_ref,
    flash,
    flash_hopper,
    intervals,
)
from phasor.ops.dispatch import force_path

pytest.importorskip("triton")
HALF = 1e-2  # relative to the norm: inputs, weights and results are rounded to 8 bits
TOKENS, HEADS, KV_HEADS = 459, 4, 2
MASKS = {
    "causal": {"causal": True},
    "everything": {},
    "window": {"causal": True, "window": 150},
    "window-both-ways": {"window": 97},
    "chunk": {"causal": True, "offset": 61},
    "documents": {"causal": True, "documents": [100, 27, 200, 132]},
    "prefix": {"causal": True, "prefix_length": torch.tensor([300, 5])},
    "padding": {"causal": True, "padding": [70, 0]},
    "cross": {"aligned": False, "keys": 311},
}
CURVES = {"slopes": (), "log": ("rates",), "power": ("powers",)}


def mask_of(name, tokens=TOKENS):
    """A mask, how many keys there are, and which queries of each row are real."""
    fields = dict(MASKS[name])
    documents, padding = fields.pop("documents", None), fields.pop("padding", None)
    keys = fields.pop("keys", tokens + fields.get("offset", 0))
    real = torch.ones(2, tokens, dtype=torch.bool)
    if documents is not None:
        ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
        starts = torch.tensor([0, *documents[:-1]]).cumsum(0)
        fields |= {"query_document_ids": ids, "key_document_ids": ids}
        fields["order"] = torch.arange(TOKENS)[None] - starts[ids]
    if padding is not None:
        real = torch.arange(TOKENS)[None] >= torch.tensor(padding)[:, None]
        fields |= {"key_mask": real, "order": (real.cumsum(1) - 1).clamp(min=0)}
    return Mask(**fields), keys, real


def biases(name, mask, keys, dtype, tokens=TOKENS):
    """A bias, what it learns, and the positions that it takes."""
    k_pos = torch.arange(keys)[None] if mask.order is None else mask.order
    q_pos = k_pos[:, mask.offset : mask.offset + tokens] if mask.order is None else mask.order
    if name is None:
        return None, [], None, None
    if name == "sums":
        steps = torch.randint(-(2**28), 0, (2, keys, HEADS), generator=torch.Generator().manual_seed(7))
        sums = steps.cumsum(1)
        own = sums[:, mask.offset : mask.offset + TOKENS]
        zeros = [torch.zeros(x.shape, dtype=dtype).requires_grad_() for x in (own, sums)]
        return SumBias(own, sums, 2.0**-32, *zeros), zeros, None, None
    if name == "table":
        table = normal(61, HEADS, seed=6).to(DEVICE, dtype).requires_grad_()
        return DistanceBias(table=table, min_distance=-20), [table], q_pos, k_pos
    if name == "fire":  # with knots at shares of 0.2 to 0.9
        up, knots = torch.tensor([1.0, -0.7, 1.3, 0.4, -1.0]), torch.tensor([0.2, 0.5, 0.7, 0.9, -3.0])
        numbers = torch.tensor([0.1]), torch.tensor([70.0])
        learned = [up, -up * knots, normal(5, HEADS, seed=8), normal(HEADS, seed=5), *numbers]
        learned = [x.to(DEVICE, dtype).requires_grad_() for x in learned]
        return FIREBias(*learned), learned, q_pos, k_pos
    learned = [torch.linspace(0.1, 0.5, HEADS), *(torch.linspace(0.3, 0.9, HEADS) for _ in CURVES[name])]
    learned = [x.to(dtype).requires_grad_() for x in learned]
    return DistanceBias(**dict(zip(("slopes", *CURVES[name]), learned, strict=True))), learned, q_pos, k_pos


def run(
    mask_name, bias_name, dtype, width=128, half=torch.bfloat16, softcap=None, sinks=False, learned=True, tokens=TOKENS
):
    """Outputs and gradients, by the kernels in half precision and by all scores at once in float64."""
    mask, keys, real = mask_of(mask_name, tokens)
    rounded = [normal(2, n, h, width, seed=s).to(half) for s, n, h in ((1, tokens, HEADS), (2, keys, KV_HEADS))]
    rounded.append(normal(2, keys, KV_HEADS, width, seed=3).to(half))
    own = [x.to(DEVICE, dtype).requires_grad_() for x in rounded]
    bias, of_bias, q_pos, k_pos = biases(
        bias_name, mask, keys, torch.float64 if dtype == torch.float64 else torch.float32, tokens
    )
    sink_logits = normal(HEADS, seed=4).to(DEVICE, dtype).requires_grad_() if sinks else None
    score_mod = ScoreMod(
        scale=0.1, softcap=softcap, sink_logits=sink_logits, bias=bias, query_positions=q_pos, key_positions=k_pos,
        counted=True,
    )  # fmt: skip
    if dtype == torch.float64:
        y = attention_ref(*own, mask, score_mod)[0]
    else:
        with force_path("triton"):
            y = flash.flash_attention(*own, mask, score_mod)
    y = y[real] if mask.key_mask is not None else y
    direction = normal(*y.shape, seed=9).to(half).to(DEVICE, dtype)
    wanted = [*own, *(of_bias if learned else []), *([sink_logits] if sinks else [])]
    grads = list(torch.autograd.grad(y, wanted, direction))
    if bias_name == "sums":  # a query and its own key have one sum, to which only both together matter
        of_queries, of_keys = grads[3:5]
        of_keys[:, mask.offset : mask.offset + TOKENS] += of_queries
        grads[3:5] = [of_keys]
    return [y, *grads]


CASES = [
    ("causal", None, {}),
    ("everything", None, {}),
    ("window", None, {"sinks": True}),
    ("chunk", None, {"softcap": 3.0}),
    ("prefix", None, {"softcap": 3.0, "sinks": True}),
    ("padding", None, {}),
    ("cross", None, {}),
    ("causal", "slopes", {"learned": False}),
    ("documents", "slopes", {"learned": False, "sinks": True}),
    ("window", "slopes", {}),
    ("window-both-ways", "slopes", {"learned": False}),
    ("everything", "slopes", {}),
    ("causal", "log", {}),
    ("everything", "slopes", {"softcap": 3.0, "learned": False}),
    ("everything", "log", {}),
    ("documents", "power", {}),
    ("causal", "table", {}),
    ("chunk", "table", {}),
    ("everything", "table", {"sinks": True}),
    ("window", "table", {"softcap": 3.0}),
    ("causal", "sums", {}),
    ("chunk", "sums", {"sinks": True}),
    ("padding", "sums", {}),
    ("documents", "sums", {"softcap": 3.0}),
    ("causal", None, {"width": 64}),
    ("window", "log", {"width": 64}),
    ("causal", "slopes", {"half": torch.float16}),
    ("everything", "log", {"half": torch.float16}),
    ("causal", "log", {"tokens": 1811}),  # with tiles that are far
    ("window-both-ways", "log", {"tokens": 1300}),
    ("everything", "power", {"tokens": 1811}),
    ("causal", "power", {"tokens": 1500, "half": torch.float16}),
    ("causal", "fire", {}),
    ("everything", "fire", {"tokens": 1811}),
    ("causal", "fire", {"tokens": 2300, "half": torch.float16}),
    ("documents", "fire", {"sinks": True}),
    ("window", "fire", {"learned": False}),
]


@pytest.mark.skipif(not flash_hopper.is_available(DEVICE), reason="the kernels are for Hopper GPUs")
@pytest.mark.parametrize(("mask", "bias", "options"), CASES)
def test_kernels_equal_float64(mask, bias, options, monkeypatch):
    took = []
    kernels = flash_hopper.forward
    monkeypatch.setattr(flash_hopper, "forward", lambda *args: took.append(1) or kernels(*args))
    found = [run(mask, bias, dtype, **options) for dtype in (options.get("half", torch.bfloat16), torch.float64)]
    assert took
    if bias == "fire" and options.get(
        "learned", True
    ):  # gradients of its weights together: that of a constant on all scores is nothing
        found = [
            [*values[:4], torch.cat([x.flatten().double() for x in values[4:10]]), *values[10:]] for values in found
        ]
    names = ["output", "dq", "dk", "dv", "learned", "learned", "learned"]
    for name, ours, exact in zip(names, *found, strict=False):
        error = (ours.double() - exact).norm() / exact.norm().clamp(min=1e-3)
        assert error < (HALF if name == "output" else 2 * HALF), (name, error)


def test_what_the_kernels_take():
    """What they do not take is left to the kernels for all GPUs."""
    assert ON_GPU or not flash_hopper.is_available(DEVICE)
    x = torch.zeros(1, 300, 2, 128, dtype=torch.bfloat16)
    assert flash_hopper.suits_tma(x)
    assert not flash_hopper.suits_tma(torch.zeros(1, 300, 2, 129, dtype=torch.bfloat16)[..., :128])
    assert not flash_hopper.suits_tma(
        torch.zeros(301 * 256, dtype=torch.bfloat16)[1 : 300 * 256 + 1].view(1, 300, 2, 128)
    )
    assert not flash_hopper.suits_tma(x.expand(3, -1, -1, -1))


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from phasor.ops.attention.flash_hopper_backward import backward_kernel
from phasor.ops.attention.flash_hopper_forward import forward_kernel

def descriptor(kind, shape):
    bits = 32 if kind == "fp32" else 16
    dtype = gl.float32 if kind == "fp32" else gl.bfloat16
    swizzled = len(shape) == 3
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype) if swizzled else gl.NVMMASharedLayout(0, bits, rank=2)
    return f"tensordesc<{kind}{shape},{layout!r}>"

name, constants = json.loads(sys.argv[1])
kernel = {"forward": forward_kernel, "backward": backward_kernel}[name]
tiles = {"q_desc": 128 if name == "forward" else 64, "k_desc": 128, "v_desc": 128, "do_desc": 64}
types = {f"{x}_desc": descriptor("bf16", [1, n, 128]) for x, n in ((x[:-5], n) for x, n in tiles.items())}
types |= {"dq_desc": descriptor("fp32", [1, 64, 64])}
types |= {x: descriptor("fp32", [1, 64]) for x in ("lse_desc", "delta_desc")}
types |= {"sums_desc": descriptor("fp32", [1, 128])}
types |= {x: "*bf16" for x in ("out_ptr", "dk_ptr", "dv_ptr")}
types |= {x: "*i32" for x in ("bounds_ptr", "ranges_ptr", "shifts_ptr")}
types |= {"key_mask_ptr": "*u8", "scale": "fp32", "softcap": "fp32"}
signature = {
    x: "constexpr" if x in constants else types.get(x, "*fp32" if x.endswith("_ptr") else "i32")
    for x in kernel.arg_names
}
source = GluonASTSource(kernel, signature, constants)
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]))
"""
FLAGS = {"forward": {"BLOCK_N": 128, "HAS_SINKS": True}, "backward": {"HAS_TABLE_GRAD": False, "HAS_CURVE_GRAD": False}}
FLAGS["backward"]["HAS_SUM_GRAD"] = True
SUMS = 6  # of the kinds of bias in flash_tiles


@pytest.mark.cpu_only("Triton compiles for the GPU that is there")
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_kernels_compile_for_hopper(name, tmp_path):
    """With this version of Triton, whose Gluon is new and changes."""
    constants = {
        "HEAD_DIM": 128,
        "NUM_STAGES": 2,
        "BIAS": SUMS,
        "ONE_SIDED": True,
        "HAS_SOFTCAP": True,
        "HAS_KEY_MASK": True,
    }
    constants |= FLAGS[name]
    script = tmp_path / "compile_kernel.py"
    script.write_text(COMPILE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache")
    }
    command = [sys.executable, str(script), json.dumps([name, constants])]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 1000


FAR = ("far_curve", "power_of_row", "column_powers", "far_coefs", "curve_sums")
KINDS = {"LINEAR": 3, "LOG": 4, "POWER": 5}


class Tile:
    """What is stored in shared memory."""

    def store(self, x):
        self.x = x


def in_torch():
    """The functions of the kernels about far tiles as Python runs them, on tensors in float64."""
    tiles = pytest.importorskip("phasor.ops.attention.flash_hopper_tiles")
    backward = pytest.importorskip("phasor.ops.attention.flash_hopper_backward")
    layouts = {name: lambda *fields: None for name in ("BlockedLayout", "SliceLayout")}
    layouts["NVMMASharedLayout"] = SimpleNamespace(get_default_for=lambda shape, dtype: None)
    memory = {"allocate_shared_memory": lambda dtype, shape, layout: Tile()}
    arange = {"arange": lambda start, end, layout: torch.arange(start, end)}
    language = SimpleNamespace(where=torch.where, exp2=torch.exp2, float32=torch.float64, **layouts, **memory, **arange)
    names = {"__builtins__": builtins, "gl": language, "log2": torch.log2, "LOG2E": math.log2(math.e), **KINDS}
    for name in FAR:
        code = getattr(tiles if hasattr(tiles, name) else backward, name).fn.__code__
        names[name] = FunctionType(code, names)
    return SimpleNamespace(**{name: names[name] for name in FAR})


def curves(kind, distance, param):
    """A curve, to base 2 for a logarithm, and its derivative by the parameter."""
    if kind == "LOG":
        return torch.log1p(param * distance) / math.log(2), distance / (1 + param * distance)
    return distance**param, distance**param * distance.log()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "param"), [("LOG", 1.0), ("LOG", 0.02), ("LOG", 1e-9), ("LOG", 0.0), ("POWER", 0.7), ("POWER", 1.9)]
)
def test_far_tiles_are_polynomials(kind, param, half):
    """Curves over tiles that are as near as far tiles may be, by products of numbers in half precision."""
    far = in_torch()
    param = torch.tensor(param, dtype=torch.float64)
    row, column = torch.arange(64)[:, None], torch.arange(64)[None, :]
    middle = (512 + 63 - row + 32).double()
    powers, x = far.column_powers(64, half).x.double(), (column[0].double() - 32) / 32
    assert (
        torch.stack([powers[0], powers[1], powers[2] + powers[3]]) - x ** torch.arange(3)[:, None]
    ).abs().max() < 1e-9
    assert (powers[4] - x**3).abs().max() < 4e-3
    for q_dim, distance in ((1, middle + column - 32), (0, middle - (column - 32))):  # which grows with queries
        exact = curves(kind, distance, param)[0]
        coefs = far.far_coefs(middle[:, 0], 1.0, param, 64, q_dim, KINDS[kind], half, None)
        in_middle = far.far_curve(middle, param, 1, KINDS[kind])[0]
        error = (in_middle + coefs.double() @ powers - exact).abs().max()
        assert error < 2e-5 * (1.0 if kind == "LOG" else exact.max())


@pytest.mark.parametrize(
    ("kind", "param"), [("LOG", 1.0), ("LOG", 0.02), ("LOG", 1e-9), ("LOG", 0.0), ("POWER", 0.7), ("POWER", 1.9)]
)
def test_gradients_of_curves_are_sums_of_moments(kind, param):
    """Of gradients that see the terms of one degree alone."""
    far = in_torch()
    param = torch.tensor(param, dtype=torch.float64)
    row, x = torch.arange(64)[:, None], (torch.arange(64) - 32).double() / 32
    middle = (512 + 63 - row + 32).double()
    exact, derivative = curves(kind, middle + 32 * x, param)
    power = far.power_of_row(torch.arange(8))[None, :]
    halves = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 0.5, 0.5]).double()  # a number and its rest are two columns
    for degree, part in enumerate(torch.linalg.qr(x[:, None] ** torch.arange(4)).Q.mT):
        ds = part.expand(64, -1)
        moments = (ds @ x[:, None] ** power) * halves
        by_slope, by_param = far.curve_sums(moments, middle[:, 0], param, power, KINDS[kind])
        for ours, curve in ((by_slope, exact), (by_param, derivative)):
            wanted = (ds * curve).sum()
            rounding = 1e-12 * (ds * curve).abs().sum()
            assert abs(ours.sum() - wanted) <= 0.03 * abs(wanted) + rounding, degree  # terms of higher degree


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_powers_of_spans(half):
    """Their rows and their rests are inverse spans times those of the columns, but for cubes."""
    inverse = torch.linspace(0.07, 0.4, 131).expand(2, -1) * torch.tensor([[1.0], [0.5]])
    rows = flash_hopper.powers_of_spans(inverse, half).view(2, 3, 16, 64).double()
    columns = in_torch().column_powers(64, half).x.double()
    exact = torch.nn.functional.pad(inverse, (0, 61)).double().view(2, 3, 1, 64) * columns
    assert torch.equal(rows[:, :, 5], torch.ones(2, 3, 64).double())
    assert torch.equal(rows[:, :, 10:], torch.zeros(2, 3, 6, 64).double())
    halves = {0: 7, 1: 6, 2: 3}
    for row, rest in halves.items():
        wanted = exact[:, :, row] + (exact[:, :, 3] if row == 2 else 0)
        assert (rows[:, :, row] + rows[:, :, rest] - wanted).abs().max() < 2e-6
        assert row == 0 or torch.equal(rows[:, :, row + 7], rows[:, :, row])
    assert (rows[:, :, 4] - exact[:, :, 4]).abs().max() < 4e-3
    least, most = flash_hopper.span_ranges(inverse).unbind(-1)
    assert torch.equal(least[0, :2], inverse[0, [0, 64]])
    assert torch.equal(most[0], inverse[0, [63, 127, 130]])


def test_tables_lie_twice():
    """Any two entries that follow each other begin at an even place of one of both."""
    for distances in (5, 6):
        table = torch.arange(2.0 * distances).view(2, distances)
        pairs = flash_hopper.twice(table)
        assert pairs.shape == (2, 2, 6)
        for first in range(distances - 1):
            odd = first % 2
            assert torch.equal(pairs[:, odd, first - odd :][:, :2], table[:, first : first + 2])


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("padding", "cross")])
def test_counted_positions_are_contiguous(name):
    """The kernels go by index, without a look at positions."""
    mask, keys, _ = mask_of(name)
    k_pos = torch.arange(keys)[None] if mask.order is None else mask.order
    q_pos = k_pos[:, mask.offset : mask.offset + TOKENS] if mask.order is None else mask.order
    assert (intervals.shifts(mask, q_pos, k_pos) == mask.offset).all()
