"""The kernels of a mixture of experts against float64: routing, the experts in use, and their weighted sum."""

from __future__ import annotations

import math

import pytest
import torch
from decode_kernels import ROUNDING, bfloat16_in_the_interpreter, randn, rms_norm  # noqa: F401
from device import DEVICE
from expert_weights import draw, in_float64
from schemes import relative_change

from phasor import ExpertsConfig, FeedForwardConfig
from phasor.nn.moe import Experts
from phasor.ops.decode import NormArgs, Tiles, experts, experts_ref


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and splits at tiny sizes."""
    monkeypatch.setattr(experts, "ONE_ROW_TILES", Tiles(16, 16, 1))
    monkeypatch.setattr(experts, "TILES", Tiles(16, 32, 1, 2))  # 16 inputs in float32


CASES = {
    # rows, experts, dim, hidden, top_k, activation, options
    "one row": (1, 5, 40, 72, 2, "silu", {}),
    "one row, biases, clamped": (1, 6, 24, 40, 3, "swiglu-clamped", {"bias": True}),
    "one row, not normalized": (1, 3, 16, 33, 1, "relu", {"normalize": False}),
    "more choices than experts": (5, 4, 40, 70, 2, "silu", {}),
    "rows, biases, clamped": (3, 12, 24, 40, 3, "swiglu-clamped", {"bias": True}),
    "rows, not normalized": (17, 3, 20, 18, 2, "gelu", {"normalize": False}),
    "all experts": (2, 3, 20, 18, 3, "gelu-tanh", {}),
}


@pytest.mark.sample(5)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_experts(case, dtype):
    rows, count, dim, hidden, top_k, activation, options = CASES[case]
    args = draw(count, dim, hidden, top_k, activation, **options, dtype=dtype)
    x, norm_weight, logits = randn(rows, dim, dtype=dtype), randn(dim, dtype=dtype), randn(rows, count, dtype=dtype)
    logits += 0.1 * torch.arange(count).to(dtype)  # no two are equal
    workspace = experts.ExpertsWorkspace(rows, args, dtype, DEVICE)
    plain = experts.experts(x, logits, args, torch.empty(rows, dim, dtype=dtype), workspace)
    wide = in_float64(args)
    assert relative_change(plain.double(), experts_ref(x.double(), logits.double(), wide)) < 2 * ROUNDING[dtype]
    residual = randn(rows, dim, dtype=dtype)
    out, norm = residual.clone(), NormArgs(norm_weight, 1.0, 1e-3)
    experts.experts(x, logits, args, out, workspace, norm=norm, residual=out, multiplier=0.5)
    normed = rms_norm(x.double(), norm_weight.double(), 1.0, 1e-3)
    expected = residual.double() + 0.5 * experts_ref(normed, logits.double(), wide)
    assert relative_change(out.double(), expected) < 2 * ROUNDING[dtype]
    assert int(workspace.arrived.sum()) == 0
    given = {"norm": NormArgs(norm_weight.double(), 1.0, 1e-3), "residual": residual.double(), "multiplier": 0.5}
    assert relative_change(experts_ref(x.double(), logits.double(), wide, **given), expected) < 1e-13


@pytest.mark.parametrize("name", ["swiglu", "swiglu-clamped", "relu"])
def test_the_reference_equals_the_module_in_float64(name):
    config = FeedForwardConfig(
        activation=name, bias=True, experts=ExpertsConfig(num_experts=5, top_k=2, router_bias=True)
    )
    network = Experts(config, 12, 10).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_()
        x = torch.randn(7, 12, dtype=torch.float64)
        found = experts_ref(x, network.router(x), network.kernel_args())
        assert relative_change(found, network(x)) < 1e-12


def test_only_experts_in_use_are_read():
    """The weights of all other experts are not numbers."""
    args = draw(9, 20, 18, 2, "silu")
    logits = torch.full((2, 9), -5.0)
    logits[0, 1], logits[0, 7], logits[1, 7], logits[1, 4] = 2.0, 1.0, 3.0, 2.0
    x, unused = randn(2, 20), [0, 2, 3, 5, 6, 8]
    expected = experts_ref(x, logits, args)
    args.up[unused], args.down[unused] = math.nan, math.nan
    workspace = experts.ExpertsWorkspace(2, args, torch.float32, DEVICE)
    found = experts.experts(x, logits, args, torch.empty(2, 20), workspace)
    assert relative_change(found, expected) < 2e-6
    assert workspace.active.tolist() == [1, 4, 7, -1]
    assert (workspace.weights > 0).sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_choose_experts_that_exist(value):
    args = draw(5, 16, 16, 2, "silu")
    workspace = experts.ExpertsWorkspace(1, args, torch.float32, DEVICE)
    experts.experts(randn(1, 16), torch.full((1, 5), value), args, torch.empty(1, 16), workspace)
    assert len(set(workspace.active.tolist())) == 2
    assert set(workspace.active.tolist()) <= set(range(5))


def test_rows_that_overflow_in_experts_of_others_stay_finite():
    args = draw(2, 16, 16, 1, "relu")
    args.up[0] = 1e38
    x, logits = torch.ones(2, 16), torch.tensor([[-9.0, 9.0], [9.0, -9.0]])
    workspace = experts.ExpertsWorkspace(2, args, torch.float32, DEVICE)
    found = experts.experts(x, logits, args, torch.empty(2, 16), workspace)
    assert relative_change(found[:1], experts_ref(x[:1], logits[:1], args)) < 2e-6
