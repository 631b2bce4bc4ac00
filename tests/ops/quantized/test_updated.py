"""Quantized matrices with an update of low rank: the kernels against float64, and what a small update comes to."""

import pytest
import torch
from device import DEVICE
from references import normal

from phasor.ops import dispatch
from phasor.ops.quantized import UPDATED_MATRIX, NF4Matrix, dequantize, quantize_int8, quantize_nf4, updated_matrix

QUANTIZE = {"nf4": quantize_nf4, "int8": quantize_int8}
SIZES = [(64, 128, 16), (73, 200, 8), (130, 72, 48), (5, 264, 3), (70, 128, 100)]  # outputs, inputs, rank


def draw(quantize, sizes, dtype, size=0.05):
    outputs, inputs, rank = sizes
    matrix = quantize((0.02 * normal(outputs, inputs, seed=1)).float().to(DEVICE))
    A, B = normal(rank, inputs, seed=2), size * normal(outputs, rank, seed=3)
    return matrix, A.to(DEVICE, dtype), B.to(DEVICE, dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE)
def test_the_kernel_rounds_the_sum_once(quantize, sizes):
    matrix, A, B = draw(quantize, sizes, torch.float16)
    with dispatch.force_path("triton"):
        assert UPDATED_MATRIX.choose(matrix, A, B).name == "Triton kernel"
        found = updated_matrix(matrix, A, B)
    exact = dequantize(matrix, torch.float32).double() + B.double() @ A.double()
    assert found.dtype == torch.float16
    # half a unit in the last place, and the error of float32 sums of up to 100 products
    torch.testing.assert_close(found.double(), exact, rtol=2**-11 + 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE)
def test_torch_rounds_the_sum_once(quantize, dtype):
    matrix, A, B = draw(quantize, (33, 130, 4), dtype)
    wide = torch.promote_types(dtype, torch.float32)
    exact = dequantize(matrix, wide).double() + B.double() @ A.double()
    with dispatch.force_path("reference"):
        found = updated_matrix(matrix, A, B)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(wide).eps)


@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE)
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_the_error_is_that_of_the_matrix_alone_for_updates_of_any_size(quantize, size):
    """Rounding `W + B A` to 16 bits changes a product by as much as rounding W does, and small updates are not lost."""
    matrix, A, B = draw(quantize, (256, 1024, 8), torch.bfloat16, size)
    x = normal(64, 1024, seed=4).to(DEVICE)
    wide = dequantize(matrix, torch.float32).double()
    rounded = wide.bfloat16().double() - wide
    found = updated_matrix(matrix, A, B).double() - wide
    update = B.double() @ A.double()
    assert (x @ (found - update).T).norm() < 1.1 * max(1.0, float(update.norm() / wide.norm())) * (x @ rounded.T).norm()
    change = updated_matrix(matrix, A, B).double() - updated_matrix(matrix, A, 0 * B).double()
    # What the update moves, along the update: all of it but for the chance with which single weights are rounded.
    along = float((change * update).sum() / update.square().sum())
    assert along == pytest.approx(1, abs=0.1)


def test_when_there_is_no_kernel():
    def why_not(matrix, rank=8, dtype=torch.float16):
        outputs, inputs = len(matrix.values), matrix.inputs
        kind = {"dtype": dtype, "device": matrix.values.device}
        A, B = torch.zeros(rank, inputs, **kind), torch.zeros(outputs, rank, **kind)
        return next(iter(UPDATED_MATRIX.explain(matrix, A, B)[1].values()))

    matrix, odd = quantize_nf4(normal(4, 64).float()), quantize_nf4(normal(4, 60).float())
    with dispatch.force_path("triton"):
        assert why_not(matrix, dtype=torch.float32) == "float32 has no kernel"
        assert why_not(matrix, rank=129) == "the rank is 129, more than 128"
        assert why_not(odd) == "its rows do not begin and end at multiples of 4 bytes"
    assert why_not(NF4Matrix(*(part.cpu() for part in matrix))) == "the tensors are not on a GPU"
