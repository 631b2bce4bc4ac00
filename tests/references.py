"""Float64 references that tests of more than one op share, and how results are compared with them."""

import torch

from phasor.config import LayerNormConfig, NoNormConfig

EXACT = 1e-11  # float64 against float64: only the order of sums differs
SINGLE = 2e-5  # float32 against float64 for sums of a hundred terms of size one


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def redraw(module, dtype=torch.float64, seed=1):
    """Every parameter drawn afresh, so that no weight of 1 or 0 hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.to(dtype)


def assert_same(ours, theirs, inputs, tolerance=EXACT):
    """Values and gradients of all inputs agree, for one random direction of the output."""
    direction = normal(*theirs.shape, seed=99).to(theirs.dtype)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    ours_grad = torch.autograd.grad((ours * direction).sum(), inputs)
    theirs_grad = torch.autograd.grad((theirs * direction).sum(), inputs)
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


def plain_norm(x, config, weight, bias):
    if isinstance(config, NoNormConfig):
        return x
    if isinstance(config, LayerNormConfig):
        centered = x - x.sum(-1, keepdim=True) / x.shape[-1]
        y = centered / ((centered**2).sum(-1, keepdim=True) / x.shape[-1] + config.eps).sqrt()
        y = y * (1 + weight) if config.unit_offset else y * weight
        return y if bias is None else y + bias
    y = x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + config.eps).sqrt()
    return y * (1 + weight) if config.unit_offset else y * weight


def plain_attention(q, k, v, visible, scale, softcap=None, sinks=None, bias=None):
    """All scores of all tokens at once, head by head."""
    share = q.shape[2] // k.shape[2]
    heads = []
    for h in range(q.shape[2]):
        scores = scale * torch.matmul(q[:, :, h], k[:, :, h // share].transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[:, h]
        odds = torch.exp(scores) * visible
        total = odds.sum(-1, keepdim=True) + (0 if sinks is None else torch.exp(sinks[h]))
        heads.append(odds / total @ v[:, :, h // share])
    return torch.stack(heads, dim=2)
