"""Frozen layers with an adapter as one operation: against the plain composition, gradients, what is kept, copies."""

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE
from references import normal

from phasor.ops import adapted_linear as ops
from phasor.ops import dispatch
from phasor.ops.glu import glu_ref
from phasor.ops.quantized import dequantize, quantize_int8, quantize_nf4, updated_matrix

KINDS = {
    "plain": lambda weight: weight,
    "nf4": lambda weight: quantize_nf4(weight.float()),
    "int8": lambda weight: quantize_int8(weight.float()),
}
SIZES = {"wide": (64, 72, 8), "narrow": (128, 64, 8), "odd rank": (64, 72, 3)}  # inputs, outputs, rank


def draw(kind, sizes, dtype=torch.float64, rows=(2, 3), gated=False):
    """x, the matrix, A and B."""
    inputs, outputs, rank = sizes
    x = normal(*rows, inputs * (2 if gated else 1), seed=1).to(DEVICE, dtype).requires_grad_()
    matrix = KINDS[kind]((0.1 * normal(outputs, inputs, seed=2)).to(DEVICE, dtype))
    factors = (0.3 * normal(*shape, seed=3 + i) for i, shape in enumerate(((rank, inputs), (outputs, rank))))
    return x, matrix, *(factor.to(DEVICE, dtype).requires_grad_() for factor in factors)


def composed(x, matrix, down, up, activation=None):
    """The same as operations of torch."""
    h = x if activation is None else glu_ref(x, activation)
    return F.linear(h, dequantize(matrix, h.dtype)) + F.linear(F.linear(h, down), up)


def with_gradients(function, x, matrix, *factors_and_activation):
    y = function(x, matrix, *factors_and_activation)
    direction = normal(*y.shape, seed=9).to(y)
    return y.detach(), *torch.autograd.grad(y, (x, *factors_and_activation[:2]), direction)


@pytest.mark.cpu_only("gradcheck draws from the CPU's generator")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("min_rows", [1, 512], ids=["one product", "two products"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_float64(kind, min_rows, sizes, monkeypatch):
    monkeypatch.setattr(ops, "MIN_ROWS", min_rows)
    x, matrix, A, B = draw(kind, SIZES[sizes])
    assert torch.autograd.gradcheck(
        lambda *args: ops.adapted_linear(args[0], matrix, *args[1:]), (x, A, B), fast_mode=True
    )
    ours, theirs = (with_gradients(function, x, matrix, A, B) for function in (ops.adapted_linear, composed))
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if kind == "int8" else 1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["swiglu", "geglu-tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_activation_before_it(kind, activation):
    args = draw(kind, (64, 40, 8), torch.float32, (2, 5), gated=True)
    with dispatch.force_path("triton"):
        ours = with_gradients(ops.adapted_linear, *args, activation)
    # sums of at most 64 products of float32 numbers
    torch.testing.assert_close(ours, with_gradients(composed, *args, activation), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_multiplied_by_the_sum_of_a_quantized_matrix_and_its_update(kind, monkeypatch):
    """Forward and backward. One that is held in 16 bits would lose small updates in a sum, and is left as it is."""
    sums, few, many = [], (64,), (4, ops.MIN_ROWS // 4)
    monkeypatch.setattr(ops, "updated_matrix", lambda *args: sums.append(args) or updated_matrix(*args))
    for rows in few, many:
        args = draw(kind, SIZES["wide"], torch.float32, rows)
        ours, theirs = (with_gradients(function, *args) for function in (ops.adapted_linear, composed))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # sums of 512 products of float32 numbers
        assert len(sums) == (2 if kind != "plain" and rows == many else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_kept(kind, gated):
    """The rows, their product with A, the factors, and the matrix as it is held: nothing as wide as the result."""
    x, matrix, A, B = draw(kind, (64, 128, 8), torch.float32, (70,), gated)
    with dispatch.force_path("triton"):
        y = ops.adapted_linear(x, matrix, A, B, "swiglu" if gated else None)
    held = [matrix] if kind == "plain" else [*matrix]
    kept = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert [t.shape for t in kept[:4]] == [x.shape, (70, 8), A.shape, B.shape]
    assert [t.data_ptr() for t in kept[4:]] == [t.data_ptr() for t in held]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_to_be_added_to(kind):
    args = draw(kind, (64, 72, 8), torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with_gradients(ops.adapted_linear, *args)
    names = {event.key for event in profile.key_averages()}
    assert "aten::addmm_" in names
    assert "aten::addmm" not in names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many", [False, True])
def test_kernels_add_products_and_read_a_gradient_once(kind, many, monkeypatch):
    kernels, ran = pytest.importorskip("phasor.ops.low_rank_kernels"), []
    nf4_kernels = pytest.importorskip("phasor.ops.quantized.nf4_kernels")
    for module, name in (
        (kernels, "add_product"),
        (kernels, "gradients"),
        (kernels, "int8_with_update"),
        (nf4_kernels, "with_update"),
    ):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, kernel=kernel: ran.append(name) or kernel(*args))
    monkeypatch.setattr(ops, "MIN_ROWS", 70 if many else 71)
    args = draw(kind, (64, 72, 8), torch.float16, (70,))
    with dispatch.force_path("triton"):
        ours = with_gradients(ops.adapted_linear, *args)
    added = {"nf4": "with_update", "int8": "int8_with_update"}.get(kind, "add_product") if many else "add_product"
    assert ran == [added, "gradients", added]
    x, matrix, A, B = args
    weight = dequantize(matrix, torch.float16).double()
    exact = with_gradients(composed, *(t.detach().double().requires_grad_() for t in (x, weight, A, B)))
    for mine, wanted in zip(ours, exact, strict=True):  # rounded to 2^-12 of the larger terms, a few times
        assert (mine.double() - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_a_well_behaved_op_that_compiles(kind, gated):
    x, matrix, A, B = args = draw(kind, (64, 8, 4), torch.float32, gated=gated)
    activation = "swiglu" if gated else None
    held = [matrix] if kind == "plain" else list(matrix)
    op = ops.OPS[type(matrix) if kind != "plain" else ops.PlainMatrix]
    torch.library.opcheck(op.op, (x, *held, A, B, activation))
    with dispatch.force_path("triton"):
        compiled = torch.compile(ops.adapted_linear, backend="aot_eager", fullgraph=True)
        found = with_gradients(compiled, *args, activation)
        torch.testing.assert_close(found, with_gradients(ops.adapted_linear, *args, activation))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_dtype_of_what_they_are_of(kind):
    x, matrix, A, B = draw(kind, (64, 72, 8), torch.bfloat16, (70,))
    factors = [factor.detach().float().requires_grad_() for factor in (A, B)]
    ours = with_gradients(ops.adapted_linear, x, matrix, *factors)
    assert [t.dtype for t in ours] == [torch.bfloat16] * 2 + [torch.float32] * 2
    matrix = dequantize(matrix, torch.bfloat16).double()
    exact = with_gradients(composed, *(t.detach().double().requires_grad_() for t in (x, matrix, *factors)))
    for mine, wanted in zip(ours, exact, strict=True):  # rounded to 2^-9 of the larger terms, a few times
        assert (mine.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_an_input_without_a_gradient_takes_no_product_with_the_matrix(monkeypatch):
    x, matrix, A, B = draw("nf4", (64, 72, 8), torch.float32)
    y = ops.adapted_linear(x.detach(), matrix, A, B)
    monkeypatch.setattr(ops, "project_back", None)
    assert len(torch.autograd.grad(y.sum(), (A, B))) == 2
