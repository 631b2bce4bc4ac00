"""The kernels of magnitudes with phases: against their formula in float64, with gradients of what is learned.

They run on the CPU through Triton's interpreter.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from schemes import build, relative_change, tiny, tokens
from torch import Tensor

from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch
from phasor.ops.polar import PolarArgs, polar_features, polar_features_ref
from phasor.ops.polar.polar import polar_op

kernels = pytest.importorskip("phasor.ops.polar.kernels")

EXACT = 1e-6  # relative to the largest, in float32
SAME = 2e-5  # relative, float32: two layers of a model after that

# Rows, tokens, groups of heads, heads in a group (0 where heads have one dimension), features; rows of phases.
SIZES = {"by group": (2, 5, 2, 2, 16, 2), "shared": (2, 300, 3, 0, 10, 1), "one": (1, 7, 1, 5, 4, 1)}


def random_args(sizes: tuple[int, ...], shifted: bool) -> PolarArgs:
    _, count, groups, _, head_dim, phase_rows = sizes
    phases = torch.randint(-(2**63), 2**63 - 1, (phase_rows, count, head_dim))
    if not shifted:
        return PolarArgs(phases)
    shifts = torch.randint(-(2**63), 2**63 - 1, (groups, head_dim))
    return PolarArgs(phases, shifts, torch.zeros(groups, head_dim, requires_grad=True))


def random_heads(sizes: tuple[int, ...]) -> Tensor:
    rows, count, groups, in_group, head_dim, _ = sizes
    return torch.randn(rows, count, groups, *([in_group] if in_group else []), head_dim)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_first_and_second_derivatives(sizes, shifted, positive):
    args, x = random_args(sizes, shifted), random_heads(sizes) * 3
    exact = args if args.radians is None else args._replace(radians=args.radians.detach().double().requires_grad_())
    results = []
    for own, learned in ((x.requires_grad_(), args), (x.detach().double().requires_grad_(), exact)):
        features = polar_features if learned is args else polar_features_ref
        wanted = [own, *([] if learned.radians is None else [learned.radians])]
        y = features(own, learned, positive=positive)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype).requires_grad_()
        once = torch.autograd.grad(y, wanted, weights, retain_graph=True)
        first = torch.autograd.grad(y, wanted, weights, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [weights])
        results.append([y, *once, *first, *second])
    for got, true in zip(*results, strict=True):
        assert relative_change(got, true) < EXACT


def test_softplus_of_any_number():
    """Exact relative to itself where it is far below 1, as `log(1 + exp(x))` is not."""
    x = torch.cat((torch.linspace(-80, 80, 999), torch.tensor([0.0, -0.0, 1e-6, -1e4, 1e4])))[None, None, None]
    got = polar_features(x, PolarArgs(torch.zeros(1, 1, x.shape[-1], dtype=torch.int64)), positive=False)
    true = torch.nn.functional.softplus(x.double(), threshold=1e9)
    magnitudes, sines = got.chunk(2, dim=-1)
    assert ((magnitudes - true).abs() <= 1e-5 * true + 1e-38).all()
    assert sines.abs().max() == 0


def test_any_layout():
    """Inputs and gradients with heads before tokens, or features apart; heads inside a projection."""
    sizes = SIZES["by group"]
    args, x = random_args(sizes, shifted=True), random_heads(sizes)
    direction = torch.randn(2, 5, 4, 32)

    def grads(x: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = polar_features(x, args, positive=False)
        return y, *torch.autograd.grad(y, (x, args.radians), direction)

    expected = grads(x, direction)
    for layout in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        assert all(torch.equal(a, b) for a, b in zip(grads(layout(x), layout(direction)), expected, strict=True))
    inside = torch.cat((x, x, x), dim=3)[:, :, :, 2:4]
    assert all(torch.equal(a, b) for a, b in zip(grads(inside, direction), expected, strict=True))


def test_half_precision_is_rounded_once():
    sizes = SIZES["by group"]
    args, x = random_args(sizes, shifted=True), random_heads(sizes).bfloat16().requires_grad_()
    y = polar_features(x, args, positive=False)
    dx, dshift = torch.autograd.grad(y, (x, args.radians), y)
    assert y.dtype == dx.dtype == torch.bfloat16
    assert dshift.dtype == torch.float32
    # The interpreter rounds towards zero.
    assert relative_change(y, polar_features_ref(x.detach().double(), args, positive=False)) < 2**-7
    soft = torch.nn.functional.softplus(x.detach().double())
    assert relative_change(dx.flatten(2, -2), (soft * x.detach().double().sigmoid()).flatten(2, -2)) < 2**-6


def test_no_tokens():
    x = torch.randn(0, 3, 4, 16, requires_grad=True)
    args = random_args((0, 3, 4, 0, 16, 1), shifted=True)
    y = polar_features(x, args, positive=False)
    assert y.shape == (0, 3, 4, 32)
    dx, dshift = torch.autograd.grad(y.sum(), (x, args.radians))
    assert dx.shape == x.shape
    assert dshift.abs().max() == 0


def test_operator_is_well_formed():
    sizes = SIZES["by group"]
    torch.library.opcheck(polar_op.op, (random_heads(sizes).requires_grad_(), *random_args(sizes, shifted=True), False))


NAMES = "polar_forward", "polar_backward"
COUNT = 6  # tokens per row


@pytest.fixture
def launches():
    """The launches of both kernels, which still run."""
    spies = [mock.patch.object(kernels, name, wraps=getattr(kernels, name)) for name in NAMES]
    with spies[0] as forward, spies[1] as backward, dispatch.force_path("triton"):
        yield lambda: (forward.call_count, backward.call_count)


def run(model, *args, **given) -> list[Tensor]:
    """Logits of real tokens, and the gradients of all weights."""
    model.zero_grad()
    logits = model(*args, **given)
    if "attention_mask" in given:
        logits = logits[given["attention_mask"]]
    logits.logsumexp(-1).mean().backward()
    return [logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def pope(**changes):
    model = build(tiny("pope", **changes))
    with torch.no_grad():
        for shift in model.decoder.position(0).shift:
            shift.uniform_(-7.0, 1.0)  # beyond both ends
    return model


class TestModels:
    """Logits and all gradients are those of the reference, with two launches each way in two layers."""

    @pytest.mark.parametrize(
        "view", [{}, {"attention": {"qk_norm": "head", "window": 3}}, {"num_kv_heads": 1}], ids=str
    )
    def test_logits_and_gradients(self, view, launches):
        model, ids = pope(**view), tokens(2, COUNT)
        positions = torch.arange(COUNT) + torch.tensor([[70], [5]])
        got = run(model, ids, positions=positions)
        assert launches() == (4, 4)
        with dispatch.force_path("reference"):
            for a, b in zip(got, run(model, ids, positions=positions), strict=True):
                assert relative_change(a, b) < SAME
        assert launches() == (4, 4)

    def test_padding_and_documents(self, launches):
        model, ids = pope(), tokens(2, COUNT)
        real = torch.arange(COUNT) >= torch.tensor([[0], [4]])
        given = {"attention_mask": real, "document_ids": torch.arange(COUNT).expand(2, -1) // 4}
        got = run(model, ids, **given)
        assert launches() == (4, 4)
        with dispatch.force_path("reference"):
            for a, b in zip(got, run(model, ids, **given), strict=True):
                assert relative_change(a, b) < SAME

    def test_prompts_take_the_kernel_and_steps_do_not(self, launches):
        model, ids = pope(), tokens(2, COUNT)
        cache = model.new_cache(2, 8)
        with torch.no_grad():
            pieces = [model(ids[:, :3], cache=cache), model(ids[:, 3:5], cache=cache)]
            assert launches() == (8, 0)
            pieces.append(model(ids[:, 5:], cache=cache))
            assert launches() == (8, 0)
            with dispatch.force_path("reference"):
                assert relative_change(torch.cat(pieces, 1), model(ids)) < SAME

    @pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
    def test_compiled(self, launches):
        torch.compiler.reset()
        model, ids = pope(num_layers=1), tokens(2, COUNT)
        with dispatch.force_path("reference"):
            expected = run(model, ids)
        model.compile(backend="aot_eager", fullgraph=True)
        for a, b in zip(run(model, ids), expected, strict=True):
            assert relative_change(a, b) < SAME
        assert launches() == (2, 2)
        torch.compiler.reset()

    def test_what_only_the_reference_can_do(self):
        scheme, seq, x = pope().decoder.position(0), SequenceInfo(torch.arange(5), 9), torch.zeros(1, 5, 32)
        with dispatch.force_path("triton"):
            assert scheme.why_not(seq, x) is None
            assert "float64" in scheme.why_not(seq, x.double())
            assert "one token" in scheme.why_not(SequenceInfo(torch.arange(1), 9), x[:, :1])
        assert "GPU" in scheme.why_not(seq, x.cpu())
