"""Attention temperature by length: against the formulas, and against Llama 4 of transformers."""

import math

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

import phasor
from phasor.nn.positions.temperature.module import Temperature
from phasor.nn.sequence import SequenceInfo


def factors(config, positions, heads=2, dtype=torch.float64):
    module = Temperature(config, num_heads=heads)
    module.reset_parameters(None)
    return module.prepare(SequenceInfo(positions, len(positions)), torch.zeros(1, dtype=dtype))[0, :, :, 0]


FAR = [0, 1, 7, 8190, 8191, 8192, 2**31, 2**36 - 1]


def test_factors_are_the_formulas_at_any_position():
    positions = torch.tensor(FAR)
    log = factors(phasor.TemperatureConfig(scale=0.5, learned=True), positions)
    assert log[:, 1].tolist() == pytest.approx([0.5 * math.log(p + 1) for p in FAR], rel=1e-12)
    floor = factors(phasor.TemperatureConfig(form="floor"), positions)
    assert floor[:, 0].tolist() == pytest.approx([1 + 0.1 * math.log((p + 1) // 8192 + 1) for p in FAR], rel=1e-12)
    floor = factors(phasor.TemperatureConfig(form="floor", first=0), positions)
    assert floor[:, 0].tolist() == pytest.approx([1 + 0.1 * math.log(p // 8192 + 1) for p in FAR], rel=1e-12)


def test_a_minimum_leaves_queries_below_the_trained_length_alone():
    config = phasor.TemperatureConfig(scale=1 / math.log(8192), minimum=1.0)
    found = factors(config, torch.tensor(FAR))[:, 0].tolist()
    assert found == pytest.approx([1.0] * 5 + [math.log(p + 1) / math.log(8192) for p in FAR[5:]], rel=1e-12)


def test_the_default_scale_is_one_in_the_mean():
    assert factors(phasor.TemperatureConfig(), torch.arange(1024)).mean().item() == pytest.approx(1.0, abs=1e-2)


def test_scores_are_those_of_llama_4():
    """Its layers without rotary positions scale their queries; the outputs of its attention tell by how much."""
    settings = Llama4TextConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
        no_rope_layers=[0],
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.7,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = Llama4TextAttention(settings, layer_idx=0).double().eval()
    x, positions = torch.randn(1, 11, 32, dtype=torch.float64), torch.arange(11)
    hidden = torch.full((11, 11), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, None, hidden, cache_position=positions, position_ids=positions[None])[0]
        module = Temperature(phasor.TemperatureConfig(form="floor", scale=0.7, floor_length=4), num_heads=2)
        q, k, v = (p(x).view(1, 11, 2, 16) for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        q = module.on_query(q, module.prepare(SequenceInfo(positions, 11), q))
        y = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        ours = theirs.o_proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)  # theirs takes logarithms in float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: phasor.TemperatureConfig(scale=0.0), "greater than 0"),
        (lambda: phasor.TemperatureConfig(form="floor", floor_length=0), "at least 1"),
        (lambda: phasor.TemperatureConfig(form="floor", learned=True), "form 'log'"),
        (lambda: phasor.TemperatureConfig(first=0), "the form 'log' counts from 1"),
        (lambda: phasor.TemperatureConfig(form="floor", minimum=1.0), "form 'floor' is at least 1"),
        (
            lambda: phasor.ModelConfig(
                vocab_size=9,
                dim=16,
                num_layers=1,
                num_heads=2,
                position="temperature",
                attention={"window": 4, "sink_tokens": 1, "cap_sinks": True},
            ),
            "cap_sinks",
        ),
    ],
)
def test_bad_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
