"""A run records the length it was trained at; explain, extensions and exports take it from there."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from training_runs import Notes, StopAt

import phasor
from phasor.checkpoints.runs import checkpoints
from phasor.cli import main
from phasor.config.recipe import Recipe
from phasor.models.extensions import trained_length

TEXT = "".join(f"The cat sat on the mat, and dog {number} lay on the log.\n" for number in range(10, 70))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, and a run at 32 tokens whose model is meant for 128."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "notes.txt").write_text(TEXT)
    phasor.train(make_recipe(folder, "run"), progress=Notes())
    return folder


def make_recipe(folder: Path, out: str, *, length: int = 32, init_from: str | None = None, **data: object) -> Recipe:
    sizes = {"dim": 32, "num_heads": 2, "num_layers": 1, "hidden_dim": 48, "max_length": 128}
    return Recipe.from_dict(
        {
            "model": {} if init_from else {"preset": "llama-2", **sizes},
            "data": {"train": f"{folder}/notes.txt", "sequence_length": length, **data}
            | ({} if init_from else {"tokenizer": "bytes"}),
            "train": {"steps": 4, "batch_tokens": 256, "device": "cpu"},
            "schedule": {"kind": "constant", "warmup": 0},
            "save": {"every": 2},
            "init_from": None if init_from is None else f"{folder}/{init_from}",
            "out": f"{folder}/{out}",
        }
    )


def test_a_run_records_its_length(place, capsys):
    config = phasor.load(place / "run").config
    assert (config.trained_length, config.max_length) == (32, 128)
    assert json.loads((place / "run/model/config.json").read_text())["trained_length"] == 32
    assert main(["explain", str(place / "run"), "--extension", "yarn", "--factor", "4", "--json"]) == 0
    scheme = json.loads(capsys.readouterr().out)["schemes"][0]
    assert scheme["settings"]["extension"]["original_length"] == 32
    assert (scheme["trained_length"], scheme["length"]) == (32, 128)
    pair = scheme["pairs"][1]
    assert pair["rotations"] == pytest.approx(32 / pair["wavelength"])


@pytest.mark.parametrize(("extension", "length"), [("none", 128), ("yarn", 256), ("linear", 256)])
def test_an_export_has_it(place, tmp_path, extension, length, capsys):
    arguments = ["--extension", extension] + ([] if extension == "none" else ["--factor", "8"])
    assert main(["convert", str(place / "run"), str(tmp_path / "hf"), "--format", "hf", *arguments]) == 0
    capsys.readouterr()
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert theirs.max_position_embeddings == length
    written = json.loads((tmp_path / "hf/config.json").read_text())
    if extension != "linear":  # there it is the maximum over the factor
        place_of_it = written if extension == "none" else written["rope_parameters"]
        assert place_of_it["original_max_position_embeddings"] == 32
    again = phasor.load(tmp_path / "hf").config
    assert trained_length(again) == again.original_length() == 32
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(5, 105)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, phasor.load(tmp_path / "hf")(tokens), atol=2e-5)


def test_fine_tuning_raises_it_and_never_lowers_it(place):
    phasor.train(make_recipe(place, "longer", length=64, init_from="run"), progress=Notes())
    phasor.train(make_recipe(place, "shorter", length=16, init_from="longer"), progress=Notes())
    assert [phasor.load(place / name).config.trained_length for name in ("longer", "shorter")] == [64, 64]


def test_a_run_from_before_it_was_recorded_is_resumed(place):
    recipe = make_recipe(place, "older")
    assert phasor.train(recipe, progress=Notes(each=StopAt(2))).status == "interrupted"
    for _, folder in checkpoints(place / "older/checkpoints"):
        file = folder / "state.json"
        state = json.loads(file.read_text())
        del state["values"]["fixed"]["model"]["trained_length"]
        rewrite(folder, file, json.dumps(state))
    assert phasor.train(recipe, True, Notes()).status == "finished"
    assert phasor.load(place / "older").config.trained_length == 32
    assert same(place / "older", place / "run")


def test_a_folder_from_before_it_was_recorded_loads(place, tmp_path):
    phasor.save(phasor.load(place / "run"), tmp_path / "old")
    fields = json.loads((tmp_path / "old/config.json").read_text())
    del fields["trained_length"]
    rewrite(tmp_path / "old", tmp_path / "old/config.json", json.dumps(fields))
    config = phasor.load(tmp_path / "old").config
    assert (config.trained_length, trained_length(config)) == (None, 128)


def test_skipped_positions_are_trained_and_resumed_to_the_same_bits(place):
    notes, options = Notes(), {"positions": "skipped", "positions_to": 128}
    phasor.train(make_recipe(place, "skipped", **options), progress=notes)
    assert notes.losses[4] < notes.losses[1]
    assert phasor.load(place / "skipped").config.trained_length == 32
    assert not same(place / "skipped", place / "run")
    stopped = make_recipe(place, "stopped", **options)
    assert phasor.train(stopped, progress=Notes(each=StopAt(2))).status == "interrupted"
    assert phasor.train(stopped, True, Notes()).status == "finished"
    assert same(place / "stopped", place / "skipped")


def rewrite(folder: Path, file: Path, text: str) -> None:
    """Change a file of a folder with a manifest, and the manifest with it."""
    from phasor.artifacts import ArtifactFolder
    from phasor.manifest import Manifest

    kind = Manifest.read(folder).kind
    file.write_text(text)
    ArtifactFolder(folder, kind).write_manifest()


def same(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model/model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
