"""Biases that are curves of distance, against their papers' formulas in float64: KERPLE, learned slopes, Sandwich."""

import math

import numpy as np
import pytest
import torch
from references import normal
from schemes import build, tiny, tokens

import phasor
from phasor.nn.positions.alibi.module import ALiBi, alibi_slopes
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo
from phasor.ops import dispatch
from phasor.ops.attention import DistanceBias, Mask, ScoreMod, attention_ref, flash

HEADS = 3
FAR = 2**36


def module_of(config, seed=0):
    torch.manual_seed(seed)
    model = tiny(config, num_heads=HEADS, num_kv_heads=HEADS)
    module = build_position(config, model, "decoder")
    module.reset_parameters(model)
    return module


def bias_of(module, queries, keys, dtype=torch.float64, max_distance=None):
    seq = SequenceInfo(queries, queries.shape[-1], max_distance=max_distance)
    return module.on_scores(module.prepare(seq, torch.zeros(1, dtype=dtype)))(queries, keys)


def kerple(r1, r2, form):
    """The log and the power kernel of the paper, one distance at a time."""
    return (lambda d: -r1 * math.log(1 + r2 * d)) if form == "log" else (lambda d: -r1 * d**r2)


@pytest.mark.parametrize("start", [0, FAR - 12])
@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_is_the_papers_formula_at_any_position(form, start):
    module = module_of(phasor.KERPLEConfig(form=form))
    r1 = [math.exp(x) for x in module.log_slope.double().tolist()]
    r2 = [math.exp(x) if form == "log" else 2 / (1 + math.exp(-x)) for x in module.curvature.double().tolist()]
    positions = start + torch.arange(12)[None]
    ours = {dtype: bias_of(module, positions, positions, dtype)[0] for dtype in (torch.float64, torch.float32)}
    for head in range(HEADS):
        formula = kerple(r1[head], r2[head], form)
        expected = torch.tensor([[formula(abs(i - j)) for j in range(12)] for i in range(12)], dtype=torch.float64)
        torch.testing.assert_close(ours[torch.float64][head], expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours[torch.float32][head].double(), expected, rtol=1e-5, atol=0)
    far = bias_of(module, positions[:, -1:] + FAR, positions[:, -1:])[0, :, 0, 0].tolist()
    assert far == pytest.approx([kerple(a, b, form)(FAR) for a, b in zip(r1, r2, strict=True)], rel=1e-12)


def test_kerple_starts_in_the_papers_range_and_cannot_leave_it():
    log, power = (module_of(phasor.KERPLEConfig(form=form)) for form in ("log", "power"))
    with torch.no_grad():
        for form, module, most in (("log", log, (2, 1)), ("power", power, (1, 2))):
            bias = module.prepare(None, torch.zeros(1))
            curvature = bias.rates if form == "log" else bias.powers
            assert ((bias.slopes > 0) & (bias.slopes < most[0])).all()
            assert ((curvature > 0) & (curvature < most[1])).all()
        power.curvature.fill_(50.0)
        assert (power.prepare(None, torch.zeros(1)).powers <= 2).all()


def sandwich(width, heads, count, base=1e4):
    """The inner products of the code in the paper's appendix, by numpy."""
    frequencies = base ** (-2 * np.arange(width // 2) / width)
    angles = np.arange(count)[:, None] * frequencies
    codes = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return (codes @ codes.T)[None] / (np.arange(1, heads + 1) * 8 / heads)[:, None, None]


def test_sandwich_is_the_papers_formula_by_table_and_by_codes():
    module, expected = module_of(phasor.SandwichPositionConfig()), torch.tensor(sandwich(128, HEADS, 40))
    positions = torch.arange(40)[None]
    seq = SequenceInfo(positions, 40, max_distance=39)
    assert isinstance(module.prepare(seq, torch.zeros(1)), DistanceBias)
    for ours in (
        bias_of(module, positions, positions, max_distance=39),
        bias_of(module, positions, positions),
        bias_of(module, positions + FAR - 40, positions + FAR - 40),
    ):
        torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-6)  # frequencies are exact to 2^-29 there
    by_gap = bias_of(module, torch.tensor([[FAR]]), torch.tensor([[0, 7]]))
    inner = [sum(phasor.Rotary(head_dim=128).cos_sin(torch.tensor([d]))[0].double().sum(-1)) for d in (FAR, FAR - 7)]
    torch.testing.assert_close(by_gap[0, 0, 0] * 8 / HEADS, torch.stack(inner), rtol=0, atol=1e-5)


def test_learned_slopes_start_as_the_fixed_ones_and_are_learned():
    fixed, learned = (ALiBi(phasor.ALiBiConfig(learned=x), num_heads=6) for x in (False, True))
    learned.reset_parameters(tiny("alibi"))
    positions = torch.arange(9)[None]
    torch.testing.assert_close(*(bias_of(m, positions, positions) for m in (fixed, learned)), rtol=1e-6, atol=0)
    bias_of(learned, positions, positions).sum().backward()
    total = sum(abs(i - j) for i in range(9) for j in range(9))
    expected = torch.tensor([-slope * total for slope in alibi_slopes(6)])
    torch.testing.assert_close(learned.log_slope.grad, expected, rtol=1e-5, atol=0)


CURVES = {
    "kerple": (phasor.KERPLEConfig(), {}),
    "kerple-power": (phasor.KERPLEConfig(form="power"), {}),
    "alibi-learned": (phasor.ALiBiConfig(learned=True), {}),
    "sandwich": (phasor.SandwichPositionConfig(width=16), {"max_distance": 20}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CURVES)
def test_they_take_the_fast_kernel_forward_and_backward(name):
    """Values and the gradients of what is learned, against all scores at once in float64."""
    pytest.importorskip("triton")
    config, known = CURVES[name]
    positions, mask, found = torch.arange(21)[None], Mask(causal=True, window=17), []
    for dtype in (torch.float32, torch.float64):
        module = module_of(config).to(dtype)
        q, k, v = (normal(1, 21, HEADS, 16, seed=s).to(dtype).requires_grad_() for s in (1, 2, 3))
        bias = module.on_scores(module.prepare(SequenceInfo(positions, 21, **known), q))
        score_mod = ScoreMod(scale=0.3, bias=bias, query_positions=positions, key_positions=positions)
        if dtype == torch.float32:
            with dispatch.force_path("triton"):
                assert flash.flash_unsupported_reason(q, k, v, mask, score_mod) is None
                y = flash.flash_attention(q, k, v, mask, score_mod)
        else:
            y = attention_ref(q, k, v, mask, score_mod)[0]
        found.append([y, *torch.autograd.grad(y.pow(3).sum(), [q, k, v, *module.parameters()])])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CURVES)
def test_models_learn_through_them_as_in_float64(name):
    """Gradients of a whole model, those of the scheme's weights among them."""
    grads = []
    for dtype in (torch.float32, torch.float64):
        model = build(tiny(CURVES[name][0])).to(dtype)
        model(tokens(2, 20)).square().mean().backward()
        grads.append({n: w.grad.double() for n, w in model.named_parameters() if w.grad is not None})
    assert name == "sandwich" or any("log_slope" in n for n in grads[0])
    for n, expected in grads[1].items():
        torch.testing.assert_close(grads[0][n], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: phasor.KERPLEConfig(form="linear"), "'log'"),
        (lambda: phasor.SandwichPositionConfig(width=7), "even"),
        (lambda: phasor.SandwichPositionConfig(base=1.0), "greater than 1"),
        (lambda: phasor.SandwichPositionConfig(max_ratio=0.0), "greater than 0"),
    ],
)
def test_bad_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
