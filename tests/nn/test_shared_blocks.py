"""Layers that share their weights: the model is the one whose layers have copies of them."""

import re

import pytest
import torch
from references import EXACT
from schemes import build, tiny, tokens

import phasor
from phasor.config.parameters import parameters_of
from phasor.parallel.flops import model_flops
from phasor.parallel.mesh import Mesh, mesh_why_not


def pair(**changes):
    """A model of six layers with two blocks, and one whose layers have copies of these."""
    shared = build(tiny("rotary", num_layers=6, num_blocks=2, **changes)).double()
    copied = build(shared.config.replace(num_blocks=None)).double()
    copied.load_state_dict({name: shared.state_dict()[of_block(name)] for name in copied.state_dict()})
    return shared, copied


def of_block(name):
    """The name of a weight of a layer in the block that three layers share."""
    return re.sub(r"blocks\.(\d+)", lambda found: f"blocks.{int(found[1]) // 3}", name)


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_values_and_gradients_are_those_of_copies(shape):
    shared, copied = pair(shape=shape)
    ids = tokens(2, 9)
    torch.testing.assert_close(shared(ids), copied(ids), rtol=0, atol=EXACT)
    shared(ids).square().mean().backward()
    copied(ids).square().mean().backward()
    expected = dict.fromkeys(dict(shared.named_parameters()), 0.0)
    for name, weight in copied.named_parameters():
        expected[of_block(name)] += weight.grad
    for name, weight in shared.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=0, atol=EXACT)


@torch.no_grad()
def test_every_layer_has_its_keys_in_a_cache():
    shared, copied = pair()
    ids, cache = tokens(2, 9), shared.new_cache(2, 16)
    steps = [shared(ids[:, :5], cache=cache), *(shared(ids[:, i : i + 1], cache=cache) for i in range(5, 9))]
    torch.testing.assert_close(torch.cat(steps, 1), copied(ids, length=16), rtol=0, atol=EXACT)
    assert len(cache.layers) == 6
    record = phasor.Record("hidden", "attention")
    shared(ids, record=record)
    assert (len(record.hidden), len(record.attention)) == (7, 6)
    prompt = ids[0].tolist()
    assert phasor.generate(shared, prompt, max_new_tokens=8) == phasor.generate(copied, prompt, max_new_tokens=8)


def test_weights_are_counted_once_and_multiplied_with_in_every_layer():
    shared, copied = pair()
    counted = parameters_of(shared.config)
    assert counted.total == sum(weight.numel() for weight in shared.parameters())
    assert counted.in_blocks == parameters_of(copied.config).in_blocks
    assert model_flops(shared.config, 64) == model_flops(copied.config, 64)
    assert "num_blocks" in mesh_why_not(shared.config, Mesh(shard=2), 64)
    assert mesh_why_not(copied.config, Mesh(shard=2), 64) is None


def test_a_folder_keeps_fewer_tensors_than_layers(tmp_path):
    model = build(tiny("rotary", num_layers=60, num_blocks=1))
    assert len(model.state_dict()) < 60
    phasor.save(model, tmp_path / "model")
    again = phasor.load(tmp_path / "model").to(tokens(1, 5).device)
    assert again.config == model.config
    assert torch.equal(again(tokens(1, 5)), model(tokens(1, 5)))
