"""Model folders: what is saved comes back bit by bit, and a folder is whole or left alone."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import byte_tokenizer, speaker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from schemes import SCHEMES, build, tiny
from torch import Tensor

import phasor
from phasor import SpecialTokens, Transformer, files
from phasor.artifacts import ArtifactFolder
from phasor.checkpoints import folder as folders
from phasor.checkpoints import hf, native, tensors
from phasor.manifest import MANIFEST
from phasor.models.presets import PRESETS

SMALL = {"dim": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "max_length": 64}


def run(model: Transformer) -> Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens, tokens) if model.config.shape == "encoder-decoder" else model(tokens)


def same(found: Transformer, model: Transformer) -> None:
    assert found.config == model.config
    expected, state = model.state_dict(), found.state_dict()
    assert state.keys() == expected.keys()
    assert all(
        torch.equal(state[name], weight) and state[name].dtype == weight.dtype for name, weight in expected.items()
    )
    assert torch.equal(run(found), run(model))


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_system_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = build(phasor.preset(name, **SMALL))
    phasor.save(model, tmp_path / "model")
    same(phasor.load(tmp_path / "model"), model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.sample(34)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_comes_back_as_it_was(scheme: str, tmp_path: Path) -> None:
    model = build(tiny(scheme))
    phasor.save(model, str(tmp_path / "deep" / "model"))
    same(phasor.load(str(tmp_path / "deep" / "model")), model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_loaded_model_has_the_type_of_its_file(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = speaker(embedding=phasor.EmbeddingConfig(tied=tied)).to(dtype)
    phasor.save(model, tmp_path)
    assert ("head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    found = phasor.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    assert {p.dtype for p in found.parameters()} == {dtype}


def test_a_loaded_model_is_ready_to_run_and_to_train(tmp_path: Path) -> None:
    phasor.save(speaker().train(), tmp_path)
    found = phasor.load(tmp_path)
    assert not found.training
    assert all(p.requires_grad for p in found.parameters())
    assert {p.device.type for p in found.parameters()} == {"cpu"}
    found(torch.tensor([[1, 2, 3]])).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_type_may_be_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = speaker()
    phasor.save(model, tmp_path)
    found = phasor.load(tmp_path, dtype=dtype)
    for mine, theirs in zip(found.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(dtype))


def test_weights_that_are_not_contiguous_or_frozen_are_saved(tmp_path: Path) -> None:
    model = speaker().requires_grad_(False)
    model.tokens.weight.data = model.tokens.weight.data.T.contiguous().T
    phasor.save(model, tmp_path)
    same(phasor.load(tmp_path), model)


def test_tokenizer_and_special_tokens_come_back(tmp_path: Path) -> None:
    model = speaker(vocab_size=300)
    model.tokenizer = byte_tokenizer()
    model.special = SpecialTokens(stop=(256, 3), start=1, forced_first=2, bos=4, pad=0)
    phasor.save(model, tmp_path)
    found = phasor.load(tmp_path)
    assert found.special == model.special
    assert found.tokenizer.to_str() == model.tokenizer.to_str()
    assert found.tokenizer.encode("héllo").ids == model.tokenizer.encode("héllo").ids
    named = json.loads((tmp_path / "generation_config.json").read_text())
    assert named["eos_token_id"] == [256, 3]
    assert named["decoder_start_token_id"] == 1


def test_a_folder_without_tokenizer_and_special_tokens(tmp_path: Path) -> None:
    phasor.save(speaker(), tmp_path)
    names = ["config.json", "generation_config.json", "model.safetensors", MANIFEST]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    for name in ("generation_config.json", MANIFEST):
        (tmp_path / name).unlink()
    found = phasor.load(tmp_path)
    assert found.special == SpecialTokens()
    assert found.tokenizer is None


def test_one_end_token_may_stand_alone_and_other_fields_beside_it(tmp_path: Path) -> None:
    phasor.save(speaker(), tmp_path)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "pad_token_id": null, "num_beams": 4}')
    assert phasor.load(tmp_path).special == SpecialTokens(stop=(7,))


def test_a_model_folder_is_replaced_whole(tmp_path: Path) -> None:
    first, second = speaker(vocab_size=300), speaker("alibi", num_layers=1)
    first.tokenizer = byte_tokenizer()
    phasor.save(first, tmp_path / "model")
    phasor.save(second, tmp_path / "model")
    found = phasor.load(tmp_path / "model")
    same(found, second)
    assert found.tokenizer is None
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_folders_can_be_read_by_others(tmp_path: Path) -> None:
    phasor.save(speaker(), tmp_path / "model")
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o755


def test_a_link_goes_on_pointing_to_the_model(tmp_path: Path) -> None:
    phasor.save(speaker(), tmp_path / "model")
    (tmp_path / "latest").symlink_to(tmp_path / "model")
    other = speaker(seed=4)
    phasor.save(other, tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    same(phasor.load(tmp_path / "model"), other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "model"]


def test_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    phasor.save(speaker(), ".")
    same(phasor.load(tmp_path / "here"), speaker())


@pytest.mark.parametrize(
    "files",
    [
        ["notes.txt"],
        ["config.json"],
        ["config.json", "thesis.tex"],
        ["model.safetensors"],
        ["folder/config.json"],
        ["config.json", "model.safetensors", "notes.md"],
        ["config.json", "model.safetensors", "logs/today"],
    ],
    ids=" ".join,
)
def test_what_is_not_a_model_folder_is_left_alone(files: list[str], tmp_path: Path) -> None:
    for file in files:
        (tmp_path / "work" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / file).write_text("precious")
    more = {"notes.md": "notes.md", "logs/today": "logs"}.get(files[-1])
    words = "is not a model folder: it is left alone" if more is None else rf"holds more than a model \({more}\)"
    with pytest.raises(ValueError, match=words):
        phasor.save(speaker(), tmp_path / "work")
    assert [(tmp_path / "work" / file).read_text() for file in files] == ["precious"] * len(files)
    assert [p.name for p in tmp_path.iterdir()] == ["work"]


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="left alone"):
        phasor.save(speaker(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def resize(model: Transformer) -> None:
    model.tokens.weight = torch.nn.Parameter(torch.zeros(64, 32))


def make_integer(model: Transformer) -> None:
    model.tokens.weight = torch.nn.Parameter(model.tokens.weight.to(torch.int32), requires_grad=False)


@pytest.mark.parametrize("format", ["phasor", "hf"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.to(torch.float8_e4m3fn), r"one dtype, .*not torch\.float8_e4m3fn"),
        (make_integer, r"one dtype, .*not torch\.int32 \(tokens\.weight\) and torch\.float32"),
        (lambda model: model.tokens.to(torch.bfloat16), r"one dtype, .*not torch\.bfloat16 .* and torch\.float32"),
        (resize, r"configuration's cannot be saved: tokens\.weight has the shape \[64, 32\], not \[61, 32\]"),
        (lambda model: model.add_module("adapter", torch.nn.Linear(3, 3)), "adapter.weight is not the model's"),
        (lambda model: model.register_buffer("steps", torch.zeros(3)), "steps is not the model's"),
        (lambda model: model.to("meta"), "on the meta device has no weights to save"),
    ],
)
def test_what_could_not_be_loaded_again_does_not_replace_a_model(tmp_path: Path, change, sentence, format) -> None:
    model = speaker()
    phasor.save(model, tmp_path / "model", format)
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    change(model)
    with pytest.raises(ValueError, match=sentence):
        phasor.save(model, tmp_path / "model", format)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("format", ["phasor", "hf"])
@pytest.mark.parametrize(
    ("module", "name"), [(tensors, "save_file"), (ArtifactFolder, "publish"), (tensors, "write_tensors")]
)
def test_a_failure_in_the_middle_leaves_things_as_they_were(
    module: Any, name: str, there: bool, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = speaker()
    if there:
        phasor.save(model, tmp_path / "model")
    original = getattr(module, name)

    def failing(*args: Any) -> None:
        if name == "save_file":
            original(*args)
        raise OSError("no space left on device")

    for where in (module, native, hf):
        monkeypatch.setattr(where, name, failing, raising=where is module)
    with pytest.raises(OSError, match="no space left"):
        phasor.save(speaker(seed=4), tmp_path / "model", format=format)
    assert [p.name for p in tmp_path.iterdir()] == (["model"] if there else [])
    if there:
        same(phasor.load(tmp_path / "model"), model)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("which", [1, 2])
def test_a_failure_to_rename_leaves_the_old_folder_in_its_place(
    which: int, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names cannot be exchanged in one step."""
    model = speaker()
    phasor.save(model, tmp_path / "model")
    monkeypatch.setattr(files, "exchange", lambda *_: False)
    calls, original = [], os.replace

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == which + 1:  # the first is the manifest's
            raise error("busy")
        original(*args)

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(error, match="busy"):
        phasor.save(speaker(seed=4), tmp_path / "model")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    same(phasor.load(tmp_path / "model"), model)


def test_an_interruption_while_the_old_folder_goes_leaves_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phasor.save(speaker(), tmp_path / "model")
    calls, original = [], folders.shutil.rmtree

    def interrupt(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        original(*args, **options)

    model = speaker(seed=4)
    monkeypatch.setattr(folders.shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        phasor.save(model, tmp_path / "model")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    same(phasor.load(tmp_path / "model"), model)


@contextmanager
def file_sizes_up_to(size: int) -> Iterator[None]:
    """As on a disk that is full after so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match=r"file/model cannot be written: [A-Z][a-z ]+$"):
        phasor.save(speaker(), tmp_path / "file" / "model")

    with file_sizes_up_to(1000), pytest.raises(OSError, match=rf"File too large: '{tmp_path}/model'"):
        phasor.save(speaker(), tmp_path / "model")

    def full(*args: Any) -> None:
        raise SafetensorError("an error of another kind")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(OSError, match=rf"an error of another kind: '{tmp_path}/model'"):
        phasor.save(speaker(), tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def assert_refuses(folder: Path, *mentions: str, **options: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        phasor.load(folder, **options)
    text = str(error.value)
    assert all(mention in text for mention in mentions), text
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without a manifest, as if others had written it."""
    phasor.save(speaker(), tmp_path)
    (tmp_path / MANIFEST).unlink()
    return tmp_path


def test_all_that_is_wrong_with_the_tensors_is_said_at_once(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["head.weight"], tensors["decoder.norm.weight"]
    tensors["extra"], tensors["tokens.weight"] = torch.zeros(1), torch.zeros(3, 4)
    save_file(tensors, folder / "model.safetensors")
    text = assert_refuses(folder, "model.safetensors does not fit its configuration", "head.weight is missing")
    assert "decoder.norm.weight is missing" in text
    assert "extra is not the model's" in text
    assert "tokens.weight has the shape [3, 4], not [61, 32]" in text


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_refuses(folder, "model.safetensors cannot be read as safetensors")


def test_missing_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refuses(folder, "model.safetensors")
    (folder / "config.json").unlink()
    assert_refuses(folder, "is not a model folder: it has no config.json")
    assert_refuses(folder / "nowhere", "nowhere", "does not exist")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "", "[1, 2]", "[" * 100_000, "\x00", "é"], ids=range(6))
def test_broken_json(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text, encoding="latin-1")
    assert_refuses(folder, file, "JSON")


def test_an_empty_object_is_no_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    said = "config.json is empty: it has neither Hugging Face's model_type nor fields of phasor"
    assert_refuses(folder, said)
    with pytest.raises(ValueError, match=f"^{folder}/{said}$"):
        phasor.explain(folder)


def test_a_hugging_face_configuration_names_its_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 9}')
    assert_refuses(folder, "config.json has no model_type, by which a Hugging Face configuration names its family")


def test_fields_nobody_knows(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_sise": 3}))
    assert_refuses(folder, "config.json: ", "'vocab_sise'", "did you mean 'vocab_size'?")
    (folder / "config.json").write_text(json.dumps(config | {"dim": "wide"}))
    assert_refuses(folder, "config.json: ModelConfig.dim must be an integer, not 'wide'")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert_refuses(folder, "config.json", "is missing")


def test_bad_special_tokens_and_tokenizers(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert_refuses(folder, "tokenizer.json is not a tokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    assert_refuses(folder, "generation_config.json: ", "'end'")


def test_bad_arguments(folder: Path) -> None:
    assert_refuses(folder, "the device 'nonsense' cannot be used", device="nonsense")
    assert_refuses(folder, "dtype must be a floating-point dtype", dtype=torch.int8)
    assert_refuses(folder, "dtype must be a floating-point dtype", dtype="bfloat16")
    with pytest.raises(ValueError, match="unknown format 'gguf'"):
        phasor.save(speaker(), folder / "new", format="gguf")
    assert not (folder / "new").exists()


@pytest.mark.parametrize("given", [None, 3, b"folder", ["folder"]])
def test_what_is_no_folder(folder: Path, given: Any) -> None:
    assert_refuses(given, f"a folder must be given by its path, not as {given!r}")
    with pytest.raises(ValueError, match="a folder must be given by its path"):
        phasor.save(speaker(), given)
    for source, destination in ((folder, given), (given, folder / "new")):
        with pytest.raises(ValueError, match="a folder must be given by its path"):
            phasor.convert(source, destination)


@pytest.mark.parametrize("given", [3, None, torch.nn.Linear(2, 2), {"weight": torch.zeros(2)}])
def test_what_is_no_model(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ValueError, match=r"^only a phasor\.Transformer can be saved, not .*$"):
        phasor.save(given, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_model_remembers_where_it_came_from_wherever_the_process_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, text in (("here", "mine"), ("there", "another model's")):
        phasor.save(speaker(), tmp_path / place / "model")
        (tmp_path / place / "model" / "vocab.txt").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    model = phasor.load("model")
    monkeypatch.chdir(tmp_path / "there")
    phasor.save(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "vocab.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "additional_chat_templates/a.jinja"])
@pytest.mark.parametrize("link", ["file", "folder"])
def test_what_a_link_points_to_outside_of_the_folder_is_not_copied(tmp_path: Path, name: str, link: str) -> None:
    phasor.save(speaker(), tmp_path / "model")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / Path(name).name).write_text("the password")
    place = tmp_path / "model" / name
    if link == "folder" and "/" in name:
        place.parent.symlink_to(tmp_path / "secret")
    else:
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(tmp_path / "secret" / place.name)
    model = phasor.load(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is a link to .*secret.*, outside of its folder, and is not copied"):
        phasor.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="outside of its folder"):
        phasor.convert(tmp_path / "model", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_links_within_a_folder_and_to_the_blobs_of_its_own_entry_in_a_hub_cache_are_copied(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--tiny" / "snapshots" / "0123abcd"
    phasor.save(speaker(), snapshot)
    blobs = tmp_path / "models--tiny" / "blobs"
    blobs.mkdir()
    (blobs / "aa11").write_text("words")
    (snapshot / "vocab.txt").symlink_to("../../blobs/aa11")
    (snapshot / "notes").write_text("merges")
    (snapshot / "merges.txt").symlink_to("notes")
    phasor.save(phasor.load(snapshot), tmp_path / "saved")
    for name, text in (("vocab.txt", "words"), ("merges.txt", "merges")):
        assert (tmp_path / "saved" / name).read_text() == text
        assert not (tmp_path / "saved" / name).is_symlink()
    (snapshot / "vocab.txt").unlink()
    (tmp_path / "models--other" / "blobs").mkdir(parents=True)
    (tmp_path / "models--other" / "blobs" / "bb22").write_text("another repository's")
    (snapshot / "vocab.txt").symlink_to("../../../models--other/blobs/bb22")
    with pytest.raises(ValueError, match="outside of its folder"):
        phasor.save(phasor.load(snapshot), tmp_path / "saved")


def test_a_folder_that_was_changed_says_what_differs_and_how_to_go_on(tmp_path: Path) -> None:
    for format in ("phasor", "hf"):
        folder = tmp_path / format
        phasor.save(speaker(), folder, format=format)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))
        text = assert_refuses(folder, "is damaged: config.json has", f"phasor verify --accept {folder}")
        assert "model.safetensors" not in text
        phasor.load(folder, verify=False)
        (folder / MANIFEST).unlink()
        phasor.load(folder)


def test_every_flipped_bit_of_a_model_folder_is_found(tmp_path: Path) -> None:
    """Of the weights too, whose numbers would be loaded as they are."""
    phasor.save(speaker(num_layers=1), tmp_path)
    for file in sorted(tmp_path.iterdir()):
        data = file.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 20)):
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            file.write_bytes(flipped)
            if file.name == MANIFEST:  # the model is as it was
                wrong = [name for report in phasor.verify(tmp_path) for name, _ in report.wrong]
                assert wrong or read_manifest_or_none(tmp_path) == json.loads(data)
            else:
                assert_refuses(tmp_path, str(tmp_path), f"{file.name} is not what was written")
        file.write_bytes(data)
    phasor.load(tmp_path)


def read_manifest_or_none(folder: Path) -> Any:
    try:
        return json.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        return None


def test_transformers_reads_a_folder_with_a_manifest(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = speaker()
    phasor.save(model, tmp_path, format="hf")
    assert (tmp_path / MANIFEST).is_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-4)


def test_a_folder_with_a_broken_manifest_is_not_replaced(tmp_path: Path) -> None:
    phasor.save(speaker(), tmp_path / "mine")
    phasor.save(speaker(), tmp_path / "there")
    (tmp_path / "there" / "vocab.json").write_text("mine")
    (tmp_path / "there" / MANIFEST).write_text("{")
    for write in (
        lambda place: phasor.convert(tmp_path / "mine", place),
        lambda place: phasor.save(speaker(), place),
    ):
        with pytest.raises(ValueError, match=f"has a damaged {MANIFEST}, so that nobody knows what phasor wrote there"):
            write(tmp_path / "there")
        assert (tmp_path / "there" / "vocab.json").read_text() == "mine"


def test_a_file_that_the_manifest_does_not_list_is_not_removed(tmp_path: Path) -> None:
    """Even one with a name that model folders may have."""
    phasor.save(speaker(), tmp_path / "mine")
    phasor.save(speaker(), tmp_path / "there")
    (tmp_path / "there" / "vocab.json").write_text("mine")
    for write in (
        lambda place: phasor.convert(tmp_path / "mine", place),
        lambda place: phasor.save(speaker(), place),
    ):
        with pytest.raises(ValueError, match=r"there holds more than a model \(vocab\.json\)"):
            write(tmp_path / "there")
        assert (tmp_path / "there" / "vocab.json").read_text() == "mine"


def test_a_model_that_others_wrote_is_not_replaced(tmp_path):
    """Except for the folder that the model was loaded from."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    model = phasor.Transformer(phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=30))
    for folder in (mine, theirs):
        phasor.save(model, folder, format="hf")
    (theirs / "phasor_manifest.json").unlink()
    before = {file.name: file.read_bytes() for file in theirs.iterdir()}
    for write in (lambda: phasor.save(model, theirs), lambda: phasor.convert(mine, theirs, "phasor")):
        with pytest.raises(ValueError, match="is a model that phasor did not write: it is left alone"):
            write()
    assert {file.name: file.read_bytes() for file in theirs.iterdir()} == before
    phasor.save(phasor.load(theirs), theirs, format="hf")
    phasor.convert(theirs, mine, "phasor")
