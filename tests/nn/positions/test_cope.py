"""Contextual positions against the formula of the paper, one query and one key after the other, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from one_layer import COUNT, HEAD_DIM, HEADS, OneLayer
from schemes import VIEWS, build, relative_change, tiny, tokens
from torch import Tensor

import phasor
from phasor import CoPEConfig
from phasor.kv_cache.static import StaticKVCache
from phasor.ops.attention import Mask, ScoreMod
from phasor.ops.sparse_attention import Dilated, KeyBlocks, sparse_attention, sparse_attention_ref

EXACT = 1e-12  # of float64, relative to the largest output


def formula(layer: OneLayer, position: CoPEConfig, seen: Tensor) -> Tensor:
    """Equations (2) to (5) of Golovneva et al., 2024, over the keys that `seen` shows; scores over sqrt(head_dim)."""
    (q, k, v), table = layer.heads(), layer.scheme.layer_weights(0)[0]
    y = torch.zeros_like(q)
    for b in range(len(q)):
        for h in range(HEADS):
            for i in range(COUNT):
                keys = [j for j in range(COUNT) if seen[i, j]]
                gates = {j: 1 / (1 + math.exp(-float(q[b, i, h] @ k[b, j, h]) / math.sqrt(HEAD_DIM))) for j in keys}
                scores = []
                for j in keys:
                    p = min(sum(gates[t] for t in keys if t >= j), position.max_position)
                    low, high = math.floor(p), math.ceil(p)
                    e = (p - low) * table[high] + (1 - p + low) * table[low]
                    scores.append(q[b, i, h] @ (k[b, j, h] + e) / math.sqrt(HEAD_DIM))
                y[b, i, h] = torch.stack(scores).softmax(0) @ v[b, keys, h]
    return y.flatten(2)


SEEN = {
    "whole": lambda i, j: j <= i,
    "window": lambda i, j: i - 4 < j <= i,
    "sinks": lambda i, j: (i - 4 < j or j < 2) and j <= i,
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("view", SEEN)
def test_counts_are_those_of_the_paper(view, kv_heads):
    position = CoPEConfig(max_position=6)
    layer = OneLayer(position, num_kv_heads=kv_heads, shape="decoder", attention=VIEWS[view])
    seen = torch.tensor([[SEEN[view](i, j) for j in range(COUNT)] for i in range(COUNT)])
    assert relative_change(layer(), formula(layer, position, seen)) < EXACT


def test_an_encoder_counts_to_the_last_token():
    position = CoPEConfig(max_position=30)
    layer = OneLayer(position)
    assert relative_change(layer(), formula(layer, position, torch.ones(COUNT, COUNT))) < EXACT


@pytest.mark.parametrize("view", VIEWS)
@torch.no_grad()
def test_slots_of_a_cache_are_counted_in_the_order_of_their_tokens(view):
    """Windows are ring buffers, whose slots have another order than the tokens in them."""
    model, ids = build(tiny("cope", attention=VIEWS[view])).double(), tokens(2, 24)
    whole, cache = model(ids), model.new_cache(2, 24)
    parts = [model(part, cache=cache) for part in ids[:, :20].split((5, 1, 9, 1, 4), dim=1)]
    assert relative_change(torch.cat(parts, dim=1), whole[:, :20]) < EXACT
    static = StaticKVCache(cache)
    singly = [model(ids[:, i : i + 1], cache=static) for i in range(20, 24)]
    assert relative_change(torch.cat(singly, dim=1), whole[:, 20:]) < EXACT


@pytest.mark.parametrize("pattern", [Dilated(2), Dilated(segment=5), KeyBlocks(3, 1, 2, 1)])
def test_sparse_attention_counts_the_keys_that_it_shows(pattern):
    q, k, v = (torch.randn(2, 19, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    scheme = build(tiny("cope")).decoder.position(0)
    mask = Mask(causal=True, pattern=pattern)
    prepared = scheme.for_layer(q, None, scheme.layer_weights(0), phasor.nn.layer_step.LayerStep(mask, None))
    args = scheme.on_attention(q, k, mask, ScoreMod(scale=0.3), prepared)
    expected = sparse_attention_ref(*args[:2], v, mask, args[2])[0]
    assert relative_change(sparse_attention(*args[:2], v, mask, args[2]), expected) < EXACT


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match=r"CoPEConfig.max_position must be at least 1"):
        CoPEConfig(max_position=0)
