"""`extend`: what it writes in both formats, that transformers computes the same, and fine-tuning that is resumed."""

import json
import re
import shutil
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_trained_length import TEXT, make_recipe
from training_runs import Notes, StopAt

import phasor
from phasor.models.extensions import trained_length
from phasor.training import extend, loop

TO = 128
TUNE = {"steps": 4, "batch_tokens": 256, "lr": 1e-2, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, a run at 32 tokens, and its model as a Hugging Face folder with its own settings."""
    folder = tmp_path_factory.mktemp("extend")
    (folder / "notes.txt").write_text(TEXT)
    phasor.train(make_recipe(folder, "run"), progress=Notes())
    model = phasor.load(folder / "run")
    with torch.no_grad():  # so that attention, and with it positions, count
        for name, weight in model.named_parameters():
            weight.mul_(6.0 if "attention" in name else 1.0)
    model.generation_settings = {"do_sample": True, "top_p": 0.9}
    phasor.save(model, folder / "hf", format="hf")
    phasor.save(model, folder / "ours")
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "longrope"])
def test_transformers_reads_an_extended_folder_with_the_same_logits(place, tmp_path, method):
    result = extend(place / "hf", tmp_path / "theirs", to=TO, method=method)
    extend(place / "ours", tmp_path / "ours", to=TO, method=method)
    assert (result.original_length, result.max_length, result.trained_length) == (32, TO, 32)
    assert same(weights(tmp_path / "theirs"), weights(place / "hf"))
    assert same(weights(tmp_path / "ours"), weights(place / "ours"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert theirs.config.max_position_embeddings == TO
    ours = phasor.load(tmp_path / "ours")
    assert ours.config.position.extension.kind == method
    assert trained_length(phasor.load(tmp_path / "theirs").config) == trained_length(ours.config) == 32
    tokens = torch.randint(0, 200, (1, TO), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert torch.allclose(ours(tokens), expected, atol=2e-5)
        assert not torch.allclose(phasor.load(place / "ours")(tokens), expected, atol=1e-3)
    if method == "ntk":
        rope = json.loads((tmp_path / "theirs/config.json").read_text())["rope_parameters"]
        assert rope["rope_type"] == "default"
        assert rope["rope_theta"] == pytest.approx(10000.0 * 4.0 ** (16 / 14), rel=1e-12)


def test_everything_but_the_configuration_is_carried_along(place, tmp_path):
    for format, names in (("phasor", ["ours", "hf"]), ("hf", ["hf", "ours"])):
        for name in names:
            destination = tmp_path / f"{format}-{name}"
            extend(place / name, destination, to=TO, format=format)
            model = phasor.load(destination)
            assert model.generation_settings == {"do_sample": True, "top_p": 0.9}
            assert model.special == phasor.load(place / "ours").special
            assert model.tokenizer.to_str() == phasor.load(place / "ours").tokenizer.to_str()


def test_training_at_the_target_length(place, tmp_path):
    notes = Notes()
    result = extend(place / "hf", tmp_path / "out", to=TO, train=place / "notes.txt", progress=notes, **TUNE)
    assert (result.status, result.trained_length, result.run) == ("finished", TO, tmp_path / "out-run")
    assert notes.losses[4] < notes.losses[1]
    config = phasor.load(tmp_path / "out").config
    assert (config.position.extension.factor, config.position.extension.original_length) == (4.0, 32)
    assert not same(weights(tmp_path / "out"), weights(place / "hf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(5, 105)[None]
    with torch.no_grad():
        assert torch.allclose(phasor.load(tmp_path / "out")(tokens), theirs(tokens).logits, atol=2e-5)
    assert phasor.load(tmp_path / "out").generation_settings == {"do_sample": True, "top_p": 0.9}
    assert (config.trained_length, theirs.config.trained_length) == (TO, TO)
    extend(tmp_path / "out", tmp_path / "again", to=2 * TO)
    again = phasor.load(tmp_path / "again").config
    assert (again.trained_length, again.position.extension.factor) == (TO, 8.0)
    with pytest.raises(ValueError, match="greater than the 128 tokens the model was trained at"):
        extend(tmp_path / "out", tmp_path / "same", to=TO)
    phasor.save(phasor.load(tmp_path / "out", extension="none"), tmp_path / "none", format="hf")
    written = json.loads((tmp_path / "none/config.json").read_text())
    assert (written.get("trained_length"), written["original_max_position_embeddings"]) == (None, TO)


def test_the_original_length_is_that_before_training(place, tmp_path):
    how = {"to": TO, "method": "ntk", "train": place / "notes.txt", **TUNE, "steps": 1}
    result = extend(place / "hf", tmp_path / "out", progress=Notes(), **how)
    assert (result.original_length, result.max_length, result.trained_length) == (32, TO, TO)


def test_a_stopped_extension_is_resumed_to_the_same_bits(place, tmp_path, monkeypatch):
    how = {"to": TO, "method": "linear", "train": place / "notes.txt", "positions": "skipped", **TUNE}
    assert extend(place / "ours", tmp_path / "whole", progress=Notes(), **how).trained_length == 32
    stopped = extend(place / "ours", tmp_path / "out", progress=Notes(each=StopAt(2)), **how)
    assert (stopped.status, stopped.exit_code) == ("interrupted", 143)
    assert not (tmp_path / "out").exists()
    assert extend(place / "ours", tmp_path / "out", progress=Notes(), **how).status == "finished"
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert phasor.load(tmp_path / "out").config == phasor.load(tmp_path / "whole").config
    assert phasor.load(tmp_path / "out").config.max_length == TO
    assert (tmp_path / "out-run/recipe.json").exists()


@pytest.mark.parametrize("format", ["phasor", "hf"])
def test_a_run_of_another_source_or_learning_rate_is_not_taken_for_this_one(place, tmp_path, format):
    model = phasor.load(place / "ours")
    source, out, run = tmp_path / "source", tmp_path / "out", tmp_path / "out-run"
    phasor.save(model, source, format)
    (source / "phasor_manifest.json").unlink()  # as in a folder that others wrote
    how = {"to": TO, "train": place / "notes.txt", "progress": Notes(), **TUNE}
    extend(source, out, **how)
    before = weights(out)
    shutil.rmtree(out)
    with pytest.raises(
        ValueError, match=r"out-run holds a run of other settings: optimizer\.lr was 0\.01 and is 0\.02"
    ):
        extend(source, out, **how | {"lr": 2e-2})
    with torch.no_grad():
        model.tokens.weight.mul_(2.0)
    phasor.save(model, tmp_path / "changed", format)
    (source / "model.safetensors").write_bytes((tmp_path / "changed/model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=rf"the files of {source} are not those it began with; name another folder"):
        extend(source, out, **how)
    assert not out.exists()
    shutil.rmtree(run)
    extend(source, out, **how)
    assert not same(weights(out), before)


def test_positions_are_dropped(place, tmp_path):
    with pytest.warns(UserWarning, match="needs training"):
        extend(place / "ours", tmp_path / "bare", to=TO, method="drop")
    assert same(weights(tmp_path / "bare"), weights(place / "ours"))
    bare = phasor.load(tmp_path / "bare")
    assert (bare.config.position.kind, trained_length(bare.config)) == ("none", 32)
    notes = Notes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = extend(
            place / "ours", tmp_path / "tuned", to=TO, method="drop", train=place / "notes.txt", progress=notes, **TUNE
        )
    assert (tuned.original_length, tuned.trained_length) == (32, TO)
    assert notes.losses[4] < notes.losses[1]
    assert phasor.load(tmp_path / "tuned").config.position.kind == "none"


def tiny(**fields):
    sizes = {"dim": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 60, "hidden_dim": 48, "max_length": 64}
    return phasor.Transformer(phasor.preset(fields.pop("preset", "llama-2"), **{**sizes, **fields}))


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ({}, {"to": 32}, "to must be greater than the 64 tokens the model was trained at, not 32"),
        ({}, {"to": 64}, "to must be greater than the 64 tokens the model was trained at, not 64"),
        ({"trained_length": 16}, {"to": 16}, "to must be greater than the 16 tokens"),
        ({}, {"to": "4k"}, "to must be an integer of at least 1, not '4k'"),
        ({}, {"to": 128, "method": "yarm"}, "unknown method 'yarm' (did you mean 'yarn'?); known: linear, ntk, yarn"),
        ({}, {"to": 128, "positions": "random"}, "unknown positions 'random'; known: ordinary, skipped"),
        ({}, {"to": 128, "format": "onnx"}, "unknown format 'onnx'"),
        ({}, {"to": 128, "factor": 0.5}, "YaRN.factor must be at least 1"),
        ({}, {"to": 256, "factor": 2.0}, "factor 2 reaches 128 tokens, fewer than the 256 asked for"),
        ({}, {"to": 128, "positions": "skipped"}, "positions skipped is for training: give a text"),
        ({}, {"to": 128, "method": "longrope", "long_factor": [1.0]}, "each needs one for every rotated pair"),
        (
            {"placement": "parallel"},
            {"to": 128, "method": "drop", "format": "hf"},
            "no family of transformers computes what this model does",
        ),
        ({"preset": "gpt-2"}, {"to": 128}, "this model's are 'learned', a table of 64 positions"),
        ({"position": "alibi"}, {"to": 128}, "an extension needs rotary positions, and this model's are 'alibi'"),
        ({"shape": "encoder"}, {"to": 128}, "the context of a decoder can be extended, and this model is an encoder"),
    ],
)
def test_what_cannot_be_extended_is_one_sentence_and_writes_nothing(tmp_path, model, options, sentence):
    phasor.save(tiny(**model), tmp_path / "model")
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        extend(tmp_path / "model", tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_destination_that_exists_is_left_alone(place, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    monkeypatch.setattr(loop, "load_datasets", None)  # before anything is trained
    for destination in (tmp_path / "out", place / "ours"):
        with pytest.raises(ValueError, match="exists already: name a new folder"):
            extend(place / "ours", destination, to=TO, train=place / "notes.txt")
    with pytest.raises(ValueError, match="run and destination are the same folder"):
        extend(place / "ours", tmp_path / "new", to=TO, train=place / "notes.txt", run=tmp_path / "new")
    with pytest.raises(ValueError, match="is inside of the folder to write"):
        extend(place / "ours", tmp_path / "new", to=TO, train=place / "notes.txt", run=tmp_path / "new/run")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
