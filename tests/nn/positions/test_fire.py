"""FIRE against the paper's formula in float64, and which path it takes."""

import math

import pytest
import torch
from references import normal
from schemes import tiny

import phasor
from phasor.nn.positions.fire.module import FIRE
from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch
from phasor.ops.attention import Mask, ScoreMod, attention, attention_ref, flash

HEADS = 3


def fire(**fields):
    torch.manual_seed(0)
    module = FIRE(phasor.FIREConfig(**fields), num_heads=HEADS)
    module.reset_parameters(tiny("fire"))
    return module


def bias_of(module, queries, keys, dtype):
    like = torch.zeros(1, dtype=dtype)
    return module.on_scores(module.prepare(SequenceInfo(queries, queries.shape[-1]), like))(queries, keys)


def formula(module, i, j):
    """`f(psi(i - j) / psi(max(i, L)))`, one score at a time: a list over heads."""
    c, limit = math.exp(float(module.log_rate.detach())), math.exp(float(module.log_threshold.detach()))
    share = math.log(c * abs(i - j) + 1) / math.log(c * max(i, limit) + 1)
    up, up_bias, down, down_bias = (w.tolist() for w in (module.up, module.up_bias, module.down, module.down_bias))
    hidden = [max(0.0, w * share + b) for w, b in zip(up, up_bias, strict=True)]
    return [b + sum(h * row[k] for h, row in zip(hidden, down, strict=True)) for k, b in enumerate(down_bias)]


@pytest.mark.parametrize("start", [0, 2**36 - 5])
def test_fire_is_the_papers_formula(start):
    module = fire(hidden_dim=5, threshold=6.0)
    positions = start + torch.arange(10)[None]
    expected = torch.tensor([[formula(module, i, j) for j in positions[0].tolist()] for i in positions[0].tolist()])
    expected = expected.double().permute(2, 0, 1)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        ours = bias_of(module.to(dtype), positions, positions, dtype)[0]
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=tolerance)


def test_positions_below_the_threshold_are_divided_by_it():
    """Up to the threshold the bias is a function of the distance; beyond it, of the share of the context."""
    module = fire(threshold=100.0).double()
    near, later = (bias_of(module, torch.tensor([[q]]), torch.tensor([[q - 7]]), torch.float64) for q in (20, 90))
    torch.testing.assert_close(near, later)
    assert not torch.allclose(near, bias_of(module, torch.tensor([[400]]), torch.tensor([[393]]), torch.float64))


def test_fire_is_computed_in_blocks_with_the_gradients_of_all_scores_at_once():
    module, positions = fire(hidden_dim=4, threshold=9.0).double(), torch.arange(300)[None]
    q, k, v = (normal(1, 300, HEADS, 4, seed=s).requires_grad_() for s in (1, 2, 3))
    mask, found = Mask(causal=True), []
    for run in (attention, lambda *args: attention_ref(*args)[0]):
        bias = module.on_scores(module.prepare(SequenceInfo(positions, 300), q))
        score_mod = ScoreMod(scale=0.5, bias=bias, query_positions=positions, key_positions=positions)
        assert score_mod.learns_bias
        y = run(q, k, v, mask, score_mod)
        found.append([y, *torch.autograd.grad(y.pow(3).sum(), [q, k, v, *module.parameters()])])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
    with dispatch.force_path("triton"):
        assert flash.flash_unsupported_reason(q.float(), k.float(), v.float(), mask, score_mod) is None
        wide = fire(hidden_dim=2000).double()
        score_mod.bias = wide.on_scores(wide.prepare(SequenceInfo(positions, 300), q))
        reason = flash.flash_unsupported_reason(q.float(), k.float(), v.float(), mask, score_mod)
        assert reason == "the network of the bias has more than 1,024 hidden units"


def test_lines_are_the_network_itself():
    """Between its knots the network is the line that is listed, for units to either side of their knots."""
    module = fire(hidden_dim=9).double()
    bias = module.on_scores(
        module.prepare(SequenceInfo(torch.zeros(1, 1, dtype=torch.int64), 1), torch.zeros(1).double())
    )
    knots, lines = bias.lines()
    share = torch.linspace(-3.0, 3.0, 401, dtype=torch.float64)
    expected = torch.relu(share[:, None] * module.up + module.up_bias) @ module.down + module.down_bias
    slope, offset = lines[torch.searchsorted(knots, share)].unbind(1)
    torch.testing.assert_close(slope * share[:, None] + offset, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"hidden_dim": 0}, "greater than 0"), ({"rate": 0.0}, "greater than 0"), ({"threshold": -1.0}, "greater than 0")],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        phasor.FIREConfig(**fields)
