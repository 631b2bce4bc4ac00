"""Which weights decay, AdamW and the average against their formulas, and the schedules against their papers'."""

import math

import pytest
import torch
from torch import nn

from phasor import Transformer, preset
from phasor.config.recipe import OptimizerConfig, ScheduleConfig
from phasor.models.presets import PRESETS
from phasor.training.optimizer import (
    EMA,
    build_optimizer,
    decay_names,
    optimizer_tensors,
    restore_optimizer,
    swap_weights,
)

TINY = {"dim": 24, "num_heads": 3, "num_layers": 2, "vocab_size": 50}


def make_model(name, **changes):
    torch.manual_seed(0)
    return Transformer(preset(name, **TINY | changes))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_decay_is_for_matrices_alone(name):
    changes = {"embedding": preset(name).embedding.replace(width=None, project="none")} if "opt" in name else {}
    with torch.device("meta"):
        model = Transformer(preset(name, **TINY | changes))
    decayed = set(decay_names(model))
    for weight, tensor in model.named_parameters():
        kept = ("norm", "bias", "tokens.", "positions.", "token_types", "sinks")
        if weight in decayed:
            assert tensor.dim() >= 2
            assert not any(word in weight.replace("_bias", ".bias") for word in kept), weight
        else:
            assert any(word in weight for word in kept), f"{weight} should decay"


def test_biases_of_experts_and_norms_of_heads_have_two_axes_and_do_not_decay():
    feedforward = {"activation": "swiglu", "bias": True, "experts": {"num_experts": 4}}
    model = make_model("llama-2", feedforward=feedforward, attention={"qk_norm": "head"})
    decayed = set(decay_names(model))
    weights = dict(model.named_parameters())
    assert weights["decoder.blocks.0.feedforward.up_bias"].dim() == 2
    assert "decoder.blocks.0.feedforward.up" in decayed
    assert not [name for name in decayed if "bias" in name or "norm" in name]


def test_every_weight_is_in_one_group_and_frozen_ones_in_none():
    model = make_model("t5")
    model.tokens.weight.requires_grad_(False)
    grouped = [w for group in build_optimizer(model, OptimizerConfig()).param_groups for w in group["params"]]
    wanted = [w for w in model.parameters() if w.requires_grad]
    assert len(grouped) == len({id(w) for w in grouped})
    assert {id(w) for w in grouped} == {id(w) for w in wanted}


def test_adamw_is_loshchilov_and_hutters():
    """Algorithm 2 of 'Decoupled weight decay regularization', in float64, four steps."""
    lr, b1, b2, eps, decay = 0.03, 0.8, 0.9, 1e-6, 0.2
    layer = nn.Linear(5, 3).double()
    config = OptimizerConfig(lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay)
    optimizer = build_optimizer(layer, config)
    plain = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    m = {name: torch.zeros_like(weight) for name, weight in plain.items()}
    v = {name: torch.zeros_like(weight) for name, weight in plain.items()}
    for t in range(1, 5):
        for name, weight in layer.named_parameters():
            g = torch.randn_like(weight)
            weight.grad = g
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            step = (m[name] / (1 - b1**t)) / ((v[name] / (1 - b2**t)).sqrt() + eps)
            plain[name] = plain[name] - lr * (step + (decay if name == "weight" else 0.0) * plain[name])
        optimizer.step()
    for name, weight in layer.named_parameters():
        torch.testing.assert_close(weight.detach(), plain[name])


def test_the_optimizers_state_goes_on_where_it_was():
    runs = []
    for restored in (False, True):
        model = make_model("gpt-2")
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
        for step in range(4):
            if restored and step == 2:
                saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
                optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
                restore_optimizer(optimizer, model, saved)
            for i, weight in enumerate(model.parameters()):
                weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 * step + i))
            optimizer.step()
        runs.append(model.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_the_average_is_the_weighted_mean_of_all_weights_seen():
    """`sum_i decay^(t - i) w_i / sum_i decay^(t - i)`: the bias-corrected average of Kingma and Ba."""
    model, decay = nn.Linear(5, 3).double(), 0.9
    average, seen = EMA(model, decay), []
    for _ in range(7):
        nn.init.normal_(model.weight)
        nn.init.normal_(model.bias)
        average.update(model)
        seen.append(model.weight.detach().clone())
    shares = [decay ** (len(seen) - 1 - i) for i in range(len(seen))]
    expected = sum(share * weight for share, weight in zip(shares, seen, strict=True)) / sum(shares)
    torch.testing.assert_close(average.weights["weight"], expected)


def test_a_restored_average_goes_on():
    model = nn.Linear(5, 3)
    first, second = EMA(model, 0.9), EMA(model, 0.9)
    for step in range(6):
        nn.init.normal_(model.weight)
        first.update(model)
        if step == 3:
            second.restore({name: weight.clone() for name, weight in first.weights.items()}, first.updates)
        elif step > 3:
            second.update(model)
    assert torch.equal(first.weights["weight"], second.weights["weight"])


def test_a_model_is_averaged_for_a_while_and_itself_again():
    model = nn.Linear(5, 3)
    average = EMA(model, 0.9)
    for _ in range(3):
        nn.init.normal_(model.weight)
        average.update(model)
    own, mean = model.weight.detach().clone(), average.weights["weight"].clone()
    with swap_weights(model, average):
        assert torch.equal(model.weight, mean)
    assert torch.equal(model.weight, own)
    assert torch.equal(average.weights["weight"], mean)
    with swap_weights(model, None):
        assert torch.equal(model.weight, own)


STEPS, WARMUP, PEAK = 97, 13, 0.7


def learning_rates(kind, **fields):
    schedule = ScheduleConfig.from_dict({"kind": kind, "warmup": WARMUP, **fields})
    return [schedule.lr_at(step, STEPS, PEAK) for step in range(STEPS)]


def test_inverse_square_root_is_that_of_2017():
    """`dim^-0.5 min(step^-0.5, step warmup^-1.5)`, steps from 1, scaled to its peak `(dim warmup)^-0.5`."""
    dim = 512
    paper = [dim**-0.5 * min(n**-0.5, n * WARMUP**-1.5) for n in range(1, STEPS + 1)]
    assert learning_rates("inverse-sqrt") == pytest.approx(
        [PEAK * lr * (dim * WARMUP) ** 0.5 for lr in paper], rel=1e-12
    )


def test_cosine_is_that_of_sgdr():
    """Loshchilov and Hutter 2017, equation 5: `min + (max - min) (1 + cos(pi t / T)) / 2`."""
    low = 0.1 * PEAK
    expected = [PEAK * (n + 1) / WARMUP for n in range(WARMUP)]
    expected += [
        low + 0.5 * (PEAK - low) * (1 + math.cos(math.pi * t / (STEPS - WARMUP))) for t in range(STEPS - WARMUP)
    ]
    assert learning_rates("cosine", floor=0.1) == pytest.approx(expected, rel=1e-12)


def test_linear_reaches_its_floor_after_the_last_step():
    expected = [PEAK * (n + 1) / WARMUP for n in range(WARMUP)]
    expected += [PEAK * (STEPS - n) / (STEPS - WARMUP) for n in range(WARMUP, STEPS)]
    assert learning_rates("linear") == pytest.approx(expected, rel=1e-12)


def test_warm_up_stable_decay_has_its_three_parts():
    """Hu et al. 2024 (MiniCPM): up, level at the peak, then down over the last share of all steps."""
    found, falling = learning_rates("wsd", decay=0.2), round(0.2 * STEPS)
    assert found[:WARMUP] == pytest.approx([PEAK * (n + 1) / WARMUP for n in range(WARMUP)])
    assert found[WARMUP : STEPS - falling] == pytest.approx([PEAK] * (STEPS - falling - WARMUP))
    assert found[STEPS - falling :] == pytest.approx([PEAK * left / falling for left in range(falling, 0, -1)])


def test_constant_stays_at_its_peak():
    assert learning_rates("constant")[WARMUP:] == [PEAK] * (STEPS - WARMUP)
