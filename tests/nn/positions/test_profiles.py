"""A bias that queries mix from profiles against transformers' module for Inkling, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from device import DEVICE
from one_layer import COUNT, HEAD_DIM, HEADS, OneLayer
from schemes import VIEWS, build, relative_change, tiny, tokens
from torch import Tensor
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from phasor import CombinedConfig, ProfilesConfig
from phasor.kv_cache.static import StaticKVCache
from phasor.ops import dispatch

EXACT = 1e-12  # of float64, relative to the largest output


def theirs(layer: OneLayer, position: ProfilesConfig, seen: Tensor) -> Tensor:
    """Scores plus transformers' bias, over the keys that `seen` shows, as `InklingAttention` has them."""
    (q, k, v), (projection, profiles) = layer.heads(), layer.scheme.layer_weights(0)
    module = InklingRelativeLogits(position.rank, position.extent).double()
    weights, places = (layer.x @ projection.T).unflatten(-1, (HEADS, -1)), torch.arange(COUNT)
    bias = torch.func.functional_call(module, {"proj": profiles}, (weights, places, places))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_DIM) + bias
    if position.log_floor is not None:
        above = (torch.arange(1, COUNT + 1, dtype=torch.float64) / position.log_floor).clamp(min=1.0)
        scores = scores * (1 + position.log_scale * above.log())[:, None]
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).flatten(2)


SEEN = {
    "whole": lambda i, j: j <= i,
    "window": lambda i, j: i - 4 < j <= i,
    "sinks": lambda i, j: (i - 4 < j or j < 2) and j <= i,
}
POSITIONS = [
    ProfilesConfig(extent=7, rank=3),
    ProfilesConfig(extent=40, rank=5),
    ProfilesConfig(extent=1, rank=1),
    ProfilesConfig(extent=7, rank=3, log_floor=5, log_scale=0.7),
]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("position", POSITIONS, ids=str)
@pytest.mark.parametrize("view", SEEN)
def test_attention_and_gradients_are_those_of_transformers(view, position, kv_heads):
    layer = OneLayer(position, num_kv_heads=kv_heads, shape="decoder", attention=VIEWS[view])
    weights = [weight.requires_grad_() for weight in layer.scheme.layer_weights(0)]
    seen = torch.tensor([[SEEN[view](i, j) for j in range(COUNT)] for i in range(COUNT)])
    ways = layer(), theirs(layer, position, seen)
    assert relative_change(*ways) < EXACT
    upstream = torch.randn_like(ways[0])
    found, expected = (torch.autograd.grad((y * upstream).sum(), weights) for y in ways)
    for ours, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 1e-3
        assert relative_change(ours, wanted) < EXACT


def test_keys_ahead_have_no_bias_in_an_encoder():
    position = ProfilesConfig(extent=7, rank=3)
    layer = OneLayer(position)
    assert relative_change(layer(), theirs(layer, position, torch.ones(COUNT, COUNT, dtype=torch.bool))) < EXACT


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["profiles", "profiles-log"])
@torch.no_grad()
def test_caches_equal_the_forward(name, view):
    model, ids = build(tiny(name, attention=VIEWS[view])).double(), tokens(2, 24)
    whole, cache = model(ids), model.new_cache(2, 24)
    parts = [model(part, cache=cache) for part in ids[:, :20].split((5, 1, 9, 1, 4), dim=1)]
    assert relative_change(torch.cat(parts, dim=1), whole[:, :20]) < EXACT
    static = StaticKVCache(cache)
    singly = [model(ids[:, i : i + 1], cache=static) for i in range(20, 24)]
    assert relative_change(torch.cat(singly, dim=1), whole[:, 20:]) < EXACT


def test_the_kernel_takes_profiles_as_a_table_by_query():
    """With its gradients; an extent of 1,024 is Inkling's."""
    model = build(tiny(ProfilesConfig(extent=1024, rank=3), num_layers=1)).to(DEVICE)
    ids, ways = tokens(1, 20).to(DEVICE), []
    for path in ("triton", "reference"):
        model.zero_grad()
        with dispatch.force_path(path):
            loss = model(ids).square().mean()
        loss.backward()
        ways.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, reference in zip(*ways, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_it_adds_up_with_rotation():
    """Queries and keys are free for other schemes: with profiles of zeros what remains is rotary."""
    both = CombinedConfig(schemes=("rotary", ProfilesConfig(extent=7, rank=3)))
    model, ids = build(tiny(both)).double(), tokens(2, 24)
    rotary = build(tiny("rotary")).double()
    rotary.load_state_dict({name: x for name, x in model.state_dict().items() if "positions" not in name})
    assert relative_change(model(ids), rotary(ids)) > 1e-3
    for weight in model.decoder.position(0).schemes[1].profiles:
        weight.zero_()
    assert relative_change(model(ids), rotary(ids)) < EXACT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"extent": 0}, "ProfilesConfig.extent must be greater than 0"),
        ({"rank": 0}, "ProfilesConfig.rank must be greater than 0"),
        ({"log_floor": 0}, "ProfilesConfig.log_floor must be greater than 0"),
        ({"log_scale": 0.0}, "ProfilesConfig.log_scale must be greater than 0"),
    ],
)
def test_bad_fields_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        ProfilesConfig(**fields)
