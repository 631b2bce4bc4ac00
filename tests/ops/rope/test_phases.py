"""The kernel that rotates by given phases: against its formula in float64, with the gradients of learned angles.

It runs on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from device import DEVICE
from schemes import build, relative_change, tiny, tokens
from torch import Tensor

from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch, rope
from phasor.ops.attention import Mask
from phasor.ops.rope import PhaseArgs, split_qkv
from phasor.ops.rope.phases import phase_op, phase_qkv_op

kernels = pytest.importorskip("phasor.ops.rope.phase_kernels")

# Of a result of order 1, in float32: a cosine or sine is off by at most 1e-8, and the result is rounded by 2^-24 times
# the length of a pair, which of standard normals is below 4. Gradients of angles are sums over heads of such products.
EXACT = 1e-6
# Relative, float32: of logits after two layers of a model, and of gradients. That of a frequency is a sum of those of
# angles times positions, which nearly cancel.
SAME, SAME_GRADIENT = 4e-6, 1e-4
PAIRINGS = pytest.mark.parametrize("pairing", ["half", "adjacent"])
# Rows, tokens, heads, key/value heads, features, pairs; rows of phases and groups of heads with phases of their own.
SIZES = {
    "by group": (2, 5, 4, 2, 16, 8, 2, 2),
    "shared": (2, 5, 6, 3, 20, 10, 1, 1),
    "some features": (1, 37, 4, 2, 14, 5, 1, 2),
    "one group of keys": (3, 2, 5, 1, 8, 4, 3, 1),
    "by two keys": (1, 9, 8, 4, 6, 3, 1, 2),
}


def random_args(sizes: tuple[int, ...], learned: bool = True, scaled: bool = True) -> PhaseArgs:
    rows, count, _, _, _, pairs, phase_rows, groups = sizes
    shape = phase_rows, count, groups, pairs
    radians = torch.zeros(shape, requires_grad=True) if learned else None
    scales = [torch.rand(row, count, pairs) + 0.5 if scaled else None for row in (1, rows)]
    if scales[0] is not None:
        scales[0] = scales[0].expand(rows, -1, -1)
    return PhaseArgs(torch.randint(-(2**63), 2**63 - 1, shape), radians, *scales)


def in_float64(args: PhaseArgs) -> PhaseArgs:
    radians, *scales = (None if x is None else x.detach().double() for x in args[1:])
    return PhaseArgs(args.phases, None if radians is None else radians.requires_grad_(), *scales)


def random_projection(sizes: tuple[int, ...]) -> Tensor:
    rows, count, heads, kv_heads, head_dim = sizes[:5]
    return torch.randn(rows, count, kv_heads, heads // kv_heads + 2, head_dim, requires_grad=True)


def rotate_projection(qkv: Tensor, args: PhaseArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_qkv(qkv)
    return *rope.rope_phases_ref(q, k, args, pairing), v


class TestKernel:
    @pytest.mark.sample(6)
    @PAIRINGS
    @pytest.mark.parametrize("form", ["heads", "projection"])
    @pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
    def test_values_and_first_and_second_derivatives(self, sizes, form, pairing):
        args, qkv = random_args(sizes), random_projection(sizes)
        results = []
        ways = (rope.rope_qkv_kernel, qkv, args), (rotate_projection, qkv.detach().double(), in_float64(args))
        for way, x, own in ways:
            x.requires_grad_()
            function = way if form == "projection" or way is rotate_projection else rotate_heads
            outs = function(x, own, pairing)
            generator = torch.Generator().manual_seed(7)
            weights = [torch.randn(y.shape, generator=generator).to(y.dtype).requires_grad_() for y in outs]
            once = torch.autograd.grad(outs, (x, own.radians), weights, retain_graph=True)
            first = torch.autograd.grad(outs, (x, own.radians), weights, create_graph=True)
            ramps = [torch.linspace(1, 2, g.numel(), dtype=g.dtype).view_as(g) for g in first]
            total = sum((g.square() * ramp).sum() for g, ramp in zip(first, ramps, strict=True))  # of no kept norm
            second = torch.autograd.grad(total, (x, own.radians, *weights))
            results.append([*outs, *once, *first, *second])
        for got, true in zip(*results, strict=True):
            assert relative_change(got, true) < EXACT

    def test_phases_without_a_gradient_or_a_scale(self):
        sizes = SIZES["shared"]
        args, qkv = random_args(sizes, learned=False, scaled=False), random_projection(sizes)
        outs = rope.rope_qkv_kernel(qkv, args, "half")
        (grad,) = torch.autograd.grad(sum(x.square().sum() for x in outs), qkv)
        assert relative_change(grad, 2 * qkv) < EXACT  # rotations keep norms

    @pytest.mark.parametrize("alone", ["queries", "keys"])
    def test_queries_or_keys_alone(self, alone):
        sizes = SIZES["by group"]
        args, (q, k, _) = random_args(sizes), split_qkv(random_projection(sizes).detach())
        q, k = (q.flatten(2, 3), k[:, :, :0]) if alone == "queries" else (q.flatten(2, 3)[:, :, :0], k)
        for got, true in zip(
            rope.rope_kernel(q, k, args, "half"), rope.rope_phases_ref(q, k, args, "half"), strict=True
        ):
            assert got.shape == true.shape
            torch.testing.assert_close(got, true, rtol=0, atol=4 * EXACT)

    @PAIRINGS
    def test_half_precision_is_rounded_once(self, pairing):
        sizes = SIZES["by group"]
        args, qkv = random_args(sizes, scaled=False), random_projection(sizes).detach().bfloat16().requires_grad_()
        exact = rotate_projection(qkv.detach().double().requires_grad_(), in_float64(args), pairing)
        outs = rope.rope_qkv_kernel(qkv, args, pairing)
        for got, true in zip(outs, exact, strict=True):
            assert got.dtype == torch.bfloat16
            assert relative_change(got, true) < 2**-7  # the interpreter rounds towards zero
        grads = torch.autograd.grad(sum(x.float().square().sum() for x in outs), (qkv, args.radians))
        assert [x.dtype for x in grads] == [torch.bfloat16, torch.float32]
        assert relative_change(grads[0], 2 * qkv) < 2**-6

    def test_gradients_of_angles_are_the_same_each_time(self):
        sizes = (1, 300, 8, 2, 16, 8, 1, 2)
        args, qkv = random_args(sizes), random_projection(sizes)
        outs = rope.rope_qkv_kernel(qkv, args, "half")
        grads = [torch.autograd.grad(outs, args.radians, outs, retain_graph=True)[0] for _ in range(3)]
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])

    def test_any_layout(self):
        """Inputs and gradients with heads before tokens, or features apart."""
        sizes = SIZES["by group"]
        args, qkv = random_args(sizes), random_projection(sizes).detach()
        q, k, _ = split_qkv(qkv)
        q = q.flatten(2, 3)
        expected = rope.rope_kernel(q, k, args, "half")
        for layout in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
            for got, same in zip(rope.rope_kernel(layout(q), layout(k), args, "half"), expected, strict=True):
                assert torch.equal(got, same)
            x = qkv.clone().requires_grad_()
            outs = rope.rope_qkv_kernel(x, args, "half")
            plain = torch.autograd.grad(outs, (x, args.radians), outs, retain_graph=True)
            laid = torch.autograd.grad(outs, (x, args.radians), [layout(y.detach()) for y in outs])
            assert all(torch.equal(a, b) for a, b in zip(plain, laid, strict=True))

    def test_no_tokens(self):
        q = torch.randn(0, 3, 4, 16)
        args = PhaseArgs(torch.zeros(1, 3, 2, 8, dtype=torch.int64))
        assert [x.shape for x in rope.rope_kernel(q, q[:, :, :2], args, "half")] == [(0, 3, 4, 16), (0, 3, 2, 16)]

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("op", [phase_op, phase_qkv_op], ids=["heads", "projection"])
    def test_operators_are_well_formed(self, op):
        sizes = SIZES["by group"]
        args, qkv = random_args(sizes), random_projection(sizes)
        q, k = (x.detach().clone().requires_grad_() for x in split_qkv(qkv)[:2])
        inputs = (q, k) if op is phase_op else (qkv,)
        torch.library.opcheck(op.op, (*inputs, *args, False, False))


def rotate_heads(qkv: Tensor, args: PhaseArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_qkv(qkv)
    return *rope.rope_kernel(q, k, args, pairing), v


def run(model: Any, *args: Any, **given: Any) -> list[Tensor]:
    """Logits of real tokens, and the gradients of all weights."""
    model.zero_grad()
    logits = model(*args, **given)
    if "attention_mask" in given:
        logits = logits[given["attention_mask"]]
    logits.logsumexp(-1).mean().backward()
    return [logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def check_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Logits, and then gradients."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert relative_change(a, b) < (SAME_GRADIENT if index else SAME)


@pytest.fixture
def launches():
    """The launches of the kernel, which still run."""
    with mock.patch.object(kernels, "launch_phases", wraps=kernels.launch_phases) as spy, dispatch.force_path("triton"):
        yield spy


SCHEMES = ["xpos", "accumulated", "accumulated-adjacent", "grape"]
COUNT = 6  # tokens per row


class TestModels:
    """Logits and all gradients are those of the reference, with one launch each way in two layers."""

    @pytest.mark.sample(6)
    @pytest.mark.parametrize("view", [{}, {"attention": {"qk_norm": "head"}}, {"num_kv_heads": 1}], ids=str)
    @pytest.mark.parametrize("name", SCHEMES)
    def test_logits_and_gradients(self, name, view, launches):
        model, ids = build(tiny(name, **view)), tokens(2, COUNT)
        given = {} if "accumulated" in name else {"positions": torch.arange(COUNT) + torch.tensor([[3], [0]])}
        got = run(model, ids, **given)
        assert launches.call_count == 4
        with dispatch.force_path("reference"):
            expected = run(model, ids, **given)
        assert launches.call_count == 4
        check_same(got, expected)

    @pytest.mark.parametrize("name", ["xpos", "accumulated"])
    def test_queries_and_keys_by_hooks_of_their_own(self, name, launches):
        scheme, x = build(tiny(name)).decoder.position(0), torch.randn(2, COUNT, 32)
        q, k = torch.randn(2, COUNT, 4, 8), torch.randn(2, COUNT, 2, 8)
        place = scheme.prepare(SequenceInfo(torch.arange(COUNT), COUNT), x)
        if name == "accumulated":
            place = scheme.for_layer(x, place, scheme.layer_weights(0), LayerStep(Mask(), None))
        together = scheme.on_heads(q, k, k, place)
        for got, same in zip((scheme.on_query(q, place), scheme.on_key(k, place), k), together, strict=True):
            # Compiled for other heads, another of the two products may be rounded before they are added.
            torch.testing.assert_close(got, same, rtol=0, atol=EXACT)
        assert launches.call_count == 3

    @pytest.mark.parametrize("name", SCHEMES)
    def test_padding_and_documents(self, name, launches):
        model, ids = build(tiny(name)), tokens(2, COUNT)
        real = torch.arange(COUNT) >= torch.tensor([[0], [4]])
        given = {"attention_mask": real, "document_ids": torch.arange(COUNT).expand(2, -1) // 4}
        got = run(model, ids, **given)
        assert launches.call_count == 4
        with dispatch.force_path("reference"):
            check_same(got, run(model, ids, **given))

    @pytest.mark.parametrize("name", SCHEMES)
    def test_prompts_take_the_kernel_and_steps_do_not(self, name, launches):
        model, ids = build(tiny(name)), tokens(2, COUNT)
        cache = model.new_cache(2, 8)
        with torch.no_grad():
            pieces = [model(ids[:, :3], cache=cache), model(ids[:, 3:5], cache=cache)]
            assert launches.call_count == (0 if name == "grape" else 4)  # whose kernel is that of rotary
            pieces.append(model(ids[:, 5:], cache=cache))
            assert launches.call_count == (0 if name == "grape" else 4)
            with dispatch.force_path("reference"):
                assert relative_change(torch.cat(pieces, 1), model(ids)) < SAME

    @pytest.mark.sample(2)
    @pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
    @pytest.mark.parametrize("name", SCHEMES)
    def test_compiled(self, name, launches):
        torch.compiler.reset()
        model, ids = build(tiny(name, num_layers=1)), tokens(2, COUNT)
        with dispatch.force_path("reference"):
            expected = run(model, ids)
        model.compile(backend="aot_eager", fullgraph=True)
        check_same(run(model, ids), expected)
        assert launches.call_count == 2
        torch.compiler.reset()

    @pytest.mark.parametrize("name", SCHEMES)
    def test_what_only_the_reference_can_do(self, name):
        seq, x = SequenceInfo(torch.arange(5), 9), torch.zeros(1, 5, 32)
        scheme = build(tiny(name)).decoder.position(0)
        with dispatch.force_path("triton"):
            assert scheme.why_not(seq, x) is None
            assert "float64" in scheme.why_not(seq, x.double())
            one = scheme.why_not(SequenceInfo(torch.arange(1), 9), x[:, :1])
            assert (one is None) if name == "grape" else "one token" in one
        assert "GPU" in scheme.why_not(SequenceInfo(torch.arange(5).cpu(), 9), x.cpu())


def test_xpos_leaves_decays_after_a_cache_to_torch():
    """Under a window a cache holds keys without them."""
    model = build(tiny("xpos", attention={"window": 4}))
    scheme, x = model.decoder.position(0), torch.zeros(1, 5, 32)
    with dispatch.force_path("triton"):
        why = scheme.why_not(SequenceInfo(torch.arange(5), 9, cached_window=4), x)
    assert why == "a cache holds keys without the decay"


def test_the_formula_is_that_of_a_rotation():
    """Against complex numbers."""
    phases = torch.tensor([-(2**63), -(2**61) * 3, 5, 2**62 + 2**59]).view(1, 1, 1, 4)
    q = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    got = rope.rope_phases_ref(q, q[:, :, :1], PhaseArgs(phases), "adjacent")[0]
    turned = torch.view_as_complex(q.unflatten(-1, (4, 2))) * torch.exp(2j * math.pi * (phases.double() / 2.0**64))
    assert (got - torch.view_as_real(turned).flatten(-2)).abs().max() < 1e-15
    assert got.device.type == DEVICE.type
