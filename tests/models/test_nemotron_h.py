"""Nemotron-H: what its files have beside the model, what they are called, and where transformers bounds times."""

import random

import pytest
import torch
import transformers
from families.cases import redraw
from families.mamba import nemotron_h, unclamped
from safetensors.torch import load_file, save_file

import phasor
from phasor.models.families import family

transformers.logging.set_verbosity_error()


@pytest.fixture
def theirs(tmp_path):
    """A tiny model with every weight redrawn, and its folder."""
    case = nemotron_h(random.Random(3))
    model = case.cls(case.config).eval()
    redraw(model, case.buffers)
    with torch.no_grad():
        case.touch(model)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


def tokens(*shape):
    return torch.randint(0, 55, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_small_times_are_kept_where_transformers_bounds_them(theirs, tmp_path, monkeypatch):
    """Times near exp(-12), which transformers makes 0.001."""
    model, folder = theirs
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.fill_(-12.0)
    model.save_pretrained(folder)
    ours = phasor.load(folder)(tokens(2, 40))
    bounded = model(tokens(2, 40)).logits
    unclamped(monkeypatch)
    unbounded = type(model).from_pretrained(folder, experts_implementation="eager")(tokens(2, 40)).logits
    assert (ours - unbounded).abs().max() < 2e-5
    assert (ours - bounded).abs().max() > 1e-4
    assert "time_step_min" in family("nemotron_h").differs_from_transformers(phasor.load(folder).config)


@torch.no_grad()
def test_tensors_are_called_as_in_published_files(theirs, tmp_path):
    model, folder = theirs
    further = {"mtp.layers.0.norm.weight": torch.ones(3)}  # layers that predict further tokens
    save_file(load_file(folder / "model.safetensors") | further, folder / "model.safetensors", {"format": "pt"})
    ours = phasor.load(folder)
    assert (ours(tokens(1, 9)) - model(tokens(1, 9)).logits).abs().max() < 2e-5
    phasor.save(ours, tmp_path / "again", format="hf")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_of_its_own_is_written_as_the_family_where_its_layers_have_one_sublayer(tmp_path):
    mixer, network = {"feedforward": {"hidden_dim": 0}}, {"attention": "none"}
    attention = {"kind": "mamba2", "num_heads": 4, "num_key_heads": 2, "key_dim": 5, "value_dim": 6}
    sizes = {"vocab_size": 60, "dim": 24, "num_heads": 4, "num_layers": 3, "norm": {"kind": "rmsnorm", "eps": 1e-5}}
    config = phasor.ModelConfig(
        **sizes,
        layers=[{**mixer, "attention": attention}, network, mixer],
        feedforward={"activation": "relu2"},
        embedding={"tied": False},
    )
    model = phasor.Transformer(config).eval()
    phasor.save(model, tmp_path / "model", format="hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(again).__name__ == "NemotronHForCausalLM"
    with torch.no_grad():
        assert (again(tokens(1, 9)).logits - model(tokens(1, 9))).abs().max() < 2e-5
    for change, why in (
        ({"layers": [{**mixer, "attention": attention}, {}]}, "not both|no family"),
        ({"embedding": {"tied": True}}, "tie_word_embeddings|no family"),
    ):
        with pytest.raises(ValueError, match=why):
            phasor.save(phasor.Transformer(config.replace(**change)), tmp_path / "other", format="hf")
