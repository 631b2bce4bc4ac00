"""Folders with SentencePiece files only: the tokens of transformers, token by token.

The small models in `spm_files/` were trained with the `sentencepiece` package, and the expected ids are those of
the tokenizers of `transformers`, which need that package; where it is installed, they are compared directly too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

import phasor
from phasor.checkpoints.protobuf import read_fields
from phasor.checkpoints.sentencepiece import OUTSIDE, read_sentencepiece
from phasor.checkpoints.sentencepiece_folders import LANGUAGES, read_sentencepiece_tokenizers
from phasor.generation.encode import encode_prompts

HERE = Path(__file__).parent / "spm_files"
EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
TEXTS = EXPECTED["texts"]


def write(folder: Path, files: dict[str, str], config: dict[str, Any], settings: dict[str, Any]) -> Path:
    """A folder with tokenizer files alone."""
    folder.mkdir(exist_ok=True)
    for name, source in files.items():
        shutil.copy(HERE / source, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config["model_type"] in EXPECTED and "vocab" in EXPECTED[config["model_type"]]:
        (folder / "vocab.json").write_text(json.dumps(EXPECTED[config["model_type"]]["vocab"]))
    return folder


def marian(folder: Path) -> Path:
    size = len(EXPECTED["marian"]["vocab"])
    return write(
        folder,
        {"source.spm": "source.spm", "target.spm": "target.spm"},
        {"model_type": "marian", "vocab_size": size},
        {},
    )


def m2m(folder: Path) -> Path:
    size = len(EXPECTED["m2m_100"]["vocab"]) + len(LANGUAGES["m2m100"]) + 8
    config = {"model_type": "m2m_100", "vocab_size": size}
    return write(folder, {"sentencepiece.bpe.model": "m2m.model"}, config, {"src_lang": "de"})


def llama(folder: Path) -> Path:
    return write(folder, {"tokenizer.model": "llama.model"}, {"model_type": "llama", "vocab_size": 600}, {})


def test_sources_and_targets_of_marian(tmp_path: Path) -> None:
    found = read_sentencepiece_tokenizers(marian(tmp_path))
    assert found is not None
    expected, unknown = EXPECTED["marian"], EXPECTED["marian"]["vocab"]["<unk>"]
    assert encode_prompts(found.source, TEXTS) == expected["ids"]
    assert found.source.token_to_id(OUTSIDE) is not None  # pieces that are not in the vocabulary are unknown
    assert sum(ids.count(unknown) for ids in expected["ids"]) > 20
    for ids, text in zip(expected["targets"], expected["decoded"], strict=True):
        assert found.tokenizer.decode(ids).strip() == text.removeprefix(">>fra<< ")


def test_sources_of_m2m(tmp_path: Path) -> None:
    found = read_sentencepiece_tokenizers(m2m(tmp_path))
    assert found is not None
    assert encode_prompts(found.source, TEXTS) == EXPECTED["m2m_100"]["ids"]
    assert found.tokenizer.token_to_id("__fr__") == len(EXPECTED["m2m_100"]["vocab"]) + LANGUAGES["m2m100"].index("fr")
    for ids, text in zip(EXPECTED["m2m_100"]["ids"], EXPECTED["m2m_100"]["decoded"], strict=True):
        assert found.tokenizer.decode(ids).strip() == text.removeprefix("__de__").strip()


def test_texts_of_llama(tmp_path: Path) -> None:
    found = read_sentencepiece_tokenizers(llama(tmp_path))
    assert found is not None
    theirs = EXPECTED["llama"]["transformers"]  # without the first token, which its settings ask for
    for ids, plain, back in zip(EXPECTED["llama"]["ids"], theirs, EXPECTED["llama"]["decoded"], strict=True):
        text = TEXTS[EXPECTED["llama"]["transformers"].index(plain)]
        assert found.tokenizer.encode(text).ids == [ids[0], *plain]
        assert found.tokenizer.decode(ids) == back


def test_a_folder_translates_text_and_is_saved_as_it_was(tmp_path: Path) -> None:
    size = len(EXPECTED["marian"]["vocab"])
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    special = {"pad_token_id": size - 1, "eos_token_id": 0, "decoder_start_token_id": size - 1}
    torch.manual_seed(0)
    config = transformers.MarianConfig(vocab_size=size, d_model=16, init_std=0.5, **sizes, **heads, **special)
    transformers.MarianMTModel(config).save_pretrained(tmp_path / "theirs")
    written = marian(tmp_path / "files")
    for name in ("source.spm", "target.spm", "vocab.json"):
        shutil.copy(written / name, tmp_path / "theirs")
    model, options = phasor.load(tmp_path / "theirs"), {"num_beams": 2, "max_new_tokens": 8}
    assert model.source_tokenizer is not None
    texts = [text for text in TEXTS if text.strip()][:6]
    rows = [ids for text, ids in zip(TEXTS, EXPECTED["marian"]["ids"], strict=True) if text.strip()][:6]
    tokens = [ids[:-1] if ids[-1] == 0 else ids for ids in phasor.generate(model, rows, **options)]
    expected = model.tokenizer.decode_batch(tokens)
    assert phasor.translate(model, texts, **options) == expected
    assert phasor.generate(model, texts, **options) == expected
    phasor.save(model, tmp_path / "hf", format="hf")
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert {"source.spm", "target.spm", "vocab.json"} <= names
    assert not {"tokenizer.json", "source_tokenizer.json"} & names  # transformers reads the SentencePiece files
    phasor.save(model, tmp_path / "ours")
    for name in ("hf", "ours"):
        assert phasor.translate(tmp_path / name, texts, **options) == expected
    (tmp_path / "theirs/source.spm").write_bytes(b"\x0f")
    with pytest.warns(UserWarning, match=r"takes token ids and no text: .*source\.spm is not a SentencePiece model"):
        assert phasor.load(tmp_path / "theirs").tokenizer is None


def test_directly_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    for make, cls in ((marian, transformers.MarianTokenizer), (m2m, transformers.M2M100Tokenizer)):
        folder = make(tmp_path / make.__name__)
        theirs, found = cls.from_pretrained(folder), read_sentencepiece_tokenizers(folder)
        assert found is not None
        assert encode_prompts(found.source, TEXTS) == [theirs(text)["input_ids"] for text in TEXTS]


def test_damaged_files(tmp_path: Path) -> None:
    """Every cut and many flips of a file are read, or refused in a sentence; nothing else is raised."""
    whole, random = (HERE / "source.spm").read_bytes(), Random(7)
    folder = marian(tmp_path)
    for _ in range(60):
        data = bytearray(whole[: random.randrange(len(whole))] if random.random() < 0.5 else whole)
        for _ in range(random.randrange(4)):
            if data:
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        (folder / "source.spm").write_bytes(data)
        with contextlib.suppress(ValueError):
            read_sentencepiece_tokenizers(folder)
    with pytest.raises(ValueError, match="longer than 64 bits"):
        list(read_fields(b"\xff" * 11))
    with pytest.raises(ValueError, match="unknown type 7"):
        list(read_fields(b"\x0f"))
    (folder / "source.spm").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"source\.spm is not a SentencePiece model that phasor reads: it has no unknown"
    ):
        read_sentencepiece(folder / "source.spm")
    (folder / "vocab.json").write_text('{"<unk>": 10000}')
    with pytest.raises(ValueError, match="the id of '<unk>' is 10000"):
        read_sentencepiece_tokenizers(folder)


def test_tokenizers_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, config = {"spiece.model": "llama.model"}, {"model_type": "t5", "vocab_size": 900}
    assert read_sentencepiece_tokenizers(write(tmp_path, files, config, {"extra_ids": 9})) is not None
    with pytest.raises(ValueError, match="extra_ids is 1000000000, and the model has 900 tokens"):
        read_sentencepiece_tokenizers(write(tmp_path, files, config, {"extra_ids": 10**9}))
    long = dataclasses.replace(
        read_sentencepiece(HERE / "llama.model"), charsmap=(1024).to_bytes(4, "little") + bytes(1024) + b"a" * 2000
    )
    monkeypatch.setattr("phasor.checkpoints.sentencepiece_folders.read_sentencepiece", lambda file: long)
    with pytest.raises(ValueError, match="times as long by its normalizer"):
        read_sentencepiece_tokenizers(write(tmp_path, files, config, {}))
