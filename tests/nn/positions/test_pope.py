"""Polar coordinate positions against the formula of the paper in float64, at positions beyond 2^31 too."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from one_layer import COUNT, HEAD_DIM, HEADS, OneLayer
from schemes import VIEWS, build, relative_change, tiny, tokens
from torch import Tensor

from phasor import PoPEConfig
from phasor.kv_cache.static import StaticKVCache

EXACT = 1e-12  # of float64, relative to the largest output


def formula(layer: OneLayer, position: PoPEConfig) -> Tensor:
    """Gopalakrishnan et al., 2025: magnitudes, and phases that are positions and a shift within [-2 pi, 0]."""
    q, k, v = layer.heads()
    shift = layer.scheme.layer_weights(0)[0].view(-1, HEAD_DIM).clamp(-2 * math.pi, 0)
    shift = shift.repeat_interleave(HEADS // len(shift), dim=0)
    theta = torch.tensor([position.base ** (-c / HEAD_DIM) for c in range(HEAD_DIM)], dtype=torch.float64)
    y = torch.zeros_like(q)
    for i in range(COUNT):
        for h in range(HEADS):
            magnitudes = torch.log1p(q[:, i, None, h].exp()) * torch.log1p(k[:, : i + 1, h].exp())
            phase = torch.stack([(j - i) * theta + shift[h] for j in range(i + 1)])
            weights = ((magnitudes * phase.cos()).sum(-1) / math.sqrt(HEAD_DIM)).softmax(-1)
            y[:, i, h] = torch.einsum("bj,bjd->bd", weights, v[:, : i + 1, h])
    return y.flatten(2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_scores_are_those_of_the_paper(kv_heads):
    position = PoPEConfig(base=50.0)
    layer = OneLayer(position, num_kv_heads=kv_heads, shape="decoder")
    layer.scheme.shift[0].uniform_(-7.0, 1.0)  # beyond both ends
    assert relative_change(layer(), formula(layer, position)) < EXACT


@pytest.mark.parametrize("view", VIEWS)
@torch.no_grad()
def test_caches_keep_magnitudes(view):
    model, ids = build(tiny("pope", attention=VIEWS[view])).double(), tokens(2, 24)
    whole, cache = model(ids), model.new_cache(2, 24)
    parts = [model(part, cache=cache) for part in ids[:, :20].split((5, 1, 9, 1, 4), dim=1)]
    assert relative_change(torch.cat(parts, dim=1), whole[:, :20]) < EXACT
    assert cache.layers[0]["keys"].shape[-1] == HEAD_DIM
    static = StaticKVCache(cache)
    singly = [model(ids[:, i : i + 1], cache=static) for i in range(20, 24)]
    assert relative_change(torch.cat(singly, dim=1), whole[:, 20:]) < EXACT


@pytest.mark.parametrize("position", [0, 1, 2**31 + 11, 2**40 + 1])
def test_phases_are_exact_at_any_position(position):
    scheme = build(tiny("pope")).decoder.position(0)
    cos, sin = scheme.phases(torch.tensor([[position]]), torch.zeros(1, dtype=torch.float64))
    with mpmath.workdps(60):
        for c in range(HEAD_DIM):
            angle = position * mpmath.mpf(10000) ** (-mpmath.mpf(c) / HEAD_DIM)
            # A stored fraction of a rotation is off by at most 2^-65: 2^40 positions make 2 pi 2^-25 = 1.9e-7.
            error = 1e-15 + position * 2 * math.pi * 2.0**-65
            assert abs(float(cos.flatten()[c]) - float(mpmath.cos(angle))) <= error
            assert abs(float(sin.flatten()[c]) - float(mpmath.sin(angle))) <= error


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match=r"PoPEConfig.base must be"):
        PoPEConfig(base=1.0)
