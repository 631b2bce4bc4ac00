"""Every part with every other: gradients are finite, and every weight has one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from schemes import SCHEMES, build, tiny, tokens

import phasor

SHAPES = phasor.kinds("shapes")
NORMS: dict[str, Any] = {
    "layernorm": phasor.LayerNormConfig(),
    "layernorm-no-bias": phasor.LayerNormConfig(bias=False),
    "layernorm-bare": phasor.LayerNormConfig(bias=False, weight=False),
    "rmsnorm": phasor.RMSNormConfig(),
    "rmsnorm-offset": phasor.RMSNormConfig(unit_offset=True),
    "none": phasor.NoNormConfig(),
}
PLACEMENTS: dict[str, Any] = {
    "pre": phasor.PreConfig(),
    "pre-normed-stream": phasor.PreConfig(normed_stream=True),
    "pre-without-the-first": phasor.PreConfig(first_norm=False),
    "post": phasor.PostConfig(),
    "sandwich": phasor.SandwichConfig(multiplier=0.5),
    "deepnorm": phasor.DeepNormConfig(),
    "output": phasor.OutputConfig(),
    "parallel": phasor.ParallelConfig(),
    "parallel-two-norms": phasor.ParallelConfig(shared_norm=False),
}
EXPERTS = phasor.ExpertsConfig(num_experts=4, top_k=2, hidden_dim=12, shared_dim=8, shared_gate=True, router_bias=True)
FEEDFORWARDS: dict[str, Any] = {
    **{name: phasor.FeedForwardConfig(activation=name) for name in phasor.kinds("activations")},
    "swiglu-bias": phasor.FeedForwardConfig(activation="swiglu", bias=True),
    "experts": phasor.FeedForwardConfig(
        activation="gelu", experts=phasor.ExpertsConfig(num_experts=3, normalize=False)
    ),
    "gated-experts": phasor.FeedForwardConfig(activation="swiglu", bias=True, experts=EXPERTS),
}
# One choice of each row joins every combination, so that each meets many of the others.
EXTRAS: dict[str, Sequence[Any]] = {
    "softcap": (None, 2.0),
    "sink_logits": (False, True),
    "qk_norm": phasor.kinds("qk-norms"),
    "clip": (None, 1.0),
    "bias": ((), ("q",), ("k", "v"), ("q", "v", "out"), ("q", "k", "v", "out")),
    "window": (None, 3),
    "scale": (None, 1.0),
}
GIVEN = ("nothing", "attention_mask", "document_ids")


def test_the_tables_are_complete():
    tables = {"norms": NORMS, "placements": PLACEMENTS}
    for group, table in tables.items():
        assert {config.kind for config in table.values()} == set(phasor.kinds(group))
    assert {config.activation.kind for config in FEEDFORWARDS.values()} == set(phasor.kinds("activations"))


def check_gradients(
    shape: str, scheme: str, norm: str, placement: str, feedforward: str, seed: int, layers: int = 2
) -> None:
    draw = random.Random(seed)
    extras = {name: draw.choice(values) for name, values in EXTRAS.items()}
    extras["sink_tokens"] = draw.choice((0, 2)) if extras["window"] else 0
    extras["qk_norm"] = "none" if norm == "none" else extras["qk_norm"]
    config = tiny(
        scheme,
        num_layers=layers,
        shape=shape,
        norm=NORMS[norm],
        placement=PLACEMENTS[placement],
        feedforward=FEEDFORWARDS[feedforward],
        attention=extras,
        embedding={"tied": draw.choice((False, True)), "norm": norm != "none" and draw.choice((False, True))},
    )
    model = build(config).train()
    ids = tokens(2, 9, seed=seed)
    about = {
        "attention_mask": torch.arange(9) >= torch.tensor([[0], [4]]),
        "document_ids": torch.arange(9).expand(2, -1) // 5,
    }
    what = draw.choice(GIVEN)
    given = {what: about[what]} if what in about else {}
    if shape == "encoder-decoder":
        out = model(ids, ids, **given, **{f"target_{name}": value for name, value in given.items()})
    else:
        out = model(ids, **given)
    out.square().mean().backward()
    assert torch.isfinite(out).all(), config
    for name, weight in model.named_parameters():
        assert weight.grad is not None, (name, config)
        assert torch.isfinite(weight.grad).all(), (name, config)
    assert model.tokens.weight.grad.any(), config


AXES = (SHAPES, list(SCHEMES), list(NORMS), list(PLACEMENTS), list(FEEDFORWARDS))


def sample(count: int) -> list[Any]:
    """Combinations in which every choice of every axis comes up about equally often."""
    draw = random.Random(0)
    columns = [[axis[i % len(axis)] for i in range(count)] for axis in AXES]
    for column in columns:
        draw.shuffle(column)
    return [pytest.param(parts, seed, id=" ".join(parts)) for seed, parts in enumerate(zip(*columns, strict=True))]


@pytest.mark.sample(40)
@pytest.mark.parametrize(("parts", "seed"), sample(200))
def test_gradients_of_sampled_combinations(parts, seed):
    check_gradients(*parts, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_all_combinations(shape, scheme, placement):
    for seed, (norm, feedforward) in enumerate(itertools.product(NORMS, FEEDFORWARDS)):
        check_gradients(shape, scheme, norm, placement, feedforward, seed, layers=1)
