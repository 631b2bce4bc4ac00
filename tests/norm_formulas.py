"""What tests of the kernels of norms share: kinds of norms, their formula, and how results are compared."""

import torch
from references import normal

EPS = 1e-3
KINDS = {  # centered, offset, weight, bias
    "rmsnorm": (False, 0.0, True, False),
    "unit offset": (False, 1.0, True, False),
    "layernorm": (True, 0.0, True, True),
    "layernorm without bias": (True, 0.0, True, False),
    "layernorm without weights": (True, 0.0, False, False),
    "everything": (True, 1.0, True, True),
}
SHAPES = [(1, 1), (1, 64), (5, 3, 37), (2, 1500), (23, 7)]


def formula(x, weight, bias, eps, offset, centered):
    if centered:
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    y = x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    y = y if weight is None else y * (offset + weight)
    return y if bias is None else y + bias


def to_float64(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def gradients(outputs, inputs):
    directions = [normal(*y.shape, seed=9 + i) for i, y in enumerate(outputs)]
    total = sum((y.double() * d).sum() for y, d in zip(outputs, directions, strict=True))
    return torch.autograd.grad(total, [t for t in inputs if t is not None])


def near(ours, theirs, unit):
    """Within some units of rounding relative to the largest element: sums over rows cancel."""
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b).abs().max()) <= unit * max(1.0, float(b.abs().max()))
