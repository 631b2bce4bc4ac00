"""Recordings of functions compute what the functions compute, for other values in the same layout."""

import pytest
import torch
import torch.nn.functional as F

from phasor.ops import launch
from phasor.ops.replay import UnrecordableError, record


def gradients(y, inputs, grad):
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def check(function, inputs, others):
    """The recording of a call with some inputs gives the bits of a call with others."""
    recording = record(lambda: function(*inputs), inputs)
    y = function(*others)
    grad = torch.randn_like(y)
    expected = gradients(y, others, grad)
    with torch.no_grad():
        z, saved = recording.forward(*others)
        found = recording.backward(grad, *saved)
    assert torch.equal(y, z)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    return recording


def random_inputs(*shapes, frozen=()):
    return [torch.randn(shape, requires_grad=i not in frozen) for i, shape in enumerate(shapes)]


FUNCTIONS = {
    "linear and activation": (lambda x, w, b: F.gelu(F.linear(x, w, b)), ((2, 5, 8), (6, 8), (6,))),
    "an input used twice": (lambda x, w: x + (x @ w) * x, ((5, 8), (8, 8))),
    "views of one projection": (lambda x: torch.cat([p.tanh() for p in x.unflatten(-1, (2, 4)).unbind(1)]), ((5, 8),)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ),
    "written in place": (lambda x: x.clone().mul_(2).add_(x), ((5, 8),)),
    "an output that is saved": (lambda x, w: F.layer_norm(x, (8,), w).relu().exp(), ((5, 8), (8,))),
    "an unused input": (lambda x, w: x * 2, ((5, 8), (3,))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("frozen", [(), (0,)])
def test_recordings_give_the_bits_of_the_function(name, frozen):
    function, shapes = FUNCTIONS[name]
    if len(frozen) == len(shapes):
        pytest.skip("nothing would need a gradient")
    if name == "an unused input" and frozen:
        pytest.skip("the result would need no gradient")
    check(function, random_inputs(*shapes, frozen=frozen), random_inputs(*shapes, frozen=frozen))


def test_random_numbers_are_drawn_anew():
    x = torch.randn(1000, requires_grad=True)
    recording = record(lambda: F.dropout(x, 0.5), [x])
    torch.manual_seed(3)
    y = F.dropout(x, 0.5)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.manual_seed(3)
    z, saved = recording.forward(x)
    assert torch.equal(y, z)
    assert torch.equal(dx, recording.backward(torch.ones_like(y), *saved)[0])
    assert not torch.equal(recording.forward(x)[0], z)


def test_no_tensor_is_kept():
    x, w = random_inputs((5, 8), (6, 8))
    recording = record(lambda: F.linear(x, w).relu(), [x, w])
    held = [value for value in recording.forward.__globals__.values() if isinstance(value, torch.Tensor)]
    assert not held


def test_what_is_not_needed_later_is_deleted():
    x, w = random_inputs((5, 8), (8, 8))
    source = record(lambda: ((x @ w).exp() + 1).sin(), [x, w]).source
    assert "del" in source.split("def backward")[0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * torch.ones(8).cumsum(0).max().item(), "reads a value on the host"),
        (lambda x: x[x > 0], "as many elements as values ask for"),
        (lambda x: x * OTHER, "none of its inputs"),
        (lambda x: x.detach() * 2, "has no gradient"),
        (lambda x: x * x.detach().to("meta").shape[0], "the host may read it"),
    ],
)
def test_what_depends_on_values_or_other_tensors_is_not_recorded(function, reason):
    x = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(UnrecordableError, match=reason):
        record(lambda: function(x), [x])
    assert launch.active_recorder() is None


OTHER = torch.randn(8)


def test_inputs_that_are_one_tensor_are_not_recorded():
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(UnrecordableError, match="one tensor"):
        record(lambda: x * x, [x, x])


def test_without_gradients_nothing_is_recorded():
    x = torch.randn(5)
    with pytest.raises(UnrecordableError, match="needs a gradient"):
        record(lambda: x * 2, [x])


def test_what_writes_to_its_inputs_is_not_recorded():
    x, count = torch.randn(5, requires_grad=True), torch.zeros(5)
    for write in (lambda: count.add_(1), lambda: torch.neg(torch.ones(5), out=count)):
        with pytest.raises(UnrecordableError, match="writes to one of its inputs"):
            record(lambda write=write: x * write(), [x, count])
    assert not count.any()
