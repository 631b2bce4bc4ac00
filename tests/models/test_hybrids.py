"""Hybrids of gated delta and softmax attention against transformers: in float64, and what their files have besides."""

import random

import pytest
import torch
import transformers
from families.cases import redraw
from families.delta import float64_for_float32, qwen3_next
from safetensors.torch import load_file, save_file

import phasor

transformers.logging.set_verbosity_error()


@pytest.fixture
def theirs(tmp_path):
    """A tiny Qwen3-Next with every weight redrawn, and its folder."""
    config = qwen3_next(random.Random(2)).config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 4 / config.head_dim}
    model = transformers.Qwen3NextForCausalLM(config).eval()
    redraw(model, lambda name: False)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def tokens(*shape):
    return torch.randint(0, 55, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_logits_are_the_same_in_float64(theirs):
    model, folder = theirs
    ours, ids = phasor.load(folder).double(), tokens(2, 70)  # more than a chunk of theirs
    model.double().model.rotary_emb.inv_freq = 500.0 ** -torch.tensor([0.0, 0.5], dtype=torch.float64)
    with float64_for_float32():
        expected = model(ids).logits
    assert (ours(ids) - expected).abs().max() < 1e-10


@torch.no_grad()
def test_layers_that_predict_further_tokens_are_no_part_of_the_model_and_written_back(theirs, tmp_path):
    _, folder = theirs
    more = {"mtp.fc.weight": torch.ones(3, 2)}
    plain = phasor.load(folder)
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors", {"format": "pt"})
    ours = phasor.load(folder)
    assert torch.equal(ours(tokens(1, 9)), plain(tokens(1, 9)))
    phasor.save(ours, tmp_path / "again", format="hf")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["mtp.fc.weight"], more["mtp.fc.weight"])


def test_layer_types_and_gates_that_it_does_not_have_are_refused(theirs):
    config = phasor.load(theirs[1]).config
    for change, why in (
        ({"attention": config.attention.replace(output_gate=False), "layers": ()}, "output_gate"),
        ({"layers": (phasor.config.LayerConfig(attention="latent"),)}, "no family of transformers computes"),
        ({"norm": config.norm.replace(eps=0.5)}, "norm_eps"),
    ):
        with pytest.raises(ValueError, match=why):
            phasor.save(phasor.Transformer(config.replace(**change)), theirs[1] / "other", format="hf")
