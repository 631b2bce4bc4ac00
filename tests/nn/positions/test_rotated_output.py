"""Values that are rotated, and results that are rotated back, as in DeepSeek V4: against transformers, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from families.float64 import in_float64
from one_layer import COUNT, HEAD_DIM, OneLayer
from schemes import VIEWS, relative_change, tiny
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

import phasor
from phasor import RotaryConfig

EXACT = 1e-12  # of float64, relative to the largest output
SEEN = {
    "whole": lambda i, j: j <= i,
    "window": lambda i, j: i - 4 < j <= i,
    "sinks": lambda i, j: (i - 4 < j or j < 2) and j <= i,
}


def theirs(layer: OneLayer, position: RotaryConfig, seen: torch.Tensor) -> torch.Tensor:
    """Rotation of queries, keys and values by `apply_rotary_pos_emb`, and of the output by the conjugate.

    Theirs rotates the last features of a head in adjacent pairs, ours the first: features are put in their order.
    """
    dim = position.rotary_dim or HEAD_DIM
    rotated = torch.arange(dim) if position.pairing == "adjacent" else torch.arange(dim).view(2, -1).T.flatten()
    order = torch.cat((torch.arange(dim, HEAD_DIM), rotated))
    q, k, v = (x[..., order] for x in layer.heads())
    frequency = position.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(COUNT, dtype=torch.float64)[None, :, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    with in_float64():
        q, k, v = (apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2) for x in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_DIM)
        y = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
        y = apply_rotary_pos_emb(y, cos, -sin, unsqueeze_dim=2)
    return y[..., order.argsort()].flatten(2)


POSITIONS = [
    RotaryConfig(base=50.0, rotate_values=True, rotate_output=True),
    RotaryConfig(pairing="adjacent", rotary_dim=6, rotate_values=True, rotate_output=True),
]


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("position", POSITIONS, ids=["halves", "adjacent, partial"])
@pytest.mark.parametrize("view", SEEN)
def test_results_are_those_of_transformers(view, position, kv_heads):
    layer = OneLayer(position, num_kv_heads=kv_heads, shape="decoder", attention=VIEWS[view])
    seen = torch.tensor([[SEEN[view](i, j) for j in range(COUNT)] for i in range(COUNT)])
    assert relative_change(layer(), theirs(layer, position, seen)) < EXACT


def test_values_that_are_rotated_alone_are_absolute():
    position = POSITIONS[0]
    assert position.shift_invariant
    assert not position.replace(rotate_output=False).shift_invariant
    layer, seen = OneLayer(position.replace(rotate_output=False), shape="decoder"), torch.ones(COUNT, COUNT).tril() > 0
    assert relative_change(layer(), theirs(layer, position, seen)) > 0.1


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match=r"RotaryConfig.rotate_output rotates values back: it needs rotate_values"):
        RotaryConfig(rotate_output=True)
    capped = phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2, cap_sinks=True)
    with pytest.raises(ValueError, match="cap_sinks gives queries another position"):
        tiny(POSITIONS[0], attention=capped)
