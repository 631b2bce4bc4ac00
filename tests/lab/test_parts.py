"""The view Parts: its numbers against torch's own functions and against the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phasor.config import ActivationConfig, NormConfig, PlacementConfig
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.parts import softmax_gradient
from phasor.lab.views import import_views

import_views()

ACTIVATIONS = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "xielu": lambda x: torch.where(x > 0, 0.8 * x * x, 0.8 * (torch.expm1(x.clamp(max=-1e-6)) - x)) + 0.5 * x,
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "swiglu": F.silu,
    "swiglu-clamped": lambda x: 2 * x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
    "geglu": F.gelu,
    "geglu-tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def ask(name, **body):
    return ENDPOINTS[f"/api/parts/{name}"].answer(body)


def test_the_variance_of_a_product_is_the_dimension():
    found = ask("scale", head_dim=256, keys=256)
    assert found["plain"]["variance"] == pytest.approx(256, rel=0.1)
    assert found["divided"]["variance"] == pytest.approx(1, rel=0.1)
    assert found["plain"]["variance"] / found["divided"]["variance"] == pytest.approx(256)
    variances = found["curves"]["plain"]["variance"]
    assert np.polyfit(np.log2(found["curves"]["head_dim"]), np.log2(variances), 1)[0] == pytest.approx(1, abs=0.05)


def test_softmax_without_the_scale_is_one_hot_and_its_gradient_vanishes():
    curves = ask("scale")["curves"]
    assert curves["plain"]["largest"][-1] > 0.9 > 0.2 > curves["divided"]["largest"][-1]
    assert curves["plain"]["gradient"][-1] < 0.5 * curves["divided"]["gradient"][-1]


def test_the_gradient_of_a_softmax_is_its_jacobian():
    x = torch.randn(5, 7, dtype=torch.float64) * 3
    for row in x:
        jacobian = torch.autograd.functional.jacobian(lambda y: y.softmax(-1), row)
        assert float(softmax_gradient(row.softmax(-1))) == pytest.approx(float(jacobian.norm()), rel=1e-12)


@pytest.mark.parametrize(("way", "scale"), [("divided", 48**-0.5), ("plain", 1.0)])
def test_weights_are_the_mean_of_sorted_softmaxes(way, scale):
    """So that the largest one of the plot is the one of the title."""
    found = ask("scale", head_dim=48, keys=16, seed=3)
    draws = torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, 48, dtype=torch.float64, generator=draws) for n in (found["queries"], 16))
    weights = (q @ k.T * scale).softmax(-1).sort(descending=True).values.mean(0)
    assert np.allclose(found[way]["weights"], weights, atol=1e-12)
    assert found[way]["weights"][0] == pytest.approx(found[way]["largest"], rel=1e-12)


def test_activations_and_slopes_are_those_of_torch():
    assert set(ACTIVATIONS) == set(ActivationConfig.kinds)
    found = ask("curves", reach=9.0, points=41)
    x = torch.tensor(found["x"], dtype=torch.float64, requires_grad=True)
    for kind, function in ACTIVATIONS.items():
        y = function(x)
        (slopes,) = torch.autograd.grad(y.sum(), x)
        assert np.allclose(found["curves"][kind]["values"], y.detach(), atol=1e-12), kind
        assert np.allclose(found["curves"][kind]["slopes"], slopes, atol=1e-12), kind


@pytest.mark.parametrize("kind", [kind for kind, cls in ActivationConfig.kinds.items() if cls.gated])
def test_a_gate_map_is_gate_times_up(kind):
    found = ask("gate", activation=kind, reach=2.0, points=9)
    rows = np.frombuffer(found.data, dtype="<f4").reshape(found.shape)
    axis = torch.linspace(-2, 2, 9, dtype=torch.float64)
    up = axis.flip(0)[:, None]
    factor = (up + 1) / 2 if kind == "swiglu-clamped" else up
    assert np.allclose(rows, ACTIVATIONS[kind](axis) * factor, atol=1e-6)


def test_norms_are_those_of_torch():
    found = ask("norms", dim=48, mean=5.0, std=2.0, outlier=30.0, seed=4)
    x = torch.tensor(found["vector"], dtype=torch.float64)
    assert set(found["norms"]) == set(NormConfig.kinds)
    assert np.allclose(found["norms"]["layernorm"]["vector"], F.layer_norm(x, (48,), eps=1e-5), atol=1e-12)
    assert np.allclose(found["norms"]["rmsnorm"]["vector"], F.rms_norm(x, (48,), eps=1e-6), atol=1e-12)
    assert found["norms"]["none"]["vector"] == found["vector"]
    assert found["norms"]["rmsnorm"]["moments"]["rms"] == pytest.approx(1, abs=1e-6)
    assert abs(found["norms"]["layernorm"]["moments"]["mean"]) < 1e-12


def test_the_vector_has_the_moments_that_were_asked_for():
    moments = ask("norms", mean=-3.0, std=0.25)["moments"]
    assert moments["mean"] == pytest.approx(-3)
    assert moments["std"] == pytest.approx(0.25)
    assert moments["rms"] == pytest.approx(math.hypot(3, 0.25))


def plain_profile(kind, num_layers, dim, seed):
    """The sizes of the residual stream by the equations of the placements, with RMSNorm."""
    draws = torch.Generator().manual_seed(seed)
    alpha, beta = (2 * num_layers) ** 0.25, (8 * num_layers) ** -0.25
    step = {
        "pre": lambda x, f: x + f(norm(x)),
        "post": lambda x, f: norm(x + f(x)),
        "sandwich": lambda x, f: x + norm(f(norm(x))),
        "deepnorm": lambda x, f: norm(alpha * x + beta * f(x)),
        "output": lambda x, f: x + norm(f(x)),
    }

    def norm(x):
        return F.rms_norm(x, (dim,), eps=1e-6)

    x = torch.randn(8, dim, dtype=torch.float64, generator=draws)
    sizes = [x.square().mean().sqrt()]
    for one, two in torch.randn(num_layers, 2, dim, dim, dtype=torch.float64, generator=draws) * dim**-0.5:
        if kind == "parallel":
            x = x + norm(x) @ one + norm(x) @ two
        else:
            for w in (one, two):
                x = step[kind](x, lambda y, w=w: y @ w)
        sizes.append(x.square().mean().sqrt())
    return [float(size) for size in sizes]


@pytest.mark.parametrize("kind", sorted(PlacementConfig.kinds))
def test_streams_are_those_of_the_equations(kind):
    found = ask("placement", placement=kind, num_layers=5, dim=24, seed=2)
    assert np.allclose(found["stream"], plain_profile(kind, 5, 24, 2), rtol=1e-9)
    assert len(found["gradient"]) == 6
    assert min(found["gradient"]) > 0


def test_streams_grow_before_norms_and_stay_after_them():
    grown, kept = (ask("placement", placement=kind)["stream"][-1] for kind in ("pre", "post"))
    assert grown > 3
    assert kept == pytest.approx(1, abs=1e-3)
    last = {kind: ask("placement", placement=kind)["gradient"][-1] for kind in ("pre", "post")}
    assert last["post"] > 2 * last["pre"]


@pytest.mark.parametrize(
    ("name", "body", "field", "words"),
    [
        ("scale", {"head_dim": 0}, "head_dim", "at least 1"),
        ("gate", {"activation": "relu"}, "activation", "must be a gated one"),
        ("gate", {"points": 10**6}, "points", "at most 513"),
        ("norms", {"std": -1}, "std", "at least 0"),
        ("placement", {"placement": "prenorm"}, "placement", "known: pre"),
        ("placement", {"placement": {"kind": "pre", "multiplier": 1e9}}, "placement.multiplier", "between"),
        ("placement", {"num_layers": 65}, "num_layers", "at most 64"),
    ],
)
def test_a_mistake_is_one_sentence_about_its_field(name, body, field, words):
    with pytest.raises(ValueError, match=words) as caught:
        ask(name, **body)
    assert getattr(caught.value, "field", None) == field


@pytest.mark.parametrize("norm", sorted(NormConfig.kinds))
@pytest.mark.parametrize("kind", sorted(PlacementConfig.kinds))
def test_the_largest_stacks_are_finite_or_refused(kind, norm):
    body = {"placement": {"kind": kind, "multiplier": 1000.0}, "norm": norm}
    if norm == "none":
        with pytest.raises(ValueError, match="overflows: choose fewer layers"):
            ask("placement", **body, num_layers=64, dim=8, gain=10.0)
    else:
        found = ask("placement", **body, num_layers=64, dim=8, gain=10.0)
        assert all(map(math.isfinite, found["stream"] + found["gradient"]))


@pytest.mark.slow
def test_a_request_takes_little_time():
    import time

    changes = {"scale": "head_dim", "curves": "points", "gate": "points", "norms": "dim", "placement": "seed"}
    for name, field in changes.items():
        ask(name)
        times = []
        for value in range(40, 45):
            began = time.process_time()
            ask(name, **{field: value})
            times.append(time.process_time() - began)
        assert min(times) < 0.030, name  # the least: others may be using the same cores
