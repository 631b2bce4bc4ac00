"""Norms, feed-forward networks, experts and placements against plain float64 references, gradients included."""

import math
from itertools import product

import mpmath
import pytest
import torch
import torch.nn.functional as F
from references import SINGLE, assert_same, normal, plain_norm, redraw

from phasor.config import (
    ExpertsConfig,
    FeedForwardConfig,
    LayerNormConfig,
    ModelConfig,
    NoNormConfig,
    RMSNormConfig,
    SwiGLUClampedConfig,
)
from phasor.nn.feed_forward import FeedForward, activate
from phasor.nn.grouped_matmul import grouped_matmul, grouped_matmul_ref
from phasor.nn.moe import Experts, balancing_loss
from phasor.nn.norm import build_norm
from phasor.nn.residual import build_residual, deepnorm_constants
from phasor.ops.dispatch import force_path

NORMS = {
    "layernorm": LayerNormConfig(eps=1e-3),
    "layernorm-no-bias": LayerNormConfig(eps=1e-3, bias=False),
    "rmsnorm": RMSNormConfig(eps=1e-3),
    "rmsnorm-unit-offset": RMSNormConfig(eps=1e-3, unit_offset=True),
    "layernorm-unit-offset": LayerNormConfig(eps=1e-3, unit_offset=True),
    "none": NoNormConfig(),
}


@pytest.mark.parametrize("shape", [(60,), (7, 13)], ids=["vector", "heads"])
@pytest.mark.parametrize("config", NORMS.values(), ids=NORMS)
def test_norm_is_its_formula(config, shape):
    norm = redraw(build_norm(config, *shape))
    x = (3 * normal(2, 63, *shape) + 1).requires_grad_()
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    assert (bias is not None) == (isinstance(config, LayerNormConfig) and config.bias)
    assert_same(norm(x), plain_norm(x, config, weight, bias), [x, *norm.parameters()])


@pytest.mark.parametrize("config", NORMS.values(), ids=NORMS)
def test_fresh_norm_leaves_the_scale_alone(config):
    x = normal(5, 73)
    norm = build_norm(config, 73).double()
    zero = torch.zeros((), dtype=torch.float64)
    ones = zero if getattr(config, "unit_offset", False) else zero + 1
    torch.testing.assert_close(norm(x), plain_norm(x, config, ones, zero))


@pytest.mark.parametrize("shape", [(60,), (7, 13)], ids=["vector", "heads"])
@pytest.mark.parametrize("config", list(NORMS.values())[:-1], ids=list(NORMS)[:-1])
def test_norm_of_bfloat16_rounds_once(config, shape):
    """Computed in at least float32: the result is the true one rounded to bfloat16, no further off than that."""
    norm = redraw(build_norm(config, *shape), torch.bfloat16)
    x = (30 * normal(63, *shape) + 100).to(torch.bfloat16)
    weight, bias = (None if p is None else p.double() for p in (norm.weight, getattr(norm, "bias", None)))
    expected = plain_norm(x.double(), config, weight, bias)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # half a unit in the last place of bfloat16 is 2^-9 of the power of two above; a little float32 noise at the ties
    power = torch.exp2(torch.floor(torch.log2(expected.abs())) + 1)
    assert ((y.double() - expected).abs() <= 2**-9 * power * 1.01 + 1e-5).all()


def erf_gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return float(1 / (1 + mpmath.exp(-x)))


PLAIN = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x * sigmoid(x),
    "gelu": erf_gelu,
    "gelu-tanh": tanh_gelu,
    "xielu": lambda x: 0.8 * x**2 + 0.5 * x if x > 0 else 0.8 * (math.expm1(x) - x) + 0.5 * x,
}
GATED = {
    "glu": lambda g, u: sigmoid(g) * u,
    "reglu": lambda g, u: max(g, 0.0) * u,
    "swiglu": lambda g, u: g * sigmoid(g) * u,
    "geglu": lambda g, u: erf_gelu(g) * u,
    "geglu-tanh": lambda g, u: tanh_gelu(g) * u,
}


def clamped_swiglu(gate, up, limit, gain):
    gate, up = min(gate, limit), max(min(up, limit), -limit)
    return gate * sigmoid(gain * gate) * (up + 1)


def slope(f, x, step=1e-5):
    return (f(x + step) - f(x - step)) / (2 * step)


POINTS = [-40.0, -9.3, -7.1, -3.0, -1.0, -0.2, 1e-3, 0.7, 1.9, 6.9, 7.3, 31.0]


@pytest.mark.parametrize("name", PLAIN)
def test_activation_is_its_formula(name):
    x = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    y = activate(x, FeedForwardConfig(activation=name).activation)
    (grad,) = torch.autograd.grad(y.sum(), x)
    expected = [PLAIN[name](p) for p in POINTS]
    torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    # central differences with step 1e-5 are off by about 1e-10
    slopes = [slope(PLAIN[name], p) for p in POINTS]
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "given"),
    [*((name, {}) for name in GATED), *(("swiglu-clamped", given) for given in ({}, {"limit": 2.5}, {"gain": 0.8}))],
)
def test_gated_activation_is_its_formula(name, given):
    formula = GATED.get(name) or (lambda g, u: clamped_swiglu(g, u, **{"limit": 7.0, "gain": 1.702} | given))
    pairs = list(product(POINTS, POINTS))
    gate, up = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    x = torch.cat((gate, up)).requires_grad_()  # the gate comes first
    y = activate(x, FeedForwardConfig(activation={"kind": name, **given}).activation)
    (grad,) = torch.autograd.grad(y.sum(), x)
    expected = torch.tensor([formula(g, u) for g, u in pairs], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-12)
    slopes = [slope(lambda v, u=u: formula(v, u), g) for g, u in pairs]
    slopes += [slope(lambda v, g=g: formula(g, v), u) for g, u in pairs]
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_gelu_is_within_double_precision_of_the_integral():
    """`Phi` by its definition, the integral of the normal density, at thirty digits."""
    mpmath.mp.dps = 30
    for point in (-5.0, -0.3, 0.0, 2.2):
        phi = mpmath.ncdf(point)
        ours = activate(torch.tensor(point, dtype=torch.float64), FeedForwardConfig(activation="gelu").activation)
        assert float(ours) == pytest.approx(float(point * phi), rel=1e-12, abs=1e-16)


def plain_activation(x, config):
    """Torch arithmetic on the formulas tested above."""

    def phi(t):
        return 0.5 * (1 + torch.erf(t / math.sqrt(2)))

    if not config.gated:
        return {"relu": x * (x > 0), "gelu": x * phi(x)}[config.activation.kind]
    width = x.shape[-1] // 2
    gate, up = x[..., :width], x[..., width:]
    if config.activation.kind == "swiglu-clamped":
        limit = config.activation.limit
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return {"swiglu": gate / (1 + torch.exp(-gate)), "geglu": gate * phi(gate)}[config.activation.kind] * up


def plain_feedforward(x, config, up, down, up_bias, down_bias):
    """`up` is [in, hidden], `down` [hidden, out]."""
    hidden = x @ up if up_bias is None else x @ up + up_bias
    y = plain_activation(hidden, config) @ down
    return y if down_bias is None else y + down_bias


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu", "geglu", "swiglu-clamped"])
def test_feedforward_is_its_formula(activation, bias):
    limit = {"limit": 3.0} if activation == "swiglu-clamped" else {}
    config = FeedForwardConfig(activation={"kind": activation, **limit}, bias=bias)
    network = redraw(FeedForward(config, 13, 73))
    x = normal(3, 7, 13).requires_grad_()
    expected = plain_feedforward(
        x, config, network.up.weight.T, network.down.weight.T, network.up.bias, network.down.bias
    )
    assert_same(network(x), expected, [x, *network.parameters()])


def plain_experts(x, network, config):
    """One token at a time, every one of its experts by itself."""
    chosen_of, rows = [], []
    experts = config.experts
    for token in x.flatten(0, -2):
        logits = network.router.weight @ token
        if network.router.bias is not None:
            logits = logits + network.router.bias
        probability = torch.exp(logits) / torch.exp(logits).sum()
        values = probability.tolist()
        best = sorted(range(experts.num_experts), key=lambda e, values=values: -values[e])[: experts.top_k]
        total = sum(probability[e] for e in best) if experts.normalize else 1.0
        y = torch.zeros_like(token)
        for e in best:
            up_bias = None if network.up_bias is None else network.up_bias[e]
            down_bias = None if network.down_bias is None else network.down_bias[e]
            y = y + probability[e] / total * plain_feedforward(
                token, config, network.up[e], network.down[e], up_bias, down_bias
            )
        if network.shared is not None:
            shared = network.shared
            extra = plain_feedforward(
                token, config, shared.up.weight.T, shared.down.weight.T, shared.up.bias, shared.down.bias
            )
            gate = 1.0 if network.shared_gate is None else torch.sigmoid(network.shared_gate.weight[0] @ token)
            y = y + gate * extra
        chosen_of.append(best)
        rows.append(y)
    return torch.stack(rows).view(x.shape), chosen_of


EXPERTS = {
    "normalized": FeedForwardConfig(activation="swiglu", experts=ExpertsConfig(num_experts=5, top_k=2)),
    "not-normalized": FeedForwardConfig(
        activation="geglu", experts=ExpertsConfig(num_experts=5, top_k=3, normalize=False)
    ),
    "one": FeedForwardConfig(activation="relu", experts=ExpertsConfig(num_experts=3, top_k=1, normalize=False)),
    "all": FeedForwardConfig(activation="gelu", experts=ExpertsConfig(num_experts=3, top_k=3)),
    "biases": FeedForwardConfig(
        activation=SwiGLUClampedConfig(limit=2.0),
        bias=True,
        experts=ExpertsConfig(num_experts=4, router_bias=True),
    ),
    "shared": FeedForwardConfig(activation="swiglu", experts=ExpertsConfig(num_experts=4, hidden_dim=9, shared_dim=11)),
    "shared-gated": FeedForwardConfig(
        activation="swiglu", bias=True, experts=ExpertsConfig(num_experts=4, shared_dim=16, shared_gate=True)
    ),
}


def make_experts(config, dim, hidden, dtype):
    network = redraw(Experts(config, dim, hidden), dtype)
    with torch.no_grad():  # keep the activations near one
        for parameter in (network.up, network.down):
            parameter.mul_(dim**-0.5)
    return network


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
def test_experts_are_the_weighted_sum_over_their_tokens(config):
    network = make_experts(config, 7, 13, torch.float64)
    x = normal(3, 21, 7).requires_grad_()
    recorded = []
    y = network(x, recorded)
    expected, _ = plain_experts(x, network, config)
    assert recorded[0].shape == (3, 21, config.experts.num_experts)
    assert_same(y, expected, [x, *network.parameters()])


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize(("dim", "hidden"), [(16, 24), (7, 13)], ids=["grouped-matmul", "odd-sizes"])
def test_experts_in_float32(config, dim, hidden):
    """Sizes in multiples of 16 bytes go through torch's grouped matmul, others through the reference."""
    network = make_experts(config, dim, hidden, torch.float32)
    x = normal(2, 11, dim, dtype=torch.float32).requires_grad_()
    expected, _ = plain_experts(x, network, config)
    assert_same(network(x), expected, [x, *network.parameters()], SINGLE)


@pytest.mark.sample(4)
@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
def test_experts_with_kernels_for_routing(config):
    network = make_experts(config, 16, 24, torch.float32)
    x = normal(1, 9, 16, dtype=torch.float32).requires_grad_()
    expected, _ = plain_experts(x, network, config)
    with force_path("triton"):
        assert_same(network(x), expected, [x, *network.parameters()], SINGLE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["normalized", "not-normalized", "biases"])
def test_experts_as_one_operation(name, dtype):
    """The same as by parts, whose activation is saved and not recomputed; bfloat16 has 8 bits."""
    network = make_experts(EXPERTS[name], 16, 24, dtype)
    tokens = normal(9, 16, dtype=dtype).requires_grad_()
    experts = [w for w in (network.up, network.down, network.up_bias, network.down_bias) if w is not None]
    with force_path("triton"):
        assert network.one_operation_why_not(tokens, network.router(tokens)) is None
        for trained in (experts, []):
            for weight in experts:
                weight.requires_grad_(bool(trained))
            ours, by_parts = (
                run(tokens, network.router(tokens)) for run in (network.by_one_operation, network.by_groups)
            )
            assert ours.grad_fn.name().startswith("phasor_grouped_experts")
            inputs = [tokens, *network.router.parameters(), *trained]
            assert_same(ours, by_parts, inputs, SINGLE if dtype == torch.float32 else 1e-2)


def test_why_experts_are_not_one_operation():
    gated, plain = (make_experts(EXPERTS[name], 16, 24, torch.float32) for name in ("normalized", "all"))
    odd = make_experts(EXPERTS["normalized"], 16, 9, torch.float32)
    tokens = normal(9, 16, dtype=torch.float32)

    def why_not(network, given=tokens):
        return network.one_operation_why_not(given, network.router(tokens))

    assert why_not(gated) == ("the tensors are not on a GPU" if tokens.device.type == "cpu" else None)
    with force_path("triton"):
        assert why_not(gated) is None
        assert why_not(plain) == "the activation has no kernel"
        assert why_not(odd) == "torch's grouped matrix product does not take these sizes and dtypes"
        assert why_not(gated, tokens.bfloat16()) == why_not(odd)
        with torch.no_grad():
            assert why_not(gated) == "no gradient is needed"
        with torch.autocast(tokens.device.type, torch.bfloat16):
            assert why_not(gated) == "autocast sets another dtype"
        gated.dropout.p = 0.5
        assert why_not(gated) == "hidden features are dropped out"


def test_torchs_grouped_matmul_is_used_where_sizes_allow(monkeypatch):
    calls = []
    grouped = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or grouped(*a, **k))
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    for dim, hidden in ((16, 24), (7, 13)):
        x, weight = normal(7, dim, dtype=torch.float32), normal(3, dim, hidden, dtype=torch.float32)
        x.requires_grad_(), weight.requires_grad_()
        for run in (grouped_matmul, grouped_matmul_ref):
            expected = torch.cat((x[:3] @ weight[0], x[3:] @ weight[2]))
            assert_same(run(x, weight, ends), expected, [x, weight], SINGLE)
    assert calls == [1]


def test_balancing_loss_is_its_formula():
    """Experts times the sum over experts of (share of tokens) x (mean probability), the mean over layers."""
    logits = [normal(2, 9, 5, seed=s) for s in (1, 2)]
    attention_mask = torch.ones(2, 9, dtype=torch.bool)
    attention_mask[0, :4] = False
    for real in (None, attention_mask):
        total = 0.0
        for layer in logits:
            tokens = layer[attention_mask] if real is not None else layer.flatten(0, 1)
            share, mean = [0.0] * 5, [0.0] * 5
            for token in tokens.softmax(-1).tolist():
                for e in range(5):
                    mean[e] += token[e] / len(tokens)
                for e in sorted(range(5), key=lambda e: -token[e])[:2]:
                    share[e] += 1 / len(tokens)
            total += 5 * sum(s * m for s, m in zip(share, mean, strict=True)) / len(logits)
        assert float(balancing_loss(logits, top_k=2, attention_mask=real)) == pytest.approx(total, rel=1e-6)


def placements(f, g, norms, x, m, alpha):
    """The block of two sub-layers as its paper writes it; `norms` are functions, `m` the residual multiplier."""
    a, b, *more = norms
    return {
        "pre": lambda: (y := x + m * f(a(x))) + m * g(b(y)),
        "post": lambda: b((y := a(x + m * f(x))) + m * g(y)),
        "sandwich": lambda: (y := x + m * b(f(a(x)))) + m * more[1](g(more[0](y))),
        "deepnorm": lambda: b(alpha * (y := a(alpha * x + m * f(x))) + m * g(y)),
        "output": lambda: (y := x + m * a(f(x))) + m * b(g(y)),
        "parallel": lambda: x + m * f(a(x)) + m * g(a(x)),
        "parallel-two-norms": lambda: x + m * f(a(x)) + m * g(b(x)),
    }


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("name", ["pre", "post", "sandwich", "deepnorm", "output", "parallel", "parallel-two-norms"])
def test_placement_is_its_equation(name, multiplier):
    placement = {"kind": name.removesuffix("-two-norms"), "multiplier": multiplier}
    if name == "parallel-two-norms":
        placement["shared_norm"] = False
    norm = RMSNormConfig(eps=1e-3)
    model = ModelConfig(vocab_size=9, dim=13, num_layers=18, num_heads=1, norm=norm, placement=placement)
    residual = redraw(build_residual(model, "decoder", 2))
    assert len(residual.norms) == {"sandwich": 4, "parallel": 1}.get(name, 2)
    own = [lambda x, w=n.weight: plain_norm(x, norm, w, None) for n in residual.norms]
    own += [own[0]] * (4 - len(own))
    left, right = normal(13, 13, seed=3), normal(13, 13, seed=4)
    x = normal(3, 7, 13).requires_grad_()

    def f(x):
        return torch.tanh(x @ left)

    def g(x):
        return torch.tanh(x @ right)

    alpha = (2 * 18) ** 0.25  # DeepNorm's for a decoder of 18 layers
    expected = placements(f, g, own, x, multiplier, alpha)[name]()
    assert_same(residual(x, f, g), expected, [x, *residual.parameters()])


@pytest.mark.parametrize(
    ("kind", "norms"), [("pre", 3), ("post", 3), ("sandwich", 6), ("deepnorm", 3), ("output", 3), ("parallel", 1)]
)
def test_three_sublayers_have_their_norms(kind, norms):
    model = ModelConfig(
        vocab_size=9, dim=8, num_layers=2, num_heads=1, shape="encoder-decoder", placement=kind, norm="rmsnorm"
    )
    assert len(build_residual(model, "decoder", 3).norms) == norms


def test_deepnorm_constants_are_the_papers():
    """DeepNet (Wang et al. 2022), figure 2, for N encoder and M decoder layers."""
    N, M = 18, 6

    def constants(shape, side, **depth):
        model = ModelConfig(vocab_size=9, dim=8, num_heads=1, shape=shape, placement="deepnorm", **depth)
        return deepnorm_constants(model, side)

    assert constants("encoder", "encoder", num_layers=N) == pytest.approx(((2 * N) ** 0.25, (8 * N) ** -0.25))
    assert constants("decoder", "decoder", num_layers=M) == pytest.approx(((2 * M) ** 0.25, (8 * M) ** -0.25))
    both = {"num_layers": M, "num_encoder_layers": N}
    assert constants("encoder-decoder", "encoder", **both) == pytest.approx(
        (0.81 * (N**4 * M) ** (1 / 16), 0.87 * (N**4 * M) ** (-1 / 16))
    )
    assert constants("encoder-decoder", "decoder", **both) == pytest.approx(((3 * M) ** 0.25, (12 * M) ** -0.25))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"feedforward": {"activation": "xielu", "experts": {"num_experts": 4}}}, "'xielu' learns weights"),
        ({"shape": "encoder", "head": {"kind": "mlm", "activation": "xielu"}}, "masked head 'xielu'.*gelu"),
    ],
)
def test_an_activation_that_learns_is_refused_where_it_has_no_weights(given, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1, **given)
