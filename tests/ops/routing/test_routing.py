"""Routing by kernels: the order of a stable sort, weights and gradients against float64, at all sizes."""

import math

import pytest
import torch
from references import normal

from phasor.config import ExpertsConfig, SwiGLUClampedConfig
from phasor.nn.feed_forward import activate
from phasor.nn.moe import balancing_loss
from phasor.ops import dispatch
from phasor.ops.routing import KernelRouting, SortedRouting, group_by_expert, grouped_experts_op, kernels, route
from phasor.ops.routing.kernels import expert_sums, sort_choices
from phasor.ops.routing.routing import (
    add_bias_op,
    clamped_swiglu_op,
    combine_op,
    gather_op,
    kernels_why_not,
    sort_choices_op,
)

# tokens, experts, top_k
SIZES = [(1, 4, 1), (1, 8, 8), (2, 5, 5), (63, 8, 2), (129, 4, 3), (300, 60, 4), (257, 128, 8), (70, 6, 6)]
# tokens, experts, top_k, dim
SMALL_SIZES = [(1, 4, 1, 8), (1, 8, 8, 3), (2, 5, 5, 40), (23, 8, 2, 17), (11, 128, 8, 12)]
# Sums of up to 8 products of numbers near 1 in float32.
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def softmax_router(experts, top_k, normalize=True):
    return ExpertsConfig(num_experts=experts, top_k=top_k, normalize=normalize)


def stable_order(logits, top_k):
    """The choices of every token, those with equal logits in order, and which rows they become."""
    chosen = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    order = chosen.flatten().argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order))
    counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1])
    return chosen, rows.view_as(chosen), counts.cumsum(0)


@pytest.mark.sample(10)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "softmax"])
@pytest.mark.parametrize(("count", "experts", "top_k"), SIZES)
def test_choices_are_sorted_as_by_a_stable_sort(count, experts, top_k, normalize):
    logits = normal(count, experts).float()
    weights, rows, ends = sort_choices(logits, top_k, normalize)
    chosen, expected, expected_ends = stable_order(logits, top_k)
    assert torch.equal(rows.long(), expected)
    assert torch.equal(ends.long(), expected_ends)
    wide, reference = route(logits.double(), softmax_router(experts, top_k, normalize))
    assert torch.equal(reference, chosen)
    torch.testing.assert_close(weights.double(), wide, rtol=1e-5, atol=1e-7)  # a GPU approximates exponentials


@pytest.mark.parametrize(("block_m", "chunks"), [(16, 1), (16, 3), (32, 2), (8, 100)])
def test_the_order_does_not_depend_on_how_tokens_are_cut(block_m, chunks):
    logits = normal(250, 7).float()
    _, expected, expected_ends = stable_order(logits, 3)
    _, rows, ends = sort_choices(logits, 3, True, block_m, chunks)
    assert torch.equal(rows.long(), expected)
    assert torch.equal(ends.long(), expected_ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_logits_the_first_are_chosen(dtype):
    logits = torch.randint(-1, 2, (90, 9)).to(dtype)
    _, rows, ends = sort_choices(logits, 4, True)
    _, expected, expected_ends = stable_order(logits, 4)
    assert torch.equal(rows.long(), expected)
    assert torch.equal(ends.long(), expected_ends)


def test_experts_without_tokens():
    logits = normal(50, 6).float()
    logits[:, [0, 3, 5]] = -30.0
    _, rows, ends = sort_choices(logits, 2, True)
    assert torch.equal(rows.long(), stable_order(logits, 2)[1])
    assert ends.diff(prepend=ends.new_zeros(1))[[0, 3, 5]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_choose_experts_that_exist(value):
    logits = torch.full((3, 5), value)
    _, rows, ends = sort_choices(logits, 2, True)
    assert sorted(rows.flatten().tolist()) == list(range(6))
    assert ends.tolist() == [3, 6, 6, 6, 6]


def layer(kind, x, logits, scale, up_bias, down_bias, top_k, normalize):
    """A mixture whose experts multiply elementwise, and its routing."""
    routing = kind(x, logits, softmax_router(logits.shape[1], top_k, normalize), None, 0, logits.shape[1])
    row = torch.arange(len(x) * top_k)
    expert = torch.bucketize(row, routing.ends, right=True)
    hidden = routing.add_bias(routing.gather(x) * scale[expert], up_bias)
    return routing.combine(hidden * hidden, down_bias)


@pytest.mark.sample(6)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "softmax"])
@pytest.mark.parametrize(("count", "experts", "top_k", "dim"), SMALL_SIZES)
def test_it_is_its_reference_with_its_gradients(count, experts, top_k, dim, normalize, bias):
    shapes = [(count, dim), (count, experts), (experts, dim), (experts, dim), (experts, dim)]
    inputs = [normal(*shape, seed=i).float().requires_grad_() for i, shape in enumerate(shapes)]
    twins = [x.detach().double().requires_grad_() for x in inputs]
    upstream = normal(count, dim, seed=9)
    results = []
    for kind, given in ((KernelRouting, inputs), (SortedRouting, twins)):
        used = given if bias else [*given[:3], None, None]
        y = layer(kind, *used, top_k, normalize)
        wanted = [x for x in used if x is not None]
        results.append((y, *torch.autograd.grad((y.double() * upstream).sum(), wanted)))
    for ours, theirs in zip(*results, strict=True):
        scale = max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours.double() / scale, theirs / scale, **SINGLE)


def test_rows_wider_than_a_block():
    x, logits = normal(3, 2500).float().requires_grad_(), normal(3, 4, seed=1).float().requires_grad_()
    results = []
    for kind in (KernelRouting, SortedRouting):
        routing = kind(x, logits, softmax_router(4, 2), None, 0, 4)
        y = routing.combine(routing.gather(x).sin(), normal(4, 2500, seed=2).float())
        results.append((y, *torch.autograd.grad(y.square().mean(), (x, logits))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **SINGLE)


def test_bfloat16_rounds_once():
    x, logits = normal(20, 24).bfloat16(), normal(20, 6, seed=1).bfloat16()
    routing, wide = (
        KernelRouting(x, logits, softmax_router(6, 3), None, 0, 6),
        SortedRouting(x.double(), logits.double(), softmax_router(6, 3), None, 0, 6),
    )
    rows = routing.gather(x)
    assert torch.equal(rows.double(), wide.gather(x.double()))
    y, expected = routing.combine(rows, None), wide.combine(rows.double(), None)
    assert y.dtype == torch.bfloat16
    # The interpreter cuts off where a GPU rounds, so it is off by a whole unit in the last place, 2^-7 relative.
    assert ((y.double() - expected).abs() <= 2**-7 * expected.abs() + 1e-6).all()


def test_non_contiguous_inputs():
    x, logits = normal(9, 30).float().t(), normal(5, 30, seed=1).float().t()
    ours, theirs = (kind(x, logits, softmax_router(5, 2), None, 0, 5) for kind in (KernelRouting, SortedRouting))
    rows = ours.gather(x)
    assert torch.equal(rows, theirs.gather(x))
    torch.testing.assert_close(ours.combine(rows.t().contiguous().t(), None), theirs.combine(rows, None), **SINGLE)
    x = x.clone().requires_grad_()
    y = ours.combine(ours.gather(x), None)
    (gradient,) = torch.autograd.grad(y.sum(), x)  # of an expanded scalar
    torch.testing.assert_close(gradient, torch.ones_like(x), **SINGLE)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("width", [1, 9, 40])
def test_clamped_swiglu_is_its_formula(width, with_bias):
    activation = SwiGLUClampedConfig(limit=2.0, gain=1.5)
    x = (3 * normal(9, 2 * width)).float().requires_grad_()
    bias = normal(3, 2 * width, seed=1).float().requires_grad_() if with_bias else None
    ends, expert = torch.tensor([5, 5, 9], dtype=torch.int32), torch.tensor([0] * 5 + [2] * 4)
    upstream = normal(9, width, seed=2)
    inputs = [t for t in (x, bias) if t is not None]
    y = clamped_swiglu_op(x, bias, ends, activation.limit, activation.gain)
    ours = y, *torch.autograd.grad((y.double() * upstream).sum(), inputs)
    twins = [t.detach().double().requires_grad_() for t in inputs]
    expected = activate(twins[0] + twins[1][expert] if with_bias else twins[0], activation)
    theirs = expected, *torch.autograd.grad((expected * upstream).sum(), twins)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, **SINGLE)


@pytest.mark.parametrize("counts", [(3, 0, 200, 1), (0, 0, 0, 5)], ids=str)
def test_sums_of_the_rows_of_experts(counts):
    x, ends = normal(sum(counts), 70).float(), torch.tensor(counts).cumsum(0).int()
    expected = torch.stack([part.sum(0) for part in x.double().split(counts)])
    torch.testing.assert_close(expert_sums(x, ends, torch.float32).double(), expected, **SINGLE)


def test_frozen_parts_get_no_gradient():
    x, logits, bias = normal(7, 6).float().requires_grad_(), normal(7, 4).float(), normal(4, 6).float()
    routing = KernelRouting(x, logits, softmax_router(4, 2), None, 0, 4)
    y = routing.combine(routing.add_bias(routing.gather(x), bias), bias)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(x), **SINGLE)
    with torch.no_grad():
        assert routing.combine(routing.gather(x), None).grad_fn is None


def test_they_are_well_behaved_ops():
    x, logits, bias = normal(6, 8).float(), normal(6, 4, seed=1).float(), normal(4, 8, seed=2).float()
    weights, rows, ends = sort_choices(logits, 2, True)
    torch.library.opcheck(sort_choices_op.op, (logits, 2, True))
    torch.library.opcheck(gather_op.op, (x.requires_grad_(), rows))
    chosen = normal(12, 8, seed=3).float().requires_grad_()
    torch.library.opcheck(add_bias_op.op, (chosen, bias.requires_grad_(), ends))
    wide = normal(12, 16, seed=4).float().requires_grad_()
    wide_bias = normal(4, 16, seed=5).float().requires_grad_()
    torch.library.opcheck(clamped_swiglu_op.op, (wide, wide_bias, ends, 1.0, 1.5))
    for activation, biases in (("swiglu", (None, None)), ("swiglu-clamped", (wide_bias, bias))):
        up, down = (normal(4, *shape).float().requires_grad_() for shape in ((8, 16), (8, 8)))
        args = x, logits.requires_grad_(), up, down, *biases, 2, True, activation, 1.0, 1.5
        torch.library.opcheck(grouped_experts_op.op, args)
    for given in (None, bias):
        args = chosen, given, logits.requires_grad_(), weights, rows, ends, True
        torch.library.opcheck(combine_op.op, args)


def test_why_it_takes_its_reference():
    x, logits, router = normal(3, 8).float(), normal(3, 4).float(), softmax_router(4, 2)
    assert kernels_why_not(x.cpu(), logits.cpu(), router, None, 0, 4) == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert kernels_why_not(x, logits, router, None, 0, 4) is None
        assert isinstance(group_by_expert(x, logits, router), KernelRouting)
        assert kernels_why_not(x, logits, router, None, 2, 2) == "other processes hold some of the experts"
        assert kernels_why_not(x.double(), logits, router, None, 0, 4) == "float64 has no kernel"
        assert kernels_why_not(x[:0], logits[:0], router, None, 0, 4) == "there are no tokens"
        wide = "there are more than 1024 experts, or 32 of a token"
        assert kernels_why_not(x, normal(3, 1025).float(), softmax_router(1025, 2), None, 0, 1025) == wide
        reasons = []

        @torch.compile(fullgraph=True, backend="eager")
        def compile_routing(x, logits):
            reasons.append(kernels_why_not(x, logits, router, None, 0, 4))
            return group_by_expert(x, logits, router).gather(x)

        torch.testing.assert_close(compile_routing(x, logits), group_by_expert(x, logits, router).gather(x))
        gradient = torch.func.grad(lambda x: group_by_expert(x, logits, router).gather(x).square().sum())(x)
        torch.testing.assert_close(gradient, 4 * x)
    assert reasons == [None]


def test_the_same_bits_each_time():
    x, logits = normal(40, 32).float().requires_grad_(), normal(40, 8).float().requires_grad_()
    runs = []
    for _ in range(2):
        routing = KernelRouting(x, logits, softmax_router(8, 2), None, 0, 8)
        y = routing.combine(routing.gather(x).sin(), None)
        runs.append((y, *torch.autograd.grad(y.square().sum(), (x, logits))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(("count", "experts", "top_k"), [(1, 4, 1), (63, 5, 2), (300, 60, 4)])
def test_the_balancing_loss_is_that_of_transformers_with_its_gradient(count, experts, top_k, by_kernels):
    """By kernels and by torch, with tokens that do not count; ours is the mean over layers of theirs of one layer."""
    theirs = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    layers = [normal(1, count, experts, seed=seed).float().requires_grad_() for seed in range(3)]
    for real in (None, torch.arange(count)[None] >= count // 3):
        expected = sum(theirs((x.double().flatten(0, 1),), experts, top_k, real) for x in layers) / len(layers)
        with dispatch.force_path("triton" if by_kernels else "reference"):
            ours = balancing_loss(layers, top_k, attention_mask=real)
        torch.testing.assert_close(ours, expected, check_dtype=False, **SINGLE)
        grads = (torch.autograd.grad(x, layers) for x in (ours, expected))
        for got, right in zip(*grads, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


def test_all_layers_of_a_balancing_loss_are_one_launch_in_each_direction(monkeypatch):
    launched = []
    for name in ("launch_loads", "launch_loads_backward"):
        launch = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, launch=launch, **k: (launched.append(1), launch(*a, **k)))
    layers = [normal(2, 7, 6, seed=seed).float().requires_grad_() for seed in range(5)]
    with dispatch.force_path("triton"):
        balancing_loss(layers, 2).backward()
    assert len(launched) == 2
