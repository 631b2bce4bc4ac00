"""Running sums over tokens and angles in fixed point: kernels against torch, to the last bit where they are integers.

They run on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from phasor.ops import dispatch
from phasor.ops.running_sums import cumsum_tokens, fixed_angles
from phasor.ops.running_sums.angles import fixed_angles_op, fixed_angles_ref
from phasor.ops.running_sums.cumsum import cumsum_op

kernels = pytest.importorskip("phasor.ops.running_sums.kernels")

SHAPES = [(2, 5, 3), (1, 64, 40), (2, 300, 2, 5), (1, 129), (3, 1, 4)]


@pytest.fixture(autouse=True)
def by_kernels():
    with dispatch.force_path("triton"):
        yield


def sums_ref(x: torch.Tensor, reverse: bool) -> torch.Tensor:
    return x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)


@pytest.mark.sample(6)
@pytest.mark.parametrize("blocks", [1, 2, 128])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_any_shape(shape, reverse, blocks, monkeypatch):
    """Integers that wrap around, in programs of one tile of tokens or of several."""
    monkeypatch.setattr(kernels, "BLOCKS", blocks)
    x = torch.randint(-(2**63), 2**63 - 1, shape)
    assert torch.equal(cumsum_op(x, reverse), sums_ref(x, reverse))
    values = torch.randn(shape)
    exact = sums_ref(values.double(), reverse)
    assert (cumsum_op(values, reverse) - exact).abs().max() < 2e-6 * shape[1] ** 0.5


def test_tokens_apart():
    x = torch.randint(-(2**63), 2**63 - 1, (3, 4, 70)).mT
    assert torch.equal(cumsum_tokens(x), x.cumsum(1))


def test_gradients():
    x = torch.randn(2, 70, 3, requires_grad=True)
    weights = torch.randn(2, 70, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(cumsum_tokens(x), x, weights, create_graph=True)
    torch.testing.assert_close(grad, sums_ref(weights, reverse=True), rtol=0, atol=2e-5)
    (second,) = torch.autograd.grad(grad, weights, x.detach())
    torch.testing.assert_close(second, x.cumsum(1), rtol=0, atol=2e-5)


def test_one_token_and_none():
    for count in (0, 1):
        for kind in (torch.int64, torch.float32):
            x = torch.ones(2, count, 3).to(kind)
            assert torch.equal(cumsum_tokens(x), x)


@pytest.mark.sample(1)
def test_operators_are_well_formed():
    torch.library.opcheck(cumsum_op.op, (torch.randn(2, 5, 3, requires_grad=True), True))
    torch.library.opcheck(fixed_angles_op.op, (torch.randn(2, 5, 3), torch.arange(3)))


def test_angles_are_those_of_torch_to_the_last_bit():
    sizes = torch.tensor([0.0, -0.0, 1e-30, 1e-3, 1.0, math.pi, -math.pi / 2, 1e3, 1e6])
    radians = torch.randn(3, 200, 9) * sizes
    own = torch.randint(-(2**63), 2**63 - 1, (9,))
    for own_radians, fixed in ((radians, own), (radians[..., :4], own[:4])):
        on_cpu = fixed_angles_ref(own_radians.cpu(), fixed.cpu())  # a GPU multiplies by the inverse of 2 pi
        assert torch.equal(fixed_angles(own_radians, fixed).cpu(), on_cpu)


def test_angles_are_fractions_of_a_rotation():
    """Against rational numbers: 2^-52 of a rotation, and of its number of radians the roundings of float64."""
    radians = torch.randn(50) * 20
    for got, angle in zip(fixed_angles(radians, torch.zeros(50, dtype=torch.int64)).tolist(), radians, strict=True):
        turns = Fraction(angle.item()) / Fraction(2 * math.pi)
        off = Fraction(got, 2**64) - turns
        assert abs(off - round(off)) < Fraction(1, 2**49)


def test_angles_have_no_gradient():
    assert not fixed_angles(torch.randn(2, 3, requires_grad=True), torch.arange(3)).requires_grad
