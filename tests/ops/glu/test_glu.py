"""The GLU kernels against float64 formulas: forward, gradient, awkward sizes, rounding."""

import math

import pytest
import torch
from device import DEVICE
from references import normal

from phasor.config import FeedForwardConfig
from phasor.nn.feed_forward import FeedForward
from phasor.ops import dispatch
from phasor.ops import glu as ops
from phasor.ops.glu.glu import glu_linear_op, glu_op, glu_why_not


def formula(x, activation):
    g, u = x.chunk(2, dim=-1)
    sigmoid = 1 / (1 + torch.exp(-g))
    inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return (
        u
        * {
            "glu": sigmoid,
            "reglu": g * (g > 0),
            "swiglu": g * sigmoid,
            "geglu": g * 0.5 * (1 + torch.erf(g / math.sqrt(2))),
            "geglu-tanh": g * 0.5 * (1 + torch.tanh(inner)),
        }[activation]
    )


def run(x, activation):
    with dispatch.force_path("triton"):
        y = ops.glu(x, activation)
        assert y.grad_fn.name().startswith("phasor_glu")
        (gradient,) = torch.autograd.grad((y.double() * normal(*y.shape, seed=9)).sum(), x)
    twin = x.detach().double().requires_grad_()
    expected = formula(twin, activation)
    (true_gradient,) = torch.autograd.grad((expected * normal(*y.shape, seed=9)).sum(), twin)
    return (y, expected), (gradient, true_gradient)


@pytest.mark.parametrize("shape", [(1, 2), (5, 3, 74), (2, 2 * 1030), (0, 6)], ids=str)
@pytest.mark.parametrize("activation", ops.GLU_ACTIVATIONS)
def test_it_is_its_formula(activation, shape):
    x = (4 * normal(*shape)).float().requires_grad_()
    for ours, expected in run(x, activation):
        # values of up to some tens in float32
        torch.testing.assert_close(ours.detach().double(), expected.detach(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("activation", ops.GLU_ACTIVATIONS)
def test_bfloat16_rounds_once(activation):
    x = (4 * normal(23, 60)).bfloat16().requires_grad_()
    (y, expected), (gradient, true_gradient) = run(x, activation)
    assert y.dtype == gradient.dtype == torch.bfloat16
    # The interpreter cuts off where a GPU rounds, so it is off by a whole unit in the last place, 2^-7 relative.
    assert ((y.detach().double() - expected.detach()).abs() <= 2**-7 * expected.detach().abs() + 1e-5).all()
    # the direction is rounded to nearest before
    assert ((gradient.double() - true_gradient).abs() <= 1.5 * 2**-7 * true_gradient.abs() + 1e-5).all()


@pytest.mark.parametrize("activation", ops.GLU_ACTIVATIONS)
def test_large_gates_are_finite(activation):
    x = torch.tensor([[-200.0, -90.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0]], requires_grad=True)
    for ours, expected in run(x, activation):
        torch.testing.assert_close(ours.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)


def test_non_contiguous_inputs():
    x = normal(3, 5, 8).float()
    with dispatch.force_path("triton"):
        assert torch.equal(ops.glu(x.transpose(0, 1), "swiglu"), ops.glu(x, "swiglu").transpose(0, 1))


def test_it_is_a_well_behaved_op():
    torch.library.opcheck(glu_op.op, (normal(4, 6).float().requires_grad_(), "swiglu"))


def test_why_it_takes_its_reference():
    x = normal(3, 8).float()
    assert glu_why_not(x.cpu(), "swiglu") == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert glu_why_not(x, "swiglu") is None
        assert glu_why_not(x, "swiglu-clamped") == "'swiglu-clamped' has no kernel"
        reasons = []

        @torch.compile(fullgraph=True, backend="eager")
        def compile_glu(x):
            reasons.append(glu_why_not(x, "swiglu"))
            return ops.glu(x, "swiglu")

        compile_glu(x)
    assert reasons == ["the compiler fuses the reference with the operations around it"]


@pytest.mark.parametrize("activation", ops.GLU_ACTIVATIONS)
def test_glu_linear_saves_only_its_inputs(activation):
    x, weight = (3 * normal(2, 5, 26)).float().requires_grad_(), normal(7, 13).float().requires_grad_()
    upstream = normal(2, 5, 7)
    with dispatch.force_path("triton"):
        y = ops.glu_linear(x, weight, activation)
        saved = [x.shape for x in y.grad_fn.saved_tensors]
        ours = torch.autograd.grad((y.double() * upstream).sum(), (x, weight))
    assert saved == [x.shape, weight.shape]
    twins = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = formula(twins[0], activation) @ twins[1].T
    torch.testing.assert_close(y.detach().double(), expected.detach(), rtol=1e-5, atol=2e-5)
    for mine, theirs in zip(ours, torch.autograd.grad((expected * upstream).sum(), twins), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=3e-5)


def test_glu_linear_is_a_well_behaved_op_that_compiles():
    x, weight = normal(4, 12).float().requires_grad_(), normal(5, 6).float().requires_grad_()
    torch.library.opcheck(glu_linear_op.op, (x, weight, "swiglu"))
    with dispatch.force_path("triton"):
        compiled = torch.compile(ops.glu_linear, backend="aot_eager", fullgraph=True)(x, weight, "swiglu")
        torch.testing.assert_close(compiled, ops.glu_linear(x, weight, "swiglu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_sets_the_dtype_of_the_projection(dtype):
    results = []
    for form in ("triton", "reference"):
        x = normal(5, 12).to(dtype).requires_grad_()
        weight = normal(3, 6, seed=1).float().requires_grad_()
        with dispatch.force_path(form), torch.autocast(DEVICE.type, torch.bfloat16):
            y = ops.glu_linear(x, weight, "swiglu")
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        results.append((y, x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=6e-2)  # bfloat16, which the interpreter cuts off


def test_a_frozen_projection_gets_no_gradient():
    x, weight = normal(5, 12).float().requires_grad_(), normal(3, 6, seed=1).float()
    with dispatch.force_path("triton"):
        y = ops.glu_linear(x, weight, "swiglu")
        assert y.grad_fn.name().startswith("phasor_glu_linear")
        (ours,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad((ops.glu_ref(x, "swiglu") @ weight.T).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_forward_hook", "forward"])
def test_hooks_of_the_projection_run(hook):
    network, seen = FeedForward(FeedForwardConfig(activation="swiglu"), 4, 6), []
    down = network.down
    if hook == "forward":
        old = down.forward
        down.forward = lambda x: seen.append(x) or old(x)
    else:
        getattr(down, hook)(lambda *_: seen.append(1))
    network(normal(2, 4).float().requires_grad_()).sum().backward()
    assert len(seen) == 1


def test_torch_func_gets_the_reference():
    x, weight = normal(3, 5, 12).float(), normal(3, 6, seed=1).float()

    def loss(row):
        return ops.glu_linear(row, weight, "swiglu").sum() + ops.glu(row, "geglu").sum()

    expected = torch.func.vmap(torch.func.grad(loss))(x)
    with dispatch.force_path("triton"):
        assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x), expected)
