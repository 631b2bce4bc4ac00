"""Gated activations and their products of low rank: the kernels against float64, and when they are taken."""

from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, ON_GPU
from references import normal
from torch._subclasses.fake_tensor import FakeTensorMode

from phasor.ops import dispatch
from phasor.ops.glu import GLU_ACTIVATIONS, glu_ref
from phasor.ops.glu.product import GLU_PRODUCT, GLU_PRODUCT_BACKWARD, glu_product, glu_product_backward

SIZES = [(70, 130, 8), (32, 256, 16), (5, 600, 24), (130, 72, 64)]  # rows, columns, rank
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]  # the interpreter multiplies no bfloat16


def draw(sizes, dtype):
    """x, A, and the gradients of both results."""
    rows, columns, rank = sizes
    shapes = (rows, 2 * columns), (rank, columns), (rows, columns), (rows, rank)
    return [normal(*shape, seed=i).to(DEVICE, dtype) for i, shape in enumerate(shapes)]


def agrees(found, exact, rounded):
    """As far apart as rounding h and the result allows, and float32 sums of some hundred terms."""
    unit = torch.finfo(found.dtype).eps / 2
    assert ((found.double() - exact).abs() <= unit * (1.01 * exact.abs() + rounded) + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", GLU_ACTIVATIONS)
def test_products_and_gradients_are_those_of_float64(activation, sizes, dtype):
    x, A, dh, dlow = draw(sizes, dtype)
    with dispatch.force_path("triton"):
        assert GLU_PRODUCT.choose(x, A, activation).name == "Triton kernel"
        assert GLU_PRODUCT_BACKWARD.choose(dh, x, dlow, activation).name == "Triton kernel"
        h, low = glu_product(x, A, activation)
        dx, dA = glu_product_backward(dh, x, dlow, activation)
        again = glu_product(x, A, activation)[1], glu_product_backward(dh, x, dlow, activation)[1]
    wide = x.double().requires_grad_()
    exact = glu_ref(wide, activation)
    agrees(h, exact.detach(), 0)
    agrees(dx, torch.autograd.grad(exact, wide, dh.double())[0], 0)
    exact = exact.detach()
    agrees(low, exact @ A.double().t(), exact.abs() @ A.double().abs().t())
    agrees(dA, dlow.double().t() @ exact, dlow.double().abs().t() @ exact.abs())
    assert torch.equal(again[0], low)
    assert torch.equal(again[1], dA)
    assert dA.is_contiguous()
    assert low.is_contiguous()


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_without_the_kernels_the_results_are_the_same(activation):
    args = draw((23, 66, 4), torch.float32)
    x, A, dh, dlow = args
    exact = glu_ref(x.double(), activation)
    with dispatch.force_path("triton"):  # the activation alone has kernels for float32
        h, low = glu_product(x, A, activation)
        before = dh.clone()
        dx, dA = glu_product_backward(dh, x, dlow, activation)
    wide = x.double().requires_grad_()
    wanted = torch.autograd.grad(glu_ref(wide, activation), wide, before.double())[0]
    for found, right in ((h, exact), (low, exact @ A.double().t()), (dx, wanted), (dA, dlow.double().t() @ exact)):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.cpu_only("kernels are not launched, on tensors that say they are on a GPU")
@pytest.mark.parametrize("hip", [None, "7.0"])
def test_instructions_of_nvidia_are_for_its_gpus_alone(hip, monkeypatch):
    kernels, asked = pytest.importorskip("phasor.ops.glu.product_kernels"), []
    for name in ("PRODUCT", "GRADIENTS"):
        monkeypatch.setattr(kernels, name, lambda *_, **given: asked.append(given["USE_ASM"]))
    monkeypatch.setattr(kernels, "sum_parts", lambda parts, dtype: parts)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        x, A, dh, dlow = (torch.empty(*shape, device="cuda:0") for shape in ((4, 32), (8, 16), (4, 16), (4, 8)))
        kernels.glu_product(x, A, "swiglu")
        kernels.glu_product_backward(dh, x, dlow, "swiglu")
    assert asked == [hip is None] * 2


def test_when_there_are_no_kernels():
    def why_not(x, rank=8):
        half, low = x[:, : x.shape[1] // 2], x.new_zeros(len(x), rank)
        found = [
            next(iter(GLU_PRODUCT.explain(x, x.new_zeros(rank, half.shape[1]), "swiglu")[1].values())),
            next(iter(GLU_PRODUCT_BACKWARD.explain(half, x, low, "swiglu")[1].values())),
        ]
        assert found[0] == found[1]
        return found[0]

    half = torch.zeros(4, 6, dtype=torch.float16)
    assert why_not(half.cpu()) == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert why_not(half.float()) == "float32 has no kernel"
        assert why_not(half, 65) == "the rank is 65, more than 64"
        assert why_not(half[:0]) == "there is nothing to sum"
