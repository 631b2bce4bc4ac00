"""A CustomOp is the same to a compiler, a torch mode, a tensor subclass and in eager mode."""

from typing import NamedTuple

import pytest
import torch
from device import DEVICE
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import phasor
from phasor.ops import dispatch
from phasor.ops.cross_entropy import linear_cross_entropy
from phasor.ops.custom_op import custom_op, needs_dispatcher, save_record, saved_record
from phasor.ops.glu import glu
from phasor.ops.norm import add_norm, norm, norm_add, norm_add_norm


@custom_op("phasor_tests::cube")
def cube(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return by * x**3, x.square()


@cube.register_fake
def _(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@custom_op("phasor_tests::slope")
def slope(grad: Tensor, x: Tensor, by: float) -> Tensor:
    assert grad.data_ptr() % 4 == 0  # it has memory, as a kernel needs
    return 3 * by * x * x * grad


@slope.register_fake
def _(grad: Tensor, x: Tensor, by: float) -> Tensor:
    return torch.empty_like(grad)


class Curve(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    power: int


@custom_op("phasor_tests::curve")
def curve(x: Tensor, args: Curve, by: float) -> Tensor:
    return by * args.weight * x**args.power + (0 if args.bias is None else args.bias)


@curve.register_fake
def _(x: Tensor, args: Curve, by: float) -> Tensor:
    return torch.empty_like(x * args.weight)


def setup_curve(ctx, inputs, output):
    save_record(ctx, inputs.args, inputs.x)
    ctx.by = inputs.by


def curve_backward(ctx, grad):
    args, x = saved_record(ctx)
    assert isinstance(args, Curve)
    dbias = grad.clone() if curve.needs_grad(ctx, "bias") else None
    return {"weight": grad * ctx.by * x**args.power, "bias": dbias}


curve.register_autograd(curve_backward, setup_context=setup_curve)


def setup_context(ctx, inputs, output):
    ctx.by = inputs.by
    ctx.save_for_backward(inputs.x)
    ctx.mark_non_differentiable(output[1])


cube.register_autograd(lambda ctx, grad, _: {"x": slope(grad, *ctx.saved_tensors, ctx.by)}, setup_context=setup_context)


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def value_and_gradient(x):
    (y, square) = cube(x, 0.5)
    assert not square.requires_grad
    return y, torch.autograd.grad(y.sum(), x)[0]


@pytest.fixture
def x():
    return torch.tensor([1.0, 2.0, -3.0], requires_grad=True)


def test_eager_code_calls_it_directly(x):
    y, grad = value_and_gradient(x)
    assert y.tolist() == [0.5, 4.0, -13.5]
    assert grad.tolist() == [1.5, 6.0, 13.5]
    assert y.grad_fn.name() == "phasor_tests_cubeBackward"
    assert cube(x.detach(), 0.5)[0].grad_fn is None


def test_a_mode_sees_it(x):
    with Watch() as watch:
        y, grad = value_and_gradient(x)
    assert "phasor_tests.cube.default" in watch.seen
    assert "phasor_tests.slope.default" in watch.seen
    assert torch.equal(y, value_and_gradient(x)[0])
    assert torch.equal(grad, value_and_gradient(x)[1])


def test_a_compiler_sees_it(x):
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return graph

    y = torch.compile(lambda x: cube(x, 0.5)[0], backend=look, fullgraph=True)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert "phasor_tests.cube" in graphs[0].code
    assert torch.equal(grad, value_and_gradient(x)[1])


def test_tensors_of_another_class_go_through_torch(x):
    seen = []

    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    y, _ = cube(x.detach().as_subclass(Named), 0.5)
    assert any("phasor_tests" in name for name in seen)
    assert y.tolist() == [0.5, 4.0, -13.5]


def test_what_has_no_gradient_says_so(x):
    (grad,) = torch.autograd.grad(cube(x, 0.5)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_a_parameter_is_a_plain_tensor(x):
    assert cube(torch.nn.Parameter(x.detach()), 0.5)[0].grad_fn.name() == "phasor_tests_cubeBackward"


def test_a_map_over_gradients_sees_it(x):
    """`is_grads_batched` maps the backward pass, whose tensors then have no storage."""
    by = torch.randn(4, 3)
    (grads,) = torch.autograd.grad(cube(x, 0.5)[0], x, by, is_grads_batched=True)
    assert torch.equal(grads, torch.stack([torch.autograd.grad(cube(x, 0.5)[0], x, one)[0] for one in by]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_records_are_fields_to_torch_and_records_to_functions(has_bias, compiled):
    x, weight = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    bias = torch.ones(3, requires_grad=True) if has_bias else None
    call = torch.compile(curve, backend="aot_eager", fullgraph=True) if compiled else curve
    y = call(x, Curve(weight, bias, 2), 0.5)
    expected = 0.5 * weight * x**2 + (bias if has_bias else 0)
    assert torch.equal(y, expected)
    inputs = [weight, bias] if has_bias else [weight]
    for got, true in zip(*(torch.autograd.grad(out.sum(), inputs) for out in (y, expected)), strict=True):
        assert torch.equal(got, true)
    torch.library.opcheck(curve.op, (x, weight, bias, 2, 0.5))
    assert str(curve.op._schema).startswith("phasor_tests::curve(Tensor x, Tensor weight, Tensor? bias, ")


@pytest.mark.parametrize("form", ["triton", "reference"])
def test_forward_derivatives_are_those_of_the_references(form):
    """A kernel has none, and would leave them out."""
    positions, weight, by = torch.arange(3), torch.randn(8), torch.randn(8)
    rope = phasor.Rotary(head_dim=8)
    operations = {
        "norm": lambda x: norm(x, weight, None, eps=1e-6),
        "sum and norm": lambda x: add_norm(x, x, weight, None, eps=1e-6)[1],
        "norm and sum": lambda x: norm_add(x, x.sin(), weight, None, eps=1e-6),
        "norm, sum and norm": lambda x: norm_add_norm(x, x.sin(), weight, None, weight, None, eps=1e-6)[1],
        "gated": lambda x: glu(x, "swiglu"),
        "cross-entropy": lambda x: linear_cross_entropy(x[0, 0], weight[:, None] * by, positions, torch.ones(3)).loss,
        "rotary": lambda x: rope.rotate(x, x, positions)[0],
    }
    x, direction = torch.randn(2, 1, 2, 3, 8)
    for name, operation in operations.items():
        with dispatch.force_path(form), forward_ad.dual_level():
            got = forward_ad.unpack_dual(operation(forward_ad.make_dual(x, direction))).tangent
        _, expected = torch.func.jvp(operation, (x,), (direction,))
        assert got is not None, name
        torch.testing.assert_close(got, expected, msg=name)


def test_tracers_see_it(x):
    x, other = x.detach(), torch.randn(3)
    for before_autograd in (False, True):
        graph = make_fx(lambda x: cube(x, 0.5)[0], pre_dispatch=before_autograd)(x)
        assert "phasor_tests.cube" in graph.code
    traced = torch.jit.trace(lambda x: cube(x, 0.5)[0], (x,))
    assert "phasor_tests::cube" in str(traced.graph)
    assert torch.equal(traced(other), cube(other, 0.5)[0])


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast(DEVICE.type, torch.bfloat16)]
)
def test_what_changes_no_operation_is_no_mode(context):
    with context():
        assert not needs_dispatcher()
