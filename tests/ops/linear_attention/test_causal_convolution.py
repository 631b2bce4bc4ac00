"""The short causal convolution against torch's own, for each document alone."""

import pytest
import torch
import torch.nn.functional as F

from phasor.ops.linear_attention import CAUSAL_CONVOLUTION, causal_convolution


def draw(length, width=4, batch=2, channels=5):
    x, state = torch.randn(batch, length, channels).double(), torch.randn(batch, width - 1, channels).double()
    weight, bias = torch.randn(channels, width).double(), torch.randn(channels).double()
    return [tensor.requires_grad_() for tensor in (x, weight, bias, state)]


def convolve(x, weight, bias, state):
    """One document by torch: the state, or zeros, before the first input."""
    before = torch.zeros_like(x[:, :1]).expand(-1, weight.shape[1] - 1, -1) if state is None else state
    x = torch.cat([before, x], 1).transpose(1, 2)
    return F.conv1d(x, weight[:, None], bias, groups=len(weight)).transpose(1, 2)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_every_path_equals_the_convolution_of_torch(width, length):
    x, weight, bias, state = draw(length, width)
    expected = convolve(x, weight, bias, state)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, weight, bias), direction)
    for path in CAUSAL_CONVOLUTION.paths:
        y, last = path.run(x, weight, bias, state)
        # float64: sums of four terms
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        assert torch.equal(last, torch.cat([state, x], 1)[:, length:])
        for given, exact in zip(torch.autograd.grad(y, (x, weight, bias), direction), gradients, strict=True):
            torch.testing.assert_close(given, exact, rtol=1e-13, atol=1e-13)


def test_windows_do_not_reach_across_a_start():
    x, weight, bias, state = draw(11, batch=1)
    starts = torch.zeros(1, 11, dtype=torch.bool)
    starts[0, [3, 4, 9]] = True
    y, last = causal_convolution(x, weight, bias, state, starts)
    bounds = [(0, 3, state), (3, 4, None), (4, 9, None), (9, 11, None)]
    expected = torch.cat([convolve(x[:, first:end], weight, bias, before) for first, end, before in bounds], 1)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(last[:, 1:], x[:, 9:])
    assert not last[:, 0].any()  # an input of the document before
    following = torch.randn(1, 2, 5).double()
    y, _ = causal_convolution(following, weight, bias, last)
    whole = convolve(torch.cat([x[:, 9:], following], 1), weight, bias, None)
    torch.testing.assert_close(y, whole[:, 2:], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sizes", [[1] * 9, [2, 0, 7]])
def test_pieces_of_any_length_equal_one_pass(sizes):
    x, weight, bias, state = draw(9)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, 4] = True
    expected, outputs, first = causal_convolution(x, weight, bias, state, starts), [], 0
    for size in sizes:
        y, state = causal_convolution(x[:, first : first + size], weight, bias, state, starts[:, first : first + size])
        outputs.append(y)
        first += size
    torch.testing.assert_close(torch.cat(outputs, 1), expected[0], rtol=1e-13, atol=1e-13)
    assert torch.equal(state, expected[1])


def test_bfloat16_rounds_once():
    x, weight, bias, state = (tensor.detach().bfloat16() for tensor in draw(9))
    starts = torch.zeros(2, 9, dtype=torch.bool)
    exact = convolve(*(tensor.double() for tensor in (x, weight, bias, state)))
    # half a unit in the last of bfloat16's 8 bits, and float32's rounding where terms cancel
    torch.testing.assert_close(
        causal_convolution(x, weight, bias, state, starts)[0].double(), exact, rtol=2**-8, atol=1e-6
    )


def test_wrong_shapes_are_named():
    x, weight, bias, state = draw(9)
    with pytest.raises(ValueError, match=r"causal convolution: state has the shape \[2, 3, 5\], but \[2, 2, 5\] fits"):
        causal_convolution(x, weight[:, 1:], bias, state)
