"""Presets: their published sizes, and that each of them runs."""

from __future__ import annotations

import pytest
import torch

import phasor
from phasor import ModelConfig, Transformer
from phasor.models.presets import PRESETS

NAMES = [
    "transformer-base",
    "transformer-big",
    "bert",
    "gpt-2",
    "t5",
    "t5-1.1",
    "roformer",
    "llama-2",
    "llama-3.1",
    "palm",
    "grok-1",
    "deepnet",
    "bloom",
    "mpt",
]


def test_every_named_system_is_there():
    assert set(PRESETS) == set(NAMES)


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(phasor.preset(name)).parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt-2", 124_439_808),
        ("bert", 109_482_240),
        ("t5", 222_903_552),
        ("llama-2", 6_738_415_616),
        ("llama-3.1", 8_030_261_248),
        ("bloom", 176_247_271_424),
        ("t5-1.1", 247_577_856),  # google/t5-v1_1-base
        ("mpt", 6_649_286_656),  # mosaicml/mpt-7b
    ],
)
def test_published_parameter_counts(name, published):
    assert parameters(name) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [("palm", "540.36 B"), ("grok-1", "315.7 B"), ("deepnet", "3.2 B"), ("transformer-base", "63.0 M")],
)
def test_published_parameter_counts_in_short(name, published):
    digits, unit = published.split()
    places = len(digits.partition(".")[2])
    assert f"{parameters(name) / {'B': 1e9, 'M': 1e6}[unit]:.{places}f}" == digits


def test_the_big_transformer_of_2017_is_about_as_big_as_its_paper_says():
    assert abs(parameters("transformer-big") / 213e6 - 1) < 0.01  # 214.2 M at a vocabulary of 37,000


SMALL = {"dim": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "max_length": 64}


def run(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, ids) if model.config.shape == "encoder-decoder" else model(ids)


@pytest.mark.parametrize("name", NAMES)
def test_each_runs_forward_and_backward_when_shrunk(name):
    config = phasor.preset(name, **SMALL)
    torch.manual_seed(0)
    model = Transformer(config)
    out = run(model, torch.randint(0, 97, (2, 11)))
    assert out.shape == (2, 11, 97 if config.has_logits else 48)
    out.square().mean().backward()
    for weight_name, weight in model.named_parameters():
        unused = weight_name.startswith("pooler")  # BERT's pooler is beside the hidden states that it gives out
        assert unused or torch.isfinite(weight.grad).all(), weight_name


@pytest.mark.parametrize("name", NAMES)
def test_each_survives_json(name):
    config = phasor.preset(name)
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", NAMES)
def test_each_is_right_after_meta_and_loading(name):
    """Nothing about positions lives in a buffer: fresh memory and the weights are all there is."""
    config = phasor.preset(name, **SMALL)
    model, ids = Transformer(config).eval(), torch.randint(0, 97, (2, 11))
    with torch.device("meta"):
        other = Transformer(config).eval()
    other = other.to_empty(device="cpu")
    for weight in other.parameters():
        weight.data.fill_(float("nan"))
    other.load_state_dict(model.state_dict())
    assert not list(model.buffers())
    assert torch.equal(run(other, ids), run(model, ids))
