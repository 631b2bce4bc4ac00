"""The kernels of norms against float64 formulas: forward, all gradients, awkward sizes, rounding."""

import itertools

import pytest
import torch
from device import DEVICE
from norm_formulas import EPS, KINDS, SHAPES, formula, gradients, near, to_float64
from references import normal

from phasor import ModelConfig, Transformer
from phasor.config import LayerNormConfig, NoNormConfig, RMSNormConfig
from phasor.nn.norm import RMSNorm, build_norm
from phasor.ops import dispatch
from phasor.ops import norm as ops
from phasor.ops.norm.norm import add_norm_op, norm_op, norm_why_not

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_inputs(shape, kind, dtype=torch.float32, other=None):
    """`x` and `r` with different means, weight and bias; and the flags."""
    centered, offset, weighted, biased = KINDS[kind]
    x = (3 * normal(*shape) + 1).to(dtype).requires_grad_()
    r = normal(*shape, seed=1).to(other or dtype).requires_grad_()
    weight = normal(shape[-1], seed=2).to(dtype).requires_grad_() if weighted else None
    bias = normal(shape[-1], seed=3).to(dtype).requires_grad_() if biased else None
    return x, r, weight, bias, {"eps": EPS, "offset": offset, "centered": centered}


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_its_formula(kind, shape):
    x, _, weight, bias, options = random_inputs(shape, kind)
    with dispatch.force_path("triton"):
        y = ops.norm(x, weight, bias, **options)
        assert y.grad_fn.name().startswith("phasor_norm")
        ours = gradients([y], (x, weight, bias))
    twins = to_float64(x, weight, bias)
    expected = formula(*twins, **options)
    near([y, *ours], [expected, *gradients([expected], twins)], 3e-6)  # some tens of roundings of 6e-8


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_add_norm_is_its_formula(kind, shape):
    x, r, weight, bias, options = random_inputs(shape, kind)
    with dispatch.force_path("triton"):
        outputs = ops.add_norm(x, r, weight, bias, **options)
        ours = gradients(outputs, (x, r, weight, bias))
    tx, tr, tw, tb = to_float64(x, r, weight, bias)
    expected = [tx + tr, formula(tx + tr, tw, tb, **options)]
    near([*outputs, *ours], [*expected, *gradients(expected, (tx, tr, tw, tb))], 3e-6)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_either_output_may_be_without_gradient(kind):
    x, r, weight, bias, options = random_inputs((5, 37), kind)
    for used in (0, 1):
        with dispatch.force_path("triton"):
            output = ops.add_norm(x, r, weight, bias, **options)[used]
            ours = gradients([output], (x, r))
        tx, tr, tw, tb = to_float64(x, r, weight, bias)
        expected = [tx + tr, formula(tx + tr, tw, tb, **options)][used]
        near(ours, gradients([expected], (tx, tr)), 3e-6)


@pytest.mark.parametrize("kind", ["unit offset", "layernorm"])
def test_bfloat16_rounds_once(kind):
    x, r, weight, bias, options = random_inputs((23, 60), kind, torch.bfloat16)
    with dispatch.force_path("triton"):
        s, y = ops.add_norm(x, r, weight, bias, **options)
        dx, dr, by_weight, *_ = gradients([s, y], (x, r, weight, bias))
    # The interpreter cuts off where a GPU rounds, so it is off by a whole unit in the last place, 2^-7 relative.
    true_sum = x.detach().double() + r.detach().double()
    assert ((s.detach().double() - true_sum).abs() <= 2**-7 * true_sum.abs() + 1e-5).all()
    ts, tw, tb = to_float64(s, weight, bias)
    expected = formula(ts, tw, tb, **options)
    assert ((y.detach().double() - expected.detach()).abs() <= 2**-7 * expected.detach().abs() + 1e-5).all()
    ds, true_weight, *_ = gradients([ts * 1.0, expected], (ts, tw, tb))
    assert dx.dtype == by_weight.dtype == torch.bfloat16
    assert torch.equal(dx, dr)
    # the directions that come back are rounded to bfloat16 as well, so each gradient is off by a rounding more
    near([dx, by_weight], [ds, true_weight], 1.5 * 2**-7)


def test_a_float32_stream_takes_bfloat16_branches():
    x, r, weight, _, options = random_inputs((5, 37), "rmsnorm", torch.float32, torch.bfloat16)
    with dispatch.force_path("triton"):
        s, y = ops.add_norm(x, r, weight, None, **options)
        dx, dr = gradients([s, y], (x, r))
    assert (s.dtype, y.dtype, dx.dtype, dr.dtype) == (torch.float32,) * 3 + (torch.bfloat16,)
    assert torch.equal(s, x + r)


def test_autocast_returns_float32_on_both_paths():
    x, _, weight, bias, options = random_inputs((5, 37), "layernorm", torch.bfloat16)
    results = []
    for form in ("reference", "triton"):
        with dispatch.force_path(form), torch.autocast(DEVICE.type, torch.bfloat16):
            results.append(ops.norm(x, weight, bias, **options))
    near([results[1]], [results[0].double()], 2**-7 if results[0].dtype == torch.bfloat16 else 3e-6)
    assert results[1].dtype == torch.float32


def test_non_contiguous_inputs():
    x, r, weight, _, options = random_inputs((5, 3, 37), "rmsnorm")
    with dispatch.force_path("triton"):
        apart = ops.add_norm(
            x.transpose(0, 1), torch.stack((r, r), -1)[..., 0].transpose(0, 1), weight, None, **options
        )
        together = ops.add_norm(x, r, weight, None, **options)
    for a, b in zip(apart, together, strict=True):
        assert torch.equal(a.transpose(0, 1), b)


def test_weights_of_several_dtypes():
    x, _, weight, bias, options = random_inputs((5, 37), "layernorm")
    bias = bias.detach().bfloat16().requires_grad_()
    with dispatch.force_path("triton"):
        ours = gradients([ops.norm(x, weight, bias, **options)], (weight, bias))
    twins = to_float64(x, weight, bias)
    assert [g.dtype for g in ours] == [torch.float32, torch.bfloat16]
    expected = gradients([formula(*twins, **options)], twins[1:])
    near(ours[:1], expected[:1], 3e-6)
    near(ours[1:], expected[1:], 2**-8)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's RMSNorm
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_computes_norms_with_weights_of_any_dtype(dtype, kind):
    """Weight and bias of every dtype, alone and together; the norm is in the dtype of `x`."""
    x, _, _, _, options = random_inputs((5, 37), kind, dtype)
    weight, bias = normal(37, seed=2), normal(37, seed=3)
    for weight_dtype, bias_dtype in itertools.product([None, *DTYPES], repeat=2):
        w = None if weight_dtype is None else weight.to(weight_dtype)
        b = None if bias_dtype is None else bias.to(bias_dtype)
        with dispatch.force_path("reference"):
            y = ops.norm(x, w, b, **options)
            total, after = ops.add_norm(x, torch.zeros_like(x), w, b, **options)
        assert y.dtype == after.dtype == dtype
        assert torch.equal(total, x)
        assert torch.equal(y, after)
        near([y], [formula(*to_float64(x, w, b), **options)], max(3e-6, torch.finfo(dtype).eps))


def test_the_gradient_of_weights_is_the_same_each_time():
    x, _, weight, _, options = random_inputs((23, 37), "rmsnorm")
    with dispatch.force_path("triton"):
        both = [gradients([ops.norm(x, weight, None, **options)], (x, weight)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "layernorm without weights"])
def test_they_are_well_behaved_ops(kind):
    x, r, weight, bias, options = random_inputs((4, 5), kind)
    rest = (options["eps"], options["offset"], options["centered"], torch.float32)
    torch.library.opcheck(norm_op.op, (x, weight, bias, *rest))
    torch.library.opcheck(add_norm_op.op, (x, r, weight, bias, *rest))


def test_why_a_norm_takes_its_reference():
    x, _, weight, _, _ = random_inputs((5, 37), "rmsnorm")
    assert norm_why_not(x.cpu(), weight, None) == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert norm_why_not(x, weight, None) is None
        assert norm_why_not(x.double(), weight, None) == "float64 has no kernel"
        assert norm_why_not(x, weight.expand(2, -1), None) == "each head has its own weights"
        assert "wider than 16384" in str(norm_why_not(x.new_empty(1, 16385), None, None))


@pytest.mark.parametrize(
    "config", [RMSNormConfig(), RMSNormConfig(unit_offset=True), LayerNormConfig(), NoNormConfig()]
)
def test_the_module_has_add_norm(config):
    norm, x, r = build_norm(config, 37), normal(5, 37), normal(5, 37, seed=1)
    norm.double()
    s, y = norm.add_norm(x, r)
    assert torch.equal(s, x + r)
    assert torch.equal(y, norm(x + r))
    other = build_norm(config, 37).double()
    for weight in other.parameters():
        torch.nn.init.normal_(weight)
    s, y = norm.norm_add_norm(x, r, other)
    assert torch.equal(s, x + norm(r))
    assert torch.equal(y, other(s))
    assert torch.equal(norm.norm_add(x, r), s)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_forward_hook", "forward"])
def test_hooks_of_norms_run(hook):
    calls, x, r = [], normal(5, 37, dtype=torch.float32).requires_grad_(), normal(5, 37, dtype=torch.float32)
    norm, other = (build_norm(RMSNormConfig(), 37) for _ in range(2))
    for part in (norm, other):
        if hook == "forward":
            part.forward = lambda x, part=part: (calls.append(1), RMSNorm.forward(part, x))[1]
        else:
            getattr(part, hook)(lambda *_: calls.append(1))
    sum(norm.add_norm(x, r)).sum().backward()
    assert len(calls) == 1
    norm.norm_add(r, x).sum().backward()
    assert len(calls) == 2
    sum(norm.norm_add_norm(x, x, other)).sum().backward()
    assert len(calls) == 4


def test_norms_that_differ_are_not_fused():
    x, r = normal(5, 37), normal(5, 37, seed=1)
    norm = build_norm(RMSNormConfig(), 37).double()
    for config in (RMSNormConfig(eps=0.1), RMSNormConfig(unit_offset=True), LayerNormConfig(), NoNormConfig()):
        other = build_norm(config, 37).double()
        s, y = norm.norm_add_norm(x, r, other)
        assert torch.equal(s, x + norm(r))
        assert torch.equal(y, other(s))


def test_a_model_is_the_same_with_kernels():
    config = ModelConfig(
        vocab_size=31,
        dim=24,
        num_heads=3,
        num_layers=2,
        position="rotary",
        norm="rmsnorm",
        feedforward={"activation": "swiglu"},
    )
    torch.manual_seed(1)
    model, tokens = Transformer(config), torch.randint(0, 31, (2, 9))
    results = []
    for form in ("reference", "triton"):
        with dispatch.force_path(form):
            logits = model(tokens)
            results.append((logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), model.parameters())))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-5)  # float32 through two layers


def test_non_contiguous_weights():
    x, both = normal(5, 12).float(), normal(12, 2).float().requires_grad_()
    for weight in (both[:, 1], both[0, :1].expand(12)):
        with dispatch.force_path("triton"):
            y = ops.norm(x, weight, weight, eps=1e-6, centered=True)
        ours, theirs = (gradients([z], [both])[0] for z in (y, ops.norm_ref(x, weight, weight, 1e-6, 0.0, True)))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_torch_func_gets_the_reference():
    x, weight = normal(3, 5, 12).float(), normal(12).float()

    def loss(row):
        return ops.norm(row, weight, None, eps=1e-6).sin().sum()

    expected = torch.func.vmap(torch.func.grad(loss))(x)
    with dispatch.force_path("triton"):
        assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x), expected)
