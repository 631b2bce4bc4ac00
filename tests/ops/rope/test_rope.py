"""The rope kernel: exact angles at any position, in any layout, with its gradients, and in a model.

It runs on the CPU through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import mpmath
import numpy as np
import pytest
import torch
from device import DEVICE
from schemes import SCHEMES, build, relative_change, tiny, tokens
from torch import Tensor

import phasor
from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch, rope
from phasor.ops.rope import RopeArgs, split_qkv
from phasor.ops.rope.reference import split_pairs
from phasor.ops.rope.rope import merge_qkv_op, rope_op, rope_qkv_op

kernels = pytest.importorskip("phasor.ops.rope.kernels")

# Of a result of order 1, in float32: a cosine or sine is off by at most 1e-7 and the result is rounded by 2^-24, times
# the length of a pair, which of standard normals is below 4.
EXACT = 1e-6
SAME = 4e-6  # relative, float32: two layers of a model after that
FAR = 2**36
COUNT = 6  # tokens per row of a model


@pytest.fixture
def launches() -> Iterator[Any]:
    """The launches of the kernel, which still run."""
    import phasor.ops.rope.kernels as kernel

    with mock.patch.object(kernel, "launch_rope", wraps=kernel.launch_rope) as spy, dispatch.force_path("triton"):
        yield spy


def random_args(*shape: int, pairs: int, factor: float = 1.0) -> RopeArgs:
    """Positions up to 2^36 and frequencies of either sign, any number of rotations per position."""
    return RopeArgs(torch.randint(0, FAR, shape), torch.randint(-(2**63), 2**63 - 1, (pairs,)), torch.tensor([factor]))


def rotate_exactly(x: Tensor, args: RopeArgs, pairing: str) -> Tensor:
    """Heads `[B, T, H, D]` in float64, rotated one pair at a time by angles of 50 digits."""
    out, pairs = x.double().clone(), len(args.increments)
    positions = args.positions.expand(x.shape[:2])
    with mpmath.workdps(50):
        for row, step, pair in torch.cartesian_prod(*(torch.arange(n) for n in (*x.shape[:2], pairs))).tolist():
            rotations = mpmath.mpf(int(positions[row, step])) * int(args.increments[pair]) / 2**64
            angle = 2 * mpmath.pi * (rotations - mpmath.nint(rotations))
            cos, sin = float(mpmath.cos(angle)), float(mpmath.sin(angle))
            first, second = (pair, pairs + pair) if pairing == "half" else (2 * pair, 2 * pair + 1)
            u, v = x[row, step, :, first].double(), x[row, step, :, second].double()
            out[row, step, :, first], out[row, step, :, second] = u * cos - v * sin, u * sin + v * cos
    out[..., : 2 * pairs] *= args.factor
    return out


PAIRINGS = pytest.mark.parametrize("pairing", ["half", "adjacent"])


class TestValues:
    @pytest.mark.sample(10)
    @PAIRINGS
    @pytest.mark.parametrize(
        ("heads", "keys", "head_dim", "pairs"), [(4, 2, 16, 8), (3, 3, 14, 7), (5, 1, 20, 3), (1, 1, 2, 1)]
    )
    @pytest.mark.parametrize("positions", [(1,), (3,), (1, 3), (2, 3)], ids=str)
    def test_any_size(self, positions, heads, keys, head_dim, pairs, pairing):
        args = random_args(*positions, pairs=pairs, factor=1.25)
        q, k = (torch.randn(2, positions[-1], n, head_dim) for n in (heads, keys))
        for got, x in zip(rope.rope_kernel(q, k, args, pairing), (q, k), strict=True):
            assert (got - rotate_exactly(x, args, pairing)).abs().max() < 1.25 * EXACT

    @PAIRINGS
    @pytest.mark.parametrize("parts", [2, 3, 8])
    def test_programs_share_the_heads_of_a_token(self, parts, pairing):
        from phasor.ops.rope.kernels import Schedule, launch_rope

        args = random_args(2, 3, pairs=2)
        q, k, v = torch.randn(2, 3, 2, 3, 6), *torch.randn(2, 2, 3, 2, 6)
        into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        launch_rope((q, k, v), into, *args, adjacent=pairing == "adjacent", inverse=False, schedule=Schedule(parts, 1))
        for got, x in zip(into[:2], (q, k), strict=True):
            assert (got.flatten(2, -2) - rotate_exactly(x.flatten(2, -2), args, pairing)).abs().max() < EXACT
        assert torch.equal(into[2], v)

    @PAIRINGS
    def test_features_beyond_the_rotary_dim_are_copied(self, pairing):
        """Zeros of either sign and infinities beside them too."""
        odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.0, torch.nan, -0.0])
        x = torch.cat((torch.randn(4), odd)).expand(1, 2, 3, 12)
        got = rope.rope_kernel(x, x, random_args(2, pairs=2, factor=3.0), pairing)
        for y in got:
            assert torch.equal(y[..., 4:].contiguous().view(torch.int32), x[..., 4:].contiguous().view(torch.int32))
            assert y[..., :4].isfinite().all()

    def test_every_eighth_of_a_rotation_and_its_neighbors(self):
        """Where the quarter that is subtracted changes, and where cosine or sine is 0."""
        phases = [eighth * 2**61 + off for eighth in range(-4, 4) for off in (-(2**32), -1, 0, 1, 2**32)]
        increments = torch.tensor([(p + 2**63) % 2**64 - 2**63 for p in phases])
        args = RopeArgs(torch.tensor([1]), increments, torch.ones(1))
        x = torch.tensor([1.0, 0.0]).repeat_interleave(len(phases)).view(1, 1, 1, -1)
        assert (rope.rope_kernel(x, x, args, "half")[0] - rotate_exactly(x, args, "half")).abs().max() < 2e-7

    @pytest.mark.parametrize("position", [0, 1, 2**20 + 7, 2**30 + 5, FAR - 1])
    def test_a_scheme_is_exact_at_any_position(self, launches, position):
        """Against the formula itself, not the stored increments: those are off by 2^-65 of a rotation per position."""
        rope = phasor.Rotary(head_dim=16, extension=phasor.LinearScaling(factor=3.0))
        x = torch.randn(1, 1, 1, 16)
        got, _ = rope.rotate(x, x, torch.tensor([position]))
        with mpmath.workdps(50):
            angles = [position * mpmath.power(10000, mpmath.mpf(-i) / 8) / 3 for i in range(8)]
            cos, sin = (torch.tensor([float(f(a)) for a in angles]).double() for f in (mpmath.cos, mpmath.sin))
        u, v = x.double().chunk(2, -1)
        assert (got - torch.cat((u * cos - v * sin, v * cos + u * sin), -1)).abs().max() < EXACT
        assert launches.call_count == 1

    @PAIRINGS
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_rounded_once(self, dtype, pairing):
        args = random_args(2, 3, pairs=8)
        q = torch.randn(2, 3, 4, 16).to(dtype)
        got, _ = rope.rope_kernel(q, q, args, pairing)
        true = rotate_exactly(q, args, pairing)
        first, second = split_pairs(true, pairing)
        unit = torch.hypot(first, second).log2().floor().exp2() * torch.finfo(dtype).eps  # of the pair's norm
        off = [x.abs() for x in split_pairs(got - true, pairing)]
        assert got.dtype == dtype
        assert all(bool((x <= unit).all()) for x in off)

    def test_no_queries(self):
        args, q, k = random_args(3, pairs=4), torch.randn(2, 3, 0, 8), torch.randn(2, 3, 2, 8)
        assert (rope.rope_kernel(q, k, args, "half")[1] - rotate_exactly(k, args, "half")).abs().max() < EXACT

    def test_no_tokens(self):
        q = torch.randn(0, 3, 4, 16)
        assert [x.shape for x in rope.rope_kernel(q, q[:, :, :0], random_args(3, pairs=8), "half")] == [
            (0, 3, 4, 16),
            (0, 3, 0, 16),
        ]


class TestSchedules:
    @pytest.mark.sample(10)
    @pytest.mark.parametrize("count", [1, 128, 129, 255, 256, 257, 1023, 1024])
    @pytest.mark.parametrize(("heads", "keys"), [(1, 1), (2, 1), (3, 3), (5, 1), (7, 7)])
    def test_every_head_is_rotated_under_the_schedule_of_any_length(self, heads, keys, count):
        schedule, args = kernels.choose_schedule(count, heads, 6), random_args(2, pairs=3)
        q, k, v = torch.randn(1, 2, heads, 6), *torch.randn(2, 1, 2, keys, 6)
        into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        kernels.launch_rope((q, k, v), into, *args, adjacent=False, inverse=False, schedule=schedule)
        for got, x in zip(into[:2], (q, k), strict=True):
            assert (got - rotate_exactly(x, args, "half")).abs().max() < EXACT
        assert torch.equal(into[2], v)

    @pytest.mark.parametrize("can", [True, False])
    @pytest.mark.parametrize("count", [1, 1023, 1024])
    def test_only_launches_for_few_tokens_use_pdl(self, count, can):
        calls: list[dict[str, Any]] = []

        class Kernel:
            function = packed_metadata = None
            arg_names = kernels._rope_kernel.arg_names

            def __getitem__(self, grid):
                return lambda **given: [calls.append(given), self][1]

            def run(self, *given):
                calls.append({"USE_PDL": given[-1]})

        x, args = torch.zeros(1, count, 1, 8), random_args(count, pairs=4)
        pdl = can and count < kernels.MANY_TOKENS
        with (
            mock.patch.object(kernels.launch, "kernel", Kernel()),
            mock.patch.object(kernels, "supports_pdl", return_value=can),
            mock.patch.dict(kernels.launch.compiled, clear=True),
        ):
            for _ in range(2):  # compiled, then cached
                kernels.launch_rope((x, x), (x, x), *args, adjacent=False, inverse=False)
        assert [given["USE_PDL"] for given in calls] == [pdl, pdl]
        assert calls[0].get("launch_pdl", False) == pdl

    @pytest.mark.cpu_only("a compiled kernel cannot call back into the test")
    def test_no_memory_is_touched_before_pdl_wait(self, monkeypatch):
        args, q, k = random_args(2, pairs=3), torch.randn(1, 2, 3, 6), torch.randn(1, 2, 1, 6)
        late = [torch.full_like(x, 0 if x.dtype == torch.int64 else torch.nan) for x in (*args, q, k)]
        into = [torch.full_like(x, torch.nan) for x in (q, k)]
        waits: list[bool] = []

        def pdl_wait(pdl):
            if not waits:
                assert all(x.isnan().all() for x in into)
            waits.append(pdl)
            for x, written in zip(late, (*args, q, k), strict=True):
                x.copy_(written)

        monkeypatch.setattr(kernels, "pdl_wait", pdl_wait)
        kernels.launch_rope(late[3:], into, *late[:3], adjacent=False, inverse=False)
        assert len(waits) == 2 * 3
        for got, x in zip(into, (q, k), strict=True):
            assert (got - rotate_exactly(x, args, "half")).abs().max() < EXACT


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
def test_warps_are_a_power_of_two(width):
    from phasor.ops.rope.kernels import choose_schedule

    for count, heads in ((1, 1), (200, 3), (4096, 12), (4096, 16), (4096, 32), (4096, 71)):
        assert choose_schedule(count, heads, width).num_warps.bit_count() == 1


def test_cached_launches_are_for_aligned_tensors():
    """A compiled kernel may read 16 bytes at once: unaligned tensors are left to Triton's own checks."""
    import phasor.ops.rope.kernels as module

    calls: list[str] = []

    class Compiled:
        function = packed_metadata = None

        def run(self, *given):
            calls.append("cached")

    class Kernel:
        arg_names = module._rope_kernel.arg_names

        def __getitem__(self, grid):
            return lambda **given: [calls.append("checked"), Compiled()][1]

    def call(shifted: int) -> str:
        sizes = (6, torch.int64), (4, torch.int64), (1, torch.float32), *[(48, torch.float32)] * 3 * 2
        flat = [torch.zeros(n + 4, dtype=kind)[int(i == shifted) :][:n] for i, (n, kind) in enumerate(sizes)]
        positions, increments, factor, *heads = flat
        q, k, v, *into = (x.view(1, 6, 1, 8) for x in heads)
        module.launch_rope((q, k, v), into, positions, increments, factor, adjacent=False, inverse=False)
        return calls[-1]

    with mock.patch.object(module.launch, "kernel", Kernel()), mock.patch.dict(module.launch.compiled, clear=True):
        assert [call(-1), call(-1)] == ["checked", "cached"]
        assert [call(i) for i in range(9)] == ["cached", *["checked"] * 8]  # positions are read one by one
        assert call(-1) == "cached"


LAYOUTS = {
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "inside a wider tensor": lambda x: torch.cat((x, x), dim=2)[:, :, x.shape[2] :],
    "features apart": lambda x: x.mT.contiguous().mT,
    "every other token": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "rows after tokens": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.sample(4)
@PAIRINGS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, pairing):
    q, k, args = torch.randn(2, 5, 4, 12), torch.randn(2, 5, 2, 12), random_args(2, 5, pairs=4)
    expected = rope.rope_kernel(q, k, args, pairing)
    laid = [LAYOUTS[layout](x) for x in (q, k)]
    spread = RopeArgs(args.positions.mT.contiguous().mT, *args[1:])
    for got, same in zip(rope.rope_kernel(*laid, spread, pairing), expected, strict=True):
        assert torch.equal(got, same)


@pytest.mark.cpu_only("the file is in the host's memory")
def test_heads_further_apart_than_32_bits_count(tmp_path):
    """In a file with holes: 4 heads, 2^30 features apart."""
    flat = np.memmap(tmp_path / "heads", dtype=np.float16, mode="w+", shape=(3 * 2**30 + 64,))
    far = torch.from_numpy(flat).as_strided((1, 2, 4, 8), (64, 8, 2**30, 1))
    q, args = torch.randn(1, 2, 4, 8).half(), random_args(2, pairs=4)
    far.copy_(q)
    for got, same in zip(rope.rope_kernel(far, far, args, "half"), rope.rope_kernel(q, q, args, "half"), strict=True):
        assert torch.equal(got, same)


def test_parts_of_a_projection_are_the_same_views_with_and_without_gradients():
    x = torch.randn(2, 3, 2, 5, 4)
    for one, other in zip(split_qkv(x), split_qkv(x.clone().requires_grad_()), strict=True):
        assert one._base is x
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


class TestGradients:
    """Of the kernel, against those of the reference in float64."""

    def inputs(self, form: str) -> list[Tensor]:
        if form == "projection":
            return [torch.randn(2, 3, 2, 5, 14, requires_grad=True)]
        return [torch.randn(2, 3, heads, 14, requires_grad=True) for heads in (6, 2)]

    @PAIRINGS
    @pytest.mark.parametrize("form", ["heads", "projection"])
    def test_first_and_second(self, form, pairing):
        args, inputs = random_args(2, 3, pairs=5, factor=0.75), self.inputs(form)
        forms = {"heads": (rope.rope_kernel, rope.rope_ref), "projection": (rope.rope_qkv_kernel, rope.rope_qkv_ref)}
        fast, plain = forms[form]
        results = []
        for function, own in ((fast, inputs), (plain, [x.detach().double().requires_grad_() for x in inputs])):
            generator = torch.Generator().manual_seed(7)
            outs = function(*own, args, pairing)
            weights = [torch.randn(x.shape, generator=generator).to(x.dtype).requires_grad_() for x in outs]
            first = torch.autograd.grad(outs, own, weights, create_graph=True)
            second = torch.autograd.grad([x.square().sum() for x in first], weights)
            results.append([*outs, *first, *second])
        for got, true in zip(*results, strict=True):
            assert (got - true).abs().max() < 4 * EXACT

    def test_gradients_of_any_layout(self):
        """A sum's gradient has strides of 0, attention's has heads before tokens."""
        args, (x,) = random_args(3, pairs=7), self.inputs("projection")
        grads = []
        for spread in (False, True):
            q, k, v = rope.rope_qkv_kernel(x, args, "half")
            ones = [torch.ones(y.transpose(1, 2).shape).transpose(1, 2) for y in (q, k, v)]
            grads += torch.autograd.grad((q, k, v), x, [y if spread else y[:1, :1, :1, :1].expand_as(y) for y in ones])
        assert torch.equal(*grads)

    def test_only_some_results_are_used(self):
        args, (x,) = random_args(3, pairs=7), self.inputs("projection")
        (grad,) = torch.autograd.grad(rope.rope_qkv_kernel(x, args, "half")[1].sum(), x)
        assert grad[..., :3, :].abs().max() == grad[..., 4, :].abs().max() == 0 < grad[..., 3, :].abs().min()

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("op", [rope_op, rope_qkv_op, merge_qkv_op], ids=["rope", "rope_qkv", "merge_qkv"])
    def test_operators_are_well_formed(self, op):
        args, (x,), (q, k) = random_args(2, 3, pairs=5), self.inputs("projection"), self.inputs("heads")
        inputs = {rope_op: (q, k), rope_qkv_op: (x,), merge_qkv_op: (q, k, k.detach().clone().requires_grad_())}
        torch.library.opcheck(op.op, (*inputs[op], *args, True, False))


def run(model: phasor.Transformer, *args: Any, **given: Any) -> list[Tensor]:
    """Logits of real tokens, and the gradients of all weights."""
    model.zero_grad()
    logits = model(*args, **given)
    if "attention_mask" in given:
        logits = logits[given["attention_mask"]]
    logits.logsumexp(-1).mean().backward()
    return [logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def check_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert relative_change(a, b) < SAME


SAMPLES = {
    "grouped": (tiny("rotary"), 2),
    "one group": (tiny("rotary-adjacent", num_kv_heads=1), 2),
    "no groups": (tiny("rotary-partial", num_kv_heads=4), 2),
    "attention factor": (tiny("rotary-yarn"), 2),
    "by length": (tiny("rotary-dynamic-yarn"), 2),
    "normed": (tiny("rotary", attention={"qk_norm": "head", "clip": 2.0, "bias": ("q",)}), 2),
    "two bases": (tiny("rotary", layers=({}, {"position": phasor.RotaryConfig(base=1e6, pairing="adjacent")})), 2),
    "encoder": (tiny("rotary", shape="encoder"), 2),
    # Queries for the sink tokens are rotated separately: two launches per layer.
    "capped sinks": (tiny("rotary", attention={"window": 4, "sink_tokens": 1, "cap_sinks": True}), 4),
}


class TestModels:
    """Logits and all gradients are those of the reference, with this many launches in two layers."""

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("name", SAMPLES)
    def test_logits_and_gradients(self, name, launches):
        config, count = SAMPLES[name]
        model, ids = build(config), tokens(2, COUNT)
        positions = torch.arange(COUNT) + torch.tensor([[2**30], [5]])
        got = run(model, ids, positions=positions, length=20)
        assert launches.call_count == 2 * count
        with dispatch.force_path("reference"):
            expected = run(model, ids, positions=positions, length=20)
        check_same(got, expected)
        assert launches.call_count == 2 * count

    def test_padding_and_documents(self, launches):
        model, ids = build(tiny("rotary")), tokens(2, COUNT)
        given = {
            "attention_mask": torch.arange(COUNT) >= torch.tensor([[0], [4]]),
            "document_ids": torch.arange(COUNT).expand(2, -1) // 5,
        }
        got = run(model, ids, **given)
        with dispatch.force_path("reference"):
            check_same(got, run(model, ids, **given))

    @pytest.mark.parametrize("name", ["rotary", "rotary-dynamic-ntk"])
    def test_cached(self, launches, name):
        model, ids = build(tiny(name)), tokens(2, 6)
        cache = model.new_cache(2, 8)
        with torch.no_grad():
            pieces = [model(ids[:, :4], cache=cache), *(model(ids[:, i : i + 1], cache=cache) for i in (4, 5))]
            assert launches.call_count == 6
            with dispatch.force_path("reference"):
                assert relative_change(torch.cat(pieces, 1), model(ids, length=8)) < SAME

    @pytest.mark.slow
    @pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
    def test_compiled(self, launches, whole):
        torch.compiler.reset()
        model, ids = build(tiny("rotary-yarn")), tokens(2, COUNT)
        with dispatch.force_path("reference"):
            expected = run(model, ids)
        for part in [model] if whole else model.decoder.blocks:
            part.compile(backend="aot_eager", fullgraph=True)
        check_same(run(model, ids), expected)
        assert launches.call_count == 4
        with torch.no_grad():
            assert relative_change(model(ids), expected[0]) < SAME
        torch.compiler.reset()

    @pytest.mark.slow
    def test_recomputed_in_the_backward_pass(self, launches):
        model, ids = build(tiny("rotary")), tokens(2, COUNT)
        expected = run(model, ids)
        forward = phasor.transformer.Block.forward
        again = torch.utils.checkpoint.checkpoint
        with mock.patch.object(
            phasor.transformer.Block, "forward", lambda *args: again(forward, *args, use_reentrant=False)
        ):
            check_same(run(model, ids), expected)

    def test_autocast(self, launches):
        model, ids = build(tiny("rotary")), tokens(2, COUNT)
        with torch.autocast(DEVICE.type, torch.bfloat16), torch.no_grad():
            got = model(ids)
            assert launches.call_args.args[0][0].dtype == torch.bfloat16
            with dispatch.force_path("reference"):
                assert relative_change(got, model(ids)) < 2 * torch.finfo(torch.bfloat16).eps


NOT_TAKEN = {
    "axial": "several axes",
    "mrope": "several axes",
    "mrope-interleaved": "several axes",
    "rotary-values": "values",
    "rotary-output": "values",
}


OTHER_KERNEL = {"xpos"}  # which takes scales
ROTATED_AGAIN = {"selfextend": 2, "selfextend-rerope": 2, "dualchunk": 2}  # for other pieces of distances


class TestChoice:
    @pytest.mark.sample(5)
    @pytest.mark.parametrize("name", [n for n, scheme in SCHEMES.items() if isinstance(scheme, phasor.RotaryConfig)])
    def test_the_kernel_is_taken_unless_a_sentence_says_why_not(self, name, launches):
        model, ids = build(tiny(name, num_layers=1)), tokens(2, COUNT)
        scheme = model.decoder.position(0)
        why = scheme.why_not(SequenceInfo(torch.arange(COUNT), 9), torch.zeros(1))
        assert (NOT_TAKEN[name] in why) if name in NOT_TAKEN else why is None
        with torch.no_grad():
            got = model(ids, length=20)
            assert launches.call_count == (0 if why or name in OTHER_KERNEL else 1 + ROTATED_AGAIN.get(name, 0))
            with dispatch.force_path("reference"):
                assert relative_change(got, model(ids, length=20)) < SAME

    def test_what_only_the_reference_can_do(self, launches):
        rope = phasor.Rotary(head_dim=8, extension=phasor.DynamicNTKScaling(factor=4.0, original_length=8))
        positions, x = torch.arange(5), torch.randn(2, 4, 5, 8)
        assert "differ" in rope.why_not(SequenceInfo(positions, torch.tensor([[9], [20]]).expand(2, 5)), x)
        assert "float64" in rope.why_not(SequenceInfo(positions, 9), x.double())
        with dispatch.force_path("reference"):
            assert "forced" in rope.why_not(SequenceInfo(positions, 9), x)
        rope.rotate(x, x, positions.expand(2, 5), [9, 20])
        rope.rotate(x.double(), x.double(), positions, 9)
        grad = torch.func.grad(lambda x: rope.rotate(x, x, positions, 9)[0].square().sum())(x)
        assert launches.call_count == 0
        assert (grad - 2 * x).abs().max() < 8 * EXACT

    def test_without_a_gpu_the_reference_runs(self):
        assert "GPU" in phasor.Rotary(head_dim=8).why_not(SequenceInfo(torch.arange(3), 3), torch.zeros(1).cpu())

    def test_rotation_of_the_projection_needs_nothing_in_between(self):
        between = {"qk_norm": "head"}, {"clip": 2.0}, {"bias": ("q",)}
        blocks = [build(tiny("rotary", attention=x)).decoder.blocks[0] for x in ({}, *between)]
        reasons = [block.attention.unfusable_reason for block in blocks]
        assert reasons[0] is None
        assert [("normalized" in b, "clipped" in c, "bias" in d) for _, b, c, d in [reasons]] == [(True, True, True)]
