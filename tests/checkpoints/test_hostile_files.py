"""Files that lie, never end or make libraries panic: a ValueError of one sentence, in bounded time and memory."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers

import phasor
from phasor.checkpoints.folder import read_tokenizer
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.sentencepiece import read_sentencepiece
from phasor.checkpoints.tokenizer_errors import tokenizer_errors
from phasor.config.recipe import DataConfig, Recipe, read_recipe
from phasor.data import sources
from phasor.data.sources import documents, lines, source_files
from phasor.generation.encode import encode_prompts
from phasor.manifest import MANIFEST, Manifest

SIZES = {"vocab_size": 11, "dim": 8, "num_layers": 1, "num_heads": 2}


def sentence(call: Callable[[], object]) -> str:
    """The sentence that a call is refused with."""
    with pytest.raises((ValueError, OSError)) as error:
        call()
    text = str(error.value)
    assert text.strip()
    assert "\n" not in text
    assert len(text) < 1500
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    phasor.save(phasor.Transformer(phasor.ModelConfig(**SIZES)), tmp_path / "model")
    (tmp_path / "model" / MANIFEST).unlink()  # whoever forges a file leaves this one out
    return tmp_path / "model"


ALIASES = {
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "itself": "model: &a {position: *a}",
    "list-of-itself": "model: &a [*a]",
    "merge": "a: &a {x: 1}\nb: {!!merge <<: [*a, *a]}",
    "deep": "[" * 900_000,
    "deep-mapping": "{a: " * 200_000,
    "deep-list": "- " * 400_000 + "a",
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_and_depth_of_a_recipe(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.yaml").write_text(ALIASES[name])
    said = sentence(lambda: Recipe.from_file(tmp_path / "r.yaml"))
    if name == "laughs":
        assert "more than 100000 values" in said
    if "itself" in name:
        assert "line 1: an alias stands for something that it is part of" in said


def test_ordinary_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {layers: [&a {attention: {window: 3}}, *a]}\n")
    assert read_recipe(tmp_path / "r.yaml") == {"model": {"layers": [{"attention": {"window": 3}}] * 2}}


def test_a_recipe_of_absurd_size(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("#" * (2 << 20))
    assert "1024 KiB" in sentence(lambda: Recipe.from_file(tmp_path / "r.yaml"))


@pytest.mark.parametrize("text", ['{"task": "lm", "task": "mlm"}', '{"train": {"steps": 1, "steps": 2}}'])
def test_a_json_key_that_stands_twice(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    assert "stands twice" in sentence(lambda: Recipe.from_file(tmp_path / "r.json"))
    assert "stands twice" in sentence(lambda: Recipe.from_json(text))


def test_pipes_are_refused_and_not_waited_for(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert "pipe" in sentence(lambda: Recipe.from_file(pipe))
    assert "pipe" in sentence(lambda: source_files(str(pipe), DataConfig()))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        kept = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert name in sentence(lambda: phasor.load(folder))
        (folder / name).unlink()
        if kept is not None:
            (folder / name).write_bytes(kept)
    phasor.load(folder)


@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_a_packed_file_with_one_endless_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Any) -> None:
    monkeypatch.setattr(sources, "TEXT_BYTES", 1 << 20)
    bomb = tmp_path / "bomb.txt.gz"
    with gzip.open(bomb, "wb") as file:
        for _ in range(40):
            file.write(b"x" * (1 << 16) + (b"\n" if document == "paragraph" else b""))
    assert bomb.stat().st_size < 1 << 14
    assert "1 MiB" in sentence(lambda: list(documents(str(bomb), DataConfig(document=document))))
    with gzip.open(bomb, "wb") as file:
        file.write(b"a short line\n\n" * 1000)
    if document != "file":
        assert sum(1 for _ in documents(str(bomb), DataConfig(document=document))) == 1000
        assert sum(1 for _ in lines(bomb, DataConfig())) == 2000


def tokenizer_with(**parts: Any) -> str:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    return json.dumps(json.loads(tokenizer.to_str()) | parts)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
SEQUENCE = {"type": "Sequence"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BERT = {"type": "BertProcessing", "sep": ["a", 0], "cls": ["a", 0]}
WHOLE_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
SPECIAL_TOKEN = {"SpecialToken": {"id": "Q", "type_id": 0}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "", "cleanup": True}
CHARSMAP = base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"a" * 2000 + b"\0").decode()
LIMIT = {"direction": "Right", "strategy": "LongestFirst"}
FILL = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "a"}  # fmt: skip
BAD_TOKENIZERS = {
    "panic-charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "regex": {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(a"}}},
    "runaway": {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 8}},
    "runaway-decoder": {"decoder": {"type": "Sequence", "decoders": [REPLACE] * 8}},
    "runaway-nested": {"normalizer": SEQUENCE | {"normalizers": [SEQUENCE | {"normalizers": [REPLACE] * 4}]}},
    "runaway-prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 5000}},
    "runaway-processors": {"post_processor": SEQUENCE | {"processors": [BERT] * 900}},
    "runaway-template": {"post_processor": TEMPLATE | {"single": [WHOLE_TEXT] * 2000}},
    "runaway-templates": {
        "post_processor": SEQUENCE
        | {"processors": [SEQUENCE | {"processors": [TEMPLATE | {"single": [WHOLE_TEXT] * 8}] * 4}]}
    },
    "runaway-special-token": {
        "post_processor": TEMPLATE
        | {"single": [SPECIAL_TOKEN] * 40, "special_tokens": {"Q": {"id": "Q", "ids": [0] * 40, "tokens": ["a"] * 40}}}
    },
    "runaway-bytes": {"normalizer": SEQUENCE | {"normalizers": [{"type": "ByteLevel"}] * 30}},
    "runaway-byte-words": {"pre_tokenizer": SEQUENCE | {"pretokenizers": [BYTE_LEVEL] * 30}},
    "runaway-suffix": {"decoder": SEQUENCE | {"decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}},
    "runaway-delimiter": {"decoder": SEQUENCE | {"decoders": [CTC] * 40}},
    "runaway-charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "runaway-together": {"normalizer": REPLACE, "post_processor": TEMPLATE | {"single": [WHOLE_TEXT] * 50}},
    "runaway-overlap": {"truncation": LIMIT | {"max_length": 9000, "stride": 8999}},
    "padding": {"padding": FILL | {"strategy": {"Fixed": 10**9}}},
    "padding-multiple": {"padding": FILL | {"pad_to_multiple_of": 10**9}},
    "no-model": {"model": None},
    "vocabulary": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}},
}
BAD_WHEN_USED = {
    "panic-backtracking": {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(a|a)*$|(a+)+b"}}},
    "panic-template": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "no-unknown": {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "zz"}},
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_tokenizers_that_panic_or_run_away(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_with(**BAD_TOKENIZERS[name]))
    said = sentence(lambda: read_tokenizer(tmp_path))
    assert capfd.readouterr().err == ""
    assert "tokenizer.json" in said
    assert "runaway" not in name or "times as long" in said


@pytest.mark.parametrize("name", BAD_WHEN_USED)
def test_tokenizers_that_panic_when_they_are_used(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_with(**BAD_WHEN_USED[name]))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert "cannot encode the prompt" in sentence(lambda: encode_prompts(tokenizer, ["a" * 40 + " c"]))
    assert capfd.readouterr().err == ""


def test_what_others_write_to_stderr_is_kept_but_a_panic(capfd: pytest.CaptureFixture[str]) -> None:
    with tokenizer_errors("outer"):
        os.write(2, b"first ")
        with tokenizer_errors("inner"):
            os.write(2, b"second")
    assert capfd.readouterr().err == "first second"


def test_ordinary_replacements_are_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.NFKC()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path) is not None


def test_a_hub_cache_names_no_folder_outside(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "refs").mkdir()
    for name in ("../..", "/etc", "a/b", ""):
        (tmp_path / "refs" / "main").write_text(name)
        assert "must name a folder" in sentence(lambda: resolve_folder(tmp_path))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one"])
def test_weights_of_other_dtypes(folder: Path, dtype: torch.dtype, everywhere: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    last = list(tensors)[-1]
    save_file(
        {n: x.to(dtype) if everywhere or n == last else x for n, x in tensors.items()}, folder / "model.safetensors"
    )
    said = sentence(lambda: phasor.load(folder))
    assert last in said or everywhere
    assert "model.safetensors" in said


def test_weights_of_mixed_floating_dtypes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    last = list(tensors)[-1]
    save_file(tensors | {last: tensors[last].to(torch.bfloat16)}, folder / "model.safetensors")
    assert "torch.bfloat16" in sentence(lambda: phasor.load(folder))
    assert {x.dtype for x in phasor.load(folder, dtype=torch.float32).parameters()} == {torch.float32}


def changed_header(rng: random.Random, header: dict[str, Any], size: int) -> bytes:
    """The header of a safetensors file with one lie in it, and its length."""
    name = rng.choice([key for key in header if key != "__metadata__"])
    numbers = [0, 1, -1, 7, size, size + 1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 1.5, None, "x", [], True]
    entry = header[name]
    kind = rng.randrange(9)
    if kind == 0:
        entry["data_offsets"] = [rng.choice(numbers), rng.choice(numbers)]
    elif kind == 1:
        entry["data_offsets"][rng.randrange(2)] = rng.choice(numbers)
    elif kind == 2:
        entry["shape"] = [rng.choice(numbers) for _ in range(rng.randrange(4))]
    elif kind == 3:
        entry["dtype"] = rng.choice(["F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "C64", "X", 1, None, ""])
    elif kind == 4:
        del entry[rng.choice(list(entry))]
    elif kind == 5:
        header[rng.choice([name + "x", "", "../x", "__metadata__", "\udcff"])] = entry
        header.pop(name, None)
    elif kind == 6:
        header[name] = header[rng.choice([key for key in header if key != "__metadata__"])]
    elif kind == 7:
        header[name] = rng.choice([None, [], 1, "x", {"shape": [1]}])
    text = json.dumps(header).encode()
    if kind == 8:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    lengths = [0, 1, len(text) - 1, len(text) + 1, 1 << 31, (1 << 64) - 1]
    length = rng.choice(lengths) if rng.random() < 0.1 else len(text)
    return struct.pack("<Q", length) + text


def check_headers(folder: Path, seeds: range) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    before = phasor.load(folder).state_dict()
    length = struct.unpack("<Q", whole[:8])[0]
    data = whole[8 + length :]
    for seed in seeds:
        rng = random.Random(seed)
        lie = changed_header(rng, json.loads(whole[8 : 8 + length]), len(data))
        file.write_bytes(lie + (data if rng.random() < 0.9 else data[: rng.randrange(len(data))]))
        try:
            loaded = phasor.load(folder).state_dict()
        except ValueError as error:
            if len(str(error)) > 1500 or "\n" in str(error):
                raise AssertionError(seed) from error
        else:  # a change without effect, as in white space or of one tensor to its own shape
            assert {n: x.shape for n, x in loaded.items()} == {n: x.shape for n, x in before.items()}, seed


def test_safetensors_headers_that_lie(folder: Path) -> None:
    check_headers(folder, range(150))


@pytest.mark.slow
def test_many_safetensors_headers_that_lie(folder: Path) -> None:
    check_headers(folder, range(1000, 6000))


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", "LICENSE"])
def test_what_stands_in_the_way_is_named_and_kept(folder: Path, name: str) -> None:
    (folder / name).write_text("mine")
    model = phasor.load(folder)
    assert f"more than a model ({name})" in sentence(lambda: phasor.save(model, folder))
    assert (folder / name).read_text() == "mine"
    assert sorted(file.name for file in folder.parent.iterdir()) == ["model"]


def test_what_may_not_be_read_is_not_called_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after chmod 0, which root does not notice."""
    open_file, status = os.open, os.stat

    def refuse(path: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    def only_weights(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", only_weights)
    assert "model.safetensors cannot be read: Permission denied" in sentence(lambda: phasor.load(folder))

    def forbid(folder_too: bool) -> None:
        monkeypatch.setattr(os, "open", lambda path, *args, **more: refuse(path, *args, original=open_file, **more))
        if folder_too:
            monkeypatch.setattr(os, "stat", lambda path, *args, **more: refuse(path, *args, original=status, **more))

    for folder_too in (False, True):
        forbid(folder_too)
        for call in (
            lambda: phasor.load(folder),
            lambda: phasor.convert(folder, folder.parent / "new"),
            lambda: phasor.Recipe.from_file(folder / "config.json"),
            lambda: phasor.explain(str(folder)),
        ):
            assert "ermission denied" in sentence(call), folder_too


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["phasor_manifest.json", "spiece.model"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    read = Manifest.read if name.startswith("phasor") else lambda folder: read_sentencepiece(folder / name)
    assert "regular file" in sentence(lambda: read(tmp_path))
