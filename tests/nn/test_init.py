"""Fresh weights have the spread their scheme states, role by role."""

import math

import pytest
import torch

from phasor.config import (
    ModelConfig,
)
from phasor.models.presets import PRESETS, preset
from phasor.transformer import Transformer


def assert_spread(weight, std):
    """Five standard errors of a sample's standard deviation, and of its mean."""
    weight, count = weight.detach().double(), weight.numel()
    assert float(weight.std()) == pytest.approx(std, rel=5 * (2 * count) ** -0.5)
    assert abs(float(weight.mean())) < 5 * std * count**-0.5


def qkv_rows(attention):
    by_group = attention.qkv.weight.view(attention.num_kv_heads, attention.queries_per_kv + 2, attention.head_dim, -1)
    return {"q": by_group[:, :-2], "k": by_group[:, -2], "v": by_group[:, -1]}


DIM, HIDDEN, HEADS, GROUPS, WIDTH = 96, 160, 6, 2, 20
SIZES = {"vocab_size": 150, "dim": DIM, "hidden_dim": HIDDEN, "num_heads": HEADS, "num_kv_heads": GROUPS}
SIZES |= {"head_dim": WIDTH, "num_layers": 8, "max_length": 100, "embedding": {"tied": False}}


def initial(**fields):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**SIZES | fields))


def by_role(stack):
    """Every block's weights by what they do; cross-attention included."""
    roles = {role: [] for role in ("q", "k", "v", "out", "gate", "up", "down")}
    for block in stack.blocks:
        for role, rows in qkv_rows(block.attention).items():
            roles[role].append(rows.flatten())
        roles["out"].append(block.attention.out.weight.flatten())
        if block.cross is not None:
            key_value = block.cross.kv.weight.view(GROUPS, 2, WIDTH, DIM)
            roles["q"].append(block.cross.q.weight.flatten())
            roles["k"].append(key_value[:, 0].flatten())
            roles["v"].append(key_value[:, 1].flatten())
            roles["out"].append(block.cross.out.weight.flatten())
        up = block.feedforward.up.weight
        gated = block.feedforward.config.gated
        roles["gate"].append(up[: HIDDEN if gated else 0].flatten())
        roles["up"].append(up[HIDDEN if gated else 0 :].flatten())
        roles["down"].append(block.feedforward.down.weight.flatten())
    return {role: torch.cat(parts) for role, parts in roles.items()}


def assert_spreads(stack, stds):
    roles = by_role(stack)
    for role, std in stds.items():
        if role != "gate" or len(roles["gate"]):
            assert_spread(roles[role], std)


QUERIES = HEADS * WIDTH


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_normal_initialization_with_depth(activation):
    model = initial(
        init={"kind": "normal", "std": 0.03, "by_depth": True},
        feedforward={"activation": activation},
        position="learned",
    )
    smaller = 0.03 / math.sqrt(2 * 8)
    same = dict.fromkeys(("q", "k", "v", "gate", "up"), 0.03)
    assert_spreads(model.decoder, same | {"out": smaller, "down": smaller})
    for weight in (model.tokens.weight, model.head.weight, model.decoder.positions[0].weight):
        assert_spread(weight, 0.03)


def xavier(rows, columns):
    return math.sqrt(2 / (rows + columns))


def xavier_of_roles():
    pair = GROUPS * WIDTH
    return {
        "q": xavier(QUERIES, DIM),
        "k": xavier(pair, DIM),
        "v": xavier(pair, DIM),
        "out": xavier(DIM, QUERIES),
        "gate": xavier(HIDDEN, DIM),
        "up": xavier(HIDDEN, DIM),
        "down": xavier(DIM, HIDDEN),
    }


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_xavier_initialization_sees_each_part_of_a_fused_matrix(activation):
    model = initial(init="xavier", feedforward={"activation": activation}, position="learned")
    assert_spreads(model.decoder, xavier_of_roles())
    assert_spread(model.tokens.weight, DIM**-0.5)
    assert_spread(model.head.weight, xavier(150, DIM))


@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder-decoder"])
def test_deepnorm_initialization_shrinks_values_outputs_and_feedforward(shape):
    model = initial(init="xavier", placement="deepnorm", shape=shape)
    both = (8**4 * 8) ** (1 / 16)
    beta = {"encoder": (8 * 8) ** -0.25, "decoder": (8 * 8) ** -0.25}
    if shape == "encoder-decoder":
        beta = {"encoder": 0.87 / both, "decoder": (12 * 8) ** -0.25}
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is None:
            continue
        small = {role: beta[side] if role not in "qk" else 1.0 for role in xavier_of_roles()}
        assert_spreads(stack, {role: std * small[role] for role, std in xavier_of_roles().items()})


def test_fan_in_initialization():
    model = initial(init="fan-in", feedforward={"activation": "swiglu"})
    stds = dict.fromkeys(("q", "k", "v", "gate", "up"), DIM**-0.5)
    assert_spreads(model.decoder, stds | {"out": QUERIES**-0.5, "down": HIDDEN**-0.5})
    assert_spread(model.tokens.weight, 1.0)


def test_t5_initialization():
    """T5's own: queries carry the division by sqrt(head_dim) that its scores lack."""
    model = initial(init="t5", shape="encoder-decoder", position="t5", attention={"scale": 1.0})
    stds = dict.fromkeys(("k", "v", "up"), DIM**-0.5)
    stds |= {"q": (DIM * WIDTH) ** -0.5, "out": QUERIES**-0.5, "down": HIDDEN**-0.5}
    for stack in (model.encoder, model.decoder):
        assert_spreads(stack, stds)
        assert_spread(stack.positions[0].weight, DIM**-0.5)
    assert_spread(model.tokens.weight, 1.0)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_experts_are_drawn_like_the_network_they_replace(activation):
    model = initial(init="xavier", feedforward={"activation": activation, "experts": {"num_experts": 4}})
    for block in model.decoder.blocks:
        for expert in range(4):
            assert_spread(block.feedforward.up[expert], xavier(HIDDEN, DIM))
            assert_spread(block.feedforward.down[expert], xavier(HIDDEN, DIM))


def test_fresh_biases_are_zero_and_norms_are_one():
    bias = ("q", "v", "out")
    attention = {"bias": bias, "sink_logits": True, "qk_norm": "head"}
    model = initial(attention=attention, feedforward={"bias": True}, head={"kind": "lm", "bias": True})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "bias" or ".partial_qkv_bias." in name or last == "sinks":
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert float(parameter.detach().std()) > 0, name


def test_a_model_without_weights_draws_none(monkeypatch):
    """On the meta device, drawing from a normal distribution takes a second of imports."""
    monkeypatch.setattr(torch.Tensor, "normal_", None)
    for name in PRESETS:
        with torch.device("meta"):
            assert Transformer(preset(name)).tokens.weight.is_meta
