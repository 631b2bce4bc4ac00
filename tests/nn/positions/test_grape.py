"""Multiplicative GRAPE against the paper's matrix exponential in float64, and its frequencies at any position."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from device import DEVICE
from one_layer import COUNT, HEAD_DIM, OneLayer
from schemes import VIEWS, build, relative_change, tiny, tokens
from torch import Tensor

from phasor import GRAPEConfig
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch
from phasor.ops.attention import Mask
from phasor.ops.rope import PhaseArgs, RopeArgs

EXACT = 1e-12  # of float64, relative to the largest output
PAIRS = HEAD_DIM // 2


def formula(layer: OneLayer, position: GRAPEConfig, basis: Tensor) -> Tensor:
    """Zhang et al., 2026, sections 2 and 3: `G(n) = exp(n L)`, `L = sum theta_i B U_i J U_i^T B^T`, in a basis `B`."""
    q, k, v = layer.heads()
    q, k = q @ basis.T, k @ basis.T
    features = torch.arange(HEAD_DIM)
    pairs = features.view(2, PAIRS).T if position.pairing == "half" else features.view(PAIRS, 2)
    initial = torch.tensor([position.base ** (-2 * i / HEAD_DIM) for i in range(PAIRS)], dtype=torch.float64)
    theta = torch.exp(initial.log() + layer.scheme.weight[0] / 16)  # the authors' `log_freq / log_freq_scale`
    plane = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    generator = sum(t * basis[:, pair] @ plane @ basis[:, pair].T for t, pair in zip(theta, pairs, strict=True))
    y = []
    for i in range(COUNT):
        by_offset = torch.matrix_exp(torch.arange(-i, 1)[:, None, None] * generator)  # G(j - i)
        scores = torch.einsum("bhd,jde,bjhe->bhj", q[:, i], by_offset, k[:, : i + 1]) / math.sqrt(HEAD_DIM)
        y.append(torch.einsum("bhj,bjhd->bhd", scores.softmax(-1), v[:, : i + 1]))
    return torch.stack(y, dim=1).flatten(2)


def random_basis() -> Tensor:
    return torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64)).Q


@pytest.mark.parametrize("position", [GRAPEConfig(base=50.0), GRAPEConfig(pairing="adjacent")], ids=str)
@pytest.mark.parametrize("basis", ["planes of rotary", "learned planes"])
def test_scores_and_gradients_are_those_of_the_paper(position, basis):
    """A learned orthogonal basis is one that the projections of queries and keys have taken in."""
    layer = OneLayer(position, shape="decoder")
    (weight,) = layer.scheme.weight
    weight.normal_(std=20.0).requires_grad_()  # frequencies three times as fast, and a third
    expected = formula(layer, position, torch.eye(HEAD_DIM).double() if basis == "planes of rotary" else random_basis())
    found = layer()
    assert relative_change(found, expected) < EXACT
    upstream = torch.randn_like(found)
    grads = [torch.autograd.grad((y * upstream).sum(), weight)[0] for y in (found, expected)]
    assert relative_change(*grads) < EXACT
    assert grads[0].abs().min() > 1e-6


@torch.no_grad()
def learned(**changes: object):
    model = build(tiny("grape", **changes)).double()
    for weight in model.decoder.position(0).weight:
        weight.normal_(std=8.0)
    return model


@pytest.mark.parametrize("view", VIEWS)
@torch.no_grad()
def test_caches_equal_the_forward_and_shifts_change_nothing(view):
    model, ids = learned(attention=VIEWS[view]), tokens(2, 24)
    whole, cache = model(ids), model.new_cache(2, 24)
    parts = [model(part, cache=cache) for part in ids[:, :20].split((5, 1, 9, 1, 4), dim=1)]
    assert relative_change(torch.cat(parts, dim=1), whole[:, :20]) < EXACT
    static = StaticKVCache(cache)
    singly = [model(ids[:, i : i + 1], cache=static) for i in range(20, 24)]
    assert relative_change(torch.cat(singly, dim=1), whole[:, 20:]) < EXACT
    assert relative_change(model(ids, positions=torch.arange(24) + 2**40), whole) < EXACT


def prepared(position: int, dtype: torch.dtype = torch.float64):
    scheme = learned().decoder.position(0).requires_grad_(False)
    seq, like = SequenceInfo(torch.tensor([position]), None), torch.zeros(1, 1, 32, dtype=dtype)
    weights = scheme.layer_weights(0)
    return scheme, scheme.for_layer(like, scheme.prepare(seq, like), weights, LayerStep(Mask(), None)), weights[0]


@pytest.mark.parametrize("position", [0, 1, 2**31 + 11, 2**40 + 1])
def test_phases_are_exact_at_any_position(position):
    """Of the frequency that float64 has: it is off by a few roundings of its learned part."""
    _, rotations, weight = prepared(position)
    with mpmath.workdps(60):
        for i in range(PAIRS):
            frequency = mpmath.mpf(10000) ** (-mpmath.mpf(i) / PAIRS) * mpmath.exp(mpmath.mpf(weight[i].item()) / 16)
            error = 1e-15 + position * (2 * math.pi * 2.0**-64 + 2.0**-50 * float(frequency))
            assert abs(float(rotations.cos.flatten()[i]) - float(mpmath.cos(position * frequency))) <= error
            assert abs(float(rotations.sin.flatten()[i]) - float(mpmath.sin(position * frequency))) <= error


def test_before_training_it_is_rotary():
    ids = tokens(2, 24)
    model, rotary = build(tiny("grape")).double(), build(tiny("rotary")).double()
    rotary.load_state_dict({name: x for name, x in model.state_dict().items() if "positions" not in name})
    with torch.no_grad():
        assert torch.equal(model(ids), rotary(ids))


def test_kernels_take_learned_frequencies():
    """That of rotary where they get no gradient, and one that computes it. Results are the same."""
    config = tiny(GRAPEConfig(pairing="adjacent"))
    scheme = build_position(config.position, config, "decoder").to(DEVICE)
    with torch.no_grad():
        scheme.weight[0].normal_(std=8.0)
    projected = torch.randn(1, 3, 2, 4, HEAD_DIM, requires_grad=True)
    seq, step = SequenceInfo(torch.arange(3) + 2**35, None), LayerStep(Mask(), None)
    ways = []
    for trained in (True, False):
        scheme.requires_grad_(trained)
        with dispatch.force_path("triton"):
            place = scheme.for_layer(projected, scheme.prepare(seq, projected), scheme.layer_weights(0), step)
        assert scheme.kernel_why_not(place) is None
        assert isinstance(place, PhaseArgs if trained else RopeArgs)
        by_heads = scheme.on_heads(
            projected[:, :, :, :2].flatten(2, 3), projected[..., 2, :], projected[..., 3, :], place
        )
        by_projection = scheme.on_projection(projected, place)
        for x, y in zip(by_heads, by_projection, strict=True):
            torch.testing.assert_close(x, y)
        (grad,) = torch.autograd.grad(sum((x * (i + 1)).square().sum() for i, x in enumerate(by_projection)), projected)
        ways.append((*by_projection, grad))
    for x, y in zip(*ways, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match=r"GRAPEConfig.base must be"):
        GRAPEConfig(base=1.0)
    with pytest.raises(ValueError, match="'grape' positions rotate pairs of features, and a head has 7"):
        tiny("grape", head_dim=7)
