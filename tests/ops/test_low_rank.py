"""Products of low rank added in place, both gradients in one pass: kernels against float64, strides, and paths."""

import pytest
import torch
from device import DEVICE, ON_GPU
from references import normal

from phasor.ops import dispatch, low_rank
from phasor.ops.low_rank import ADD_PRODUCT, GRADIENTS, add_product, low_rank_gradients

SIZES = [(73, 213, 8), (64, 128, 16), (130, 600, 24), (5, 1100, 3), (257, 96, 64)]  # rows, columns, rank
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]  # the interpreter multiplies no bfloat16


def draw(*shape, dtype, seed):
    return normal(*shape, seed=seed).to(DEVICE, dtype)


def agrees(found, exact):
    """Rounded once from float32, whose own error is that of sums of some hundred terms."""
    unit = torch.finfo(found.dtype).eps / 2
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * unit, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_is_added_in_place(sizes, transposed, dtype):
    rows, columns, rank = sizes
    y, low = draw(rows, columns, dtype=dtype, seed=1), draw(rows, rank, dtype=dtype, seed=2)
    factor = draw(columns, rank, dtype=dtype, seed=3).t() if transposed else draw(rank, columns, dtype=dtype, seed=3)
    exact = y.double() + low.double() @ factor.double()
    with dispatch.force_path("triton"):
        assert ADD_PRODUCT.choose(y, low, factor).name == "Triton kernel"
        assert add_product(y, low, factor) is y
    agrees(y, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_gradients_are_those_of_two_products(sizes, dtype):
    rows, columns, rank = sizes
    dy, low = draw(rows, columns, dtype=dtype, seed=4), draw(rows, rank, dtype=dtype, seed=5)
    B = draw(columns, rank, dtype=dtype, seed=6)
    with dispatch.force_path("triton"):
        assert GRADIENTS.choose(dy, low, B).name == "Triton kernel, one pass"
        dlow, dB = low_rank_gradients(dy, low, B)
        again = low_rank_gradients(dy, low, B)
    agrees(dlow, dy.double() @ B.double())
    agrees(dB, dy.double().t() @ low.double())
    assert torch.equal(again[0], dlow)
    assert torch.equal(again[1], dB)


def test_rows_of_a_longer_matrix_and_factors_with_gaps():
    dtype = torch.float16
    wide = draw(73, 300, dtype=dtype, seed=7)
    before, part = wide.clone(), wide[:, 20:233]
    low, B = draw(73, 16, dtype=dtype, seed=8)[:, ::2], draw(426, 24, dtype=dtype, seed=9)[::2, 8:16]
    exact = part.double() + low.double() @ B.double().t()
    with dispatch.force_path("triton"):
        dlow, dB = low_rank_gradients(part, low, B)
        add_product(part, low, B.t())
    agrees(dlow, before[:, 20:233].double() @ B.double())
    agrees(dB, before[:, 20:233].double().t() @ low.double())
    agrees(part, exact)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 233:], before[:, 233:])


def test_no_rows():
    y, low, B = (torch.zeros(*shape, dtype=torch.float16, device=DEVICE) for shape in ((0, 32), (0, 8), (32, 8)))
    with dispatch.force_path("triton"):
        assert add_product(y, low, B.t()).shape == (0, 32)
        dlow, dB = low_rank_gradients(y, low, B)
    assert dlow.shape == (0, 8)
    assert torch.equal(dB, torch.zeros_like(B))


@pytest.mark.parametrize("table", [ADD_PRODUCT, GRADIENTS], ids=["add", "gradients"])
def test_when_there_is_no_kernel(table):
    def why_not(y, rank=8):
        factor = (rank, y.shape[1]) if table is ADD_PRODUCT else (y.shape[1], rank)
        tensors = (torch.zeros(*shape, dtype=y.dtype, device=y.device) for shape in ((len(y), rank), factor))
        return next(iter(table.explain(y, *tensors)[1].values()))

    half = torch.zeros(4, 6, dtype=torch.float16, device=DEVICE)
    with dispatch.force_path("triton"):
        assert why_not(half.float()) == "float32 has no kernel"
        assert why_not(half, 65) == "the rank is 65, more than 64"
        assert why_not(half.t().contiguous().t()) == "elements of a row are not one after another"
    with dispatch.force_path("reference"):
        assert why_not(half) == "the reference path is forced"
    assert why_not(half) == ("24 elements are too few" if half.is_cuda else "the tensors are not on a GPU")


def test_there_are_tiles_for_all_ranks():
    kernels = pytest.importorskip("phasor.ops.low_rank_kernels")
    assert max(kernels.GRADIENT_TILES) == low_rank.MAX_RANK
