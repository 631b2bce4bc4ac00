"""Tensors that lie one after another in a file are mapped from it as one."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import phasor
from phasor.checkpoints.tensors import Tensors
from phasor.models.layout import Layout

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_only_adjacent_tensors_are_one(tmp_path):
    found = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 1), "d": torch.randn(4).bfloat16()}
    save_file(found, tmp_path / "model.safetensors")  # by type, and then by name
    with Tensors(tmp_path) as tensors:
        for names in (["a", "b"], ["b", "c"], ["a", "b", "c"], ["d"]):
            assert torch.equal(tensors.get_adjacent(names), torch.cat([found[n].flatten() for n in names]))
        for names in (["b", "a"], ["a", "c"], ["c", "d"], ["a", "a"]):
            assert tensors.get_adjacent(names) is None
        joined = tensors.get_adjacent(["b", "c"])
    assert joined.untyped_storage().nbytes() == 9 * 4  # what is saved or copied with it
    joined.zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["b"], found["b"])


def apart(folder):
    """Every tensor in its own file."""
    transformers.LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="1KB")
    (folder / "model.safetensors").unlink()


def other_type(folder):
    """The gate in another type than the up projection; no value is rounded by that."""
    found = {name: tensor.bfloat16().float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({n: t.bfloat16() if "gate" in n else t for n, t in found.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("change", "copied"), [(None, 6), (apart, 10), (other_type, 10)])
@torch.no_grad()
def test_gate_and_up_stay_in_the_file_where_they_are_neighbors(folder, dtype, change, copied, monkeypatch):
    if change is not None:
        change(folder)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    calls, load = [], Layout.load
    monkeypatch.setattr(Layout, "load", lambda *given: calls.append(given) or load(*given))
    model = phasor.load(folder, dtype=dtype)
    assert len(calls) == copied  # queries, keys and values of two layers; gate and up
    for i, block in enumerate(model.decoder.blocks):
        gate, up = (theirs[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(block.feedforward.up.weight, torch.cat((gate, up)))


def test_training_a_mapped_model_leaves_the_file_alone(folder):
    before = (folder / "model.safetensors").read_bytes()
    model = phasor.load(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.decoder.blocks[0].feedforward.up.weight.detach().clone()
    model(torch.arange(11)[None]).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.decoder.blocks[0].feedforward.up.weight, weight)
    assert (folder / "model.safetensors").read_bytes() == before
