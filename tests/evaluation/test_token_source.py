"""The tokens of one long file: texts and token files, in pieces."""

import gzip
import hashlib
import os
import tracemalloc

import numpy as np
import pytest
import torch

from phasor import Transformer, preset
from phasor.config.recipe import DataConfig
from phasor.data.tokenizers import byte_tokenizer, train_tokenizer
from phasor.evaluation import token_source
from phasor.evaluation.token_source import open_tokens

TEXT = "".join(f"line {i} of a text, with ä and 最{i % 7}\n" for i in range(8_000))


def new_model(vocab_size=300, tokenizer=None):
    with torch.device("meta"):
        model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=vocab_size))
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer([TEXT[:5000]], DataConfig(tokenizer="bpe", vocab_size=300))


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_is_encoded_as_training_encodes_it_wherever_it_is_read(tmp_path, bpe, kind, packed, monkeypatch):
    monkeypatch.setattr(token_source, "BLOCK", 1 << 17)
    tokenizer = byte_tokenizer() if kind == "bytes" else bpe
    data = gzip.compress(TEXT.encode()) if packed else TEXT.encode()
    path = write(tmp_path / ("a.txt.gz" if packed else "a.txt"), data)
    source = open_tokens(path, new_model(tokenizer=tokenizer))
    pieces, start = [], 0
    while start < len(TEXT):
        end = TEXT.rfind("\n", start, start + (1 << 16)) + 1 if len(TEXT) - start > 1 << 16 else len(TEXT)
        pieces.append(TEXT[start:end])
        start = end
    expected = np.concatenate([tokenizer.encode(text, add_special_tokens=False).ids for text in pieces])
    assert source.count is None
    assert np.array_equal(np.concatenate(list(source.chunks(9973))), expected)
    assert source.count == len(expected)
    for start in (0, len(expected) - 5, 17, len(expected) // 2, 1, len(expected), len(expected) + 99):
        assert source.read(start, 11).tolist() == expected[start : start + 11].tolist()
    assert source.read(0, 5).dtype == np.int64
    assert tokenizer.decode(source.read(0, source.count).tolist()) == TEXT


def test_a_mark_lets_a_later_source_read_on_without_what_is_before(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(token_source, "BLOCK", 1 << 17)
    monkeypatch.setattr(token_source, "MARKS", 4)
    path, model = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + TEXT.encode()), new_model(tokenizer=bpe)
    whole = open_tokens(path, model, special=True)
    ids = whole.read(0, 10**9)
    assert ids[0] == 1
    assert len(whole.marks) <= 4
    place = len(ids) - 1000
    mark = whole.mark(place)
    assert len(ids) // 2 < mark[0] <= place
    later = open_tokens(path, model, special=True)
    later.add_mark(*mark)
    assert later.read(place, 10**6).tolist() == ids[place:].tolist()
    assert later.start >= mark[0]
    assert later.read(0, 3).tolist() == ids[:3].tolist()


def test_special_tokens_are_what_the_tokenizer_begins_texts_with(tmp_path):
    path, model = write(tmp_path / "a.txt", "ab"), new_model(tokenizer=byte_tokenizer())
    assert open_tokens(path, model).read(0, 9).tolist() == [102, 103]
    assert open_tokens(path, model, special=True).read(0, 9).tolist() == [1, 102, 103]
    assert open_tokens(path, model, special=True).read(1, 1).tolist() == [102]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("suffix", [".bin", ".tokens"])
def test_token_files_of_both_widths(tmp_path, dtype, suffix):
    ids = np.arange(1000) % 300
    ids.astype(dtype).tofile(tmp_path / f"a{suffix}")
    source = open_tokens(tmp_path / f"a{suffix}", new_model())
    assert source.count == 1000
    assert source.read(0, 2000).tolist() == ids.tolist()
    assert source.read(990, 20).tolist() == ids[990:].tolist()
    wide = open_tokens(tmp_path / f"a{suffix}", new_model(), token_dtype={"<u2": "uint16", "<u4": "uint32"}[dtype])
    assert wide.read(0, 2000).tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64, ">u2"])
def test_npy_files(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=dtype))
    source = open_tokens(tmp_path / "a.npy", new_model())
    assert source.count == 200
    assert source.read(100, 3).tolist() == [100, 101, 102]


def test_an_empty_file_has_no_tokens(tmp_path):
    for name in ("a.bin", "a.txt"):
        source = open_tokens(write(tmp_path / name, b""), new_model(tokenizer=byte_tokenizer()))
        assert source.read(0, 5).tolist() == []
        assert source.count == 0


def test_the_fingerprint_is_the_sha256(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    source = open_tokens(path, new_model(tokenizer=byte_tokenizer()))
    assert source.fingerprint() == hashlib.sha256(TEXT.encode()).hexdigest()


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(lines):
        path = write(tmp_path / "a.txt", "some words that stand on a line\n" * lines)
        tracemalloc.start()
        total = sum(map(len, open_tokens(path, new_model(tokenizer=byte_tokenizer())).chunks(4096)))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total == 32 * lines
        return most

    assert peak(200_000) < 1.1 * peak(100_000)


def test_tokens_of_another_vocabulary_are_named(tmp_path):
    ids = np.zeros(100_000, np.uint16)
    ids[-1] = 300
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"another vocabulary: its token 99,999 is 300, and the model has .* 0 to 299"):
        open_tokens(tmp_path / "a.bin", new_model())
    np.save(tmp_path / "a.npy", np.array([4, -1]))
    with pytest.raises(ValueError, match="its token 1 is -1"):
        open_tokens(tmp_path / "a.npy", new_model())
    np.save(tmp_path / "b.npy", np.array([1 << 63], np.uint64))
    with pytest.raises(ValueError, match="another vocabulary"):
        open_tokens(tmp_path / "b.npy", new_model())
    source = open_tokens(write(tmp_path / "a.txt", "ab"), new_model(100, tokenizer=byte_tokenizer()))
    with pytest.raises(ValueError, match="its token 0 is 102"):
        source.read(0, 9)


def test_bad_files(tmp_path):
    model = new_model(tokenizer=byte_tokenizer())
    os.mkfifo(tmp_path / "pipe")
    cases = {
        tmp_path / "none.txt": "does not exist",
        tmp_path: "is a folder",
        tmp_path / "pipe": "is a pipe or a device",
        write(tmp_path / "odd.bin", b"abc"): "3 bytes, which is not a number of uint16 tokens",
        write(tmp_path / "a.dat", b"PK\x03\x04\0\0"): r"is not a text; files of token ids are named \.bin",
        write(tmp_path / "a.npy", b"no numpy"): "is not a .npy file",
        write(tmp_path / "b.npy", b""): "is not a .npy file",
        write(tmp_path / "c.txt.gz", b"no gzip"): "cannot be read",
    }
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "two.npy", np.zeros((2, 3), int))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    cases |= {tmp_path / "float.npy": "integers of one dimension", tmp_path / "two.npy": r"int64 \[2, 3\]"}
    cases |= {tmp_path / "object.npy": "is not a .npy file"}
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            open_tokens(path, model)
    with pytest.raises(ValueError, match="token_dtype must be one of uint16, uint32, not 'int8'"):
        open_tokens(tmp_path / "odd.bin", model, token_dtype="int8")
    with pytest.raises(ValueError, match="token_dtype is for files of token ids without a header"):
        open_tokens(tmp_path / "float.npy", model, token_dtype="uint16")
    with pytest.raises(ValueError, match="no tokenizer to read the text"):
        open_tokens(write(tmp_path / "a.txt", "a"), new_model())
    source = open_tokens(write(tmp_path / "b.txt", b"abc\xff\n"), model)
    with pytest.raises(ValueError, match=r"the byte 3 \(0xff\) is not UTF-8"):
        source.read(0, 9)
    half = open_tokens(write(tmp_path / "half.txt", "最".encode()[:2]), model)
    with pytest.raises(ValueError, match=r"the byte 0 \(0xe6\) is not UTF-8"):
        half.read(0, 9)


def test_a_file_that_becomes_shorter_is_an_error_and_no_crash(tmp_path):
    np.zeros(100_000, np.uint16).tofile(tmp_path / "a.bin")
    source = open_tokens(tmp_path / "a.bin", new_model())
    os.truncate(tmp_path / "a.bin", 10)
    with pytest.raises(ValueError, match="has become shorter"):
        source.read(50_000, 9)
