"""Linear layers whose sums stay in float32, against float64."""

import pytest
import torch
from device import DEVICE
from references import normal

from phasor.ops.linear_float32 import linear_float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_bias", [True, False])
def test_sums_are_those_of_float32(dtype, has_bias):
    rounded = [normal(2, 37, 96, seed=1), normal(5, 96, seed=2), *([normal(5, seed=3)] if has_bias else [])]
    rounded = [x.to(dtype) for x in rounded]
    found = []
    for kind, own in ((dtype, rounded), (torch.float64, rounded)):
        own = [x.to(DEVICE, kind).requires_grad_() for x in own]
        y = linear_float32(*own)
        found.append([y, *torch.autograd.grad(y, own, normal(*y.shape, seed=4).to(dtype).to(y))])
    assert found[0][0].dtype == torch.float32
    torch.testing.assert_close(found[0][0].double(), found[1][0], rtol=1e-5, atol=1e-5)  # of 96 exact products
    for ours, exact in zip(found[0][1:], found[1][1:], strict=True):  # as any layer's: in its own dtype
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() < torch.finfo(dtype).eps * 2 * exact.norm() + 1e-6
