"""The kernels of a mixture of experts for one row against float64: router, choice, experts and their weighted sum."""

from __future__ import annotations

import math

import pytest
import torch
from decode_kernels import ROUNDING, bfloat16_in_the_interpreter, randn  # noqa: F401
from device import DEVICE
from expert_weights import draw, in_float64
from schemes import relative_change

from phasor.ops.decode import NormArgs, Tiles, experts_one_row, experts_ref, project_ref
from phasor.ops.decode.experts_one_row import OneRowWorkspace, router_is_small
from phasor.ops.quantized import quantize_int8

CASES = {
    # experts, dim, hidden, top_k, activation, options
    "as in Mixtral": (8, 64, 96, 2, "silu", {}),
    "biases, clamped": (6, 24, 40, 3, "swiglu-clamped", {"bias": True}),
    "one of them, not normalized": (3, 16, 33, 1, "relu", {"normalize": False}),
    "not normalized": (5, 40, 72, 2, "gelu", {"normalize": False}),
    "all experts": (3, 20, 18, 3, "gelu-tanh", {}),
    "one expert": (1, 20, 18, 1, "silu", {}),
    "many experts": (20, 33, 66, 5, "silu", {"bias": True}),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("dtype", "stages"), [(torch.float32, 1), (torch.bfloat16, 3), (torch.float16, 1)])
@pytest.mark.parametrize("case", CASES)
def test_experts_of_one_row(case, dtype, stages, monkeypatch):
    """With several tiles of everything: of the router, of outputs and of inputs."""
    monkeypatch.setattr(experts_one_row, "UP_TILES", Tiles(32, 16, 1, stages))
    monkeypatch.setattr(experts_one_row, "DOWN_TILES", Tiles(16, 32, 1))
    monkeypatch.setattr(experts_one_row, "ROUTER_TILE", 128)
    count, dim, hidden, top_k, activation, options = CASES[case]
    args = draw(count, dim, hidden, top_k, activation, **options, dtype=dtype)
    x, norm_weight = randn(1, dim, dtype=dtype), randn(dim, dtype=dtype)
    router, router_bias = (0.3 * randn(count, dim)).to(dtype), randn(count, dtype=dtype)
    workspace, wide = OneRowWorkspace(args, dtype, DEVICE), in_float64(args)
    plain = experts_one_row.experts_one_row(x, router, args, torch.empty_like(x), workspace)
    expected = experts_ref(x.double(), project_ref(x.double(), router.double()), wide)
    assert relative_change(plain.double(), expected) < 2 * ROUNDING[dtype]
    residual = randn(1, dim, dtype=dtype)
    out, norm = residual.clone(), NormArgs(norm_weight, 1.0, 1e-3)
    given = {"norm": norm, "router_bias": router_bias, "residual": out, "multiplier": 0.5}
    experts_one_row.experts_one_row(x, router, args, out, workspace, **given)
    wide_norm = norm._replace(weight=norm_weight.double())
    logits = project_ref(x.double(), router.double(), norm=wide_norm, bias=router_bias.double())
    expected = experts_ref(x.double(), logits, wide, norm=wide_norm, residual=residual.double(), multiplier=0.5)
    assert relative_change(out.double(), expected) < 2 * ROUNDING[dtype]
    assert int(workspace.arrived.sum()) == 0
    assert workspace.chosen.tolist() == logits[0].topk(top_k).indices.tolist()


@pytest.mark.parametrize("hidden", [513, 1100])
def test_sizes_of_the_tiles_in_use(hidden):
    args = draw(8, 48, hidden, 2, "silu")
    x, router = randn(1, 48), 0.3 * randn(8, 48)
    workspace = OneRowWorkspace(args, torch.float32, DEVICE)
    assert workspace.splits > 1
    found = experts_one_row.experts_one_row(x, router, args, torch.empty_like(x), workspace)
    assert relative_change(found, experts_ref(x, project_ref(x, router), args)) < 4e-6


@pytest.mark.parametrize("guess", [[0, 0], [1, 4], [-7, 1 << 30]])
def test_a_wrong_guess_costs_time_alone(guess):
    """Of the experts that were neither chosen nor guessed, the weights are not numbers."""
    args = draw(9, 20, 150, 2, "silu")
    x, router = torch.ones(1, 20), torch.zeros(9, 20)
    router[4], router[1] = 0.2, 0.1
    expected = experts_ref(x, project_ref(x, router), args)
    others = [e for e in range(9) if e not in {4, 1} | {min(max(g, 0), 8) for g in guess}]
    args.up[others], args.down[others] = math.nan, math.nan
    workspace = OneRowWorkspace(args, torch.float32, DEVICE)
    workspace.guessed = torch.tensor(guess, dtype=torch.int32)
    found = experts_one_row.experts_one_row(x, router, args, torch.empty_like(x), workspace)
    assert relative_change(found, expected) < 2e-6
    assert workspace.chosen.tolist() == [4, 1]


def test_of_equal_logits_the_first_experts_are_chosen():
    args = draw(6, 16, 16, 3, "silu")
    workspace = OneRowWorkspace(args, torch.float32, DEVICE)
    experts_one_row.experts_one_row(randn(1, 16), torch.zeros(6, 16), args, torch.empty(1, 16), workspace)
    assert workspace.chosen.tolist() == [0, 1, 2]
    assert workspace.weights.tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_choose_experts_that_exist(value):
    args = draw(5, 16, 16, 2, "silu")
    workspace = OneRowWorkspace(args, torch.float32, DEVICE)
    router, bias = torch.zeros(5, 16), torch.full((5,), value)
    experts_one_row.experts_one_row(randn(1, 16), router, args, torch.empty(1, 16), workspace, router_bias=bias)
    assert len(set(workspace.chosen.tolist())) == 2
    assert set(workspace.chosen.tolist()) <= set(range(5))


def test_routers_for_every_program():
    assert router_is_small(torch.zeros(8, 1024, dtype=torch.bfloat16))
    assert not router_is_small(torch.zeros(128, 2048, dtype=torch.bfloat16))
    assert not router_is_small(quantize_int8(torch.randn(8, 64)))
