"""Tokenizers and prepared tokens: nothing lost, written once, never half."""

import fcntl
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import training_runs
from hypothesis import given
from hypothesis import strategies as st
from processes import forkserver
from tokenizers import Tokenizer, models, pre_tokenizers

from phasor import manifest
from phasor.config.recipe import DataConfig, Recipe
from phasor.data import encoding
from phasor.data import store as module
from phasor.data.encoding import PIECE, pieces, sample_texts
from phasor.data.examples import EXAMPLES
from phasor.data.store import find_prepared_data, load_prepared_data, prepare
from phasor.data.token_files import TokenStore, TokenWriter
from phasor.data.tokenizers import SPECIALS, byte_tokenizer, is_bytes, load_tokenizer, train_tokenizer
from phasor.manifest import MANIFEST, DamagedError

TEXTS = [f"the {n} quick foxes, 狐狸 {n * n} and naïve dogs\n\tindent {n}" for n in range(80)]


BYTES = byte_tokenizer()


def write_lines(folder, name, lines):
    file = folder / name
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(file)


def corpus(folder, **fields):
    train = write_lines(folder, "corpus.jsonl", (json.dumps({"text": text}) for text in TEXTS))
    return Recipe(data=DataConfig(**{"train": train, "tokenizer": "bytes", "validation_fraction": 0.2, **fields}))


def parallel(folder, **fields):
    train = write_lines(folder, "corpus.tsv", (f"number {n}\tnúmero {n * n}" for n in range(90)))
    data = DataConfig(**{"train": train, "tokenizer": "bpe", "vocab_size": 280, "validation_fraction": 0.2, **fields})
    return Recipe(task="translation", data=data)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
@pytest.mark.parametrize("task", ["lm", "translation", "mlm"])
def test_a_tokenizer_of_ours_changes_no_text_and_ends_it_as_the_task_does(kind, task):
    config = DataConfig(tokenizer=kind, vocab_size=320)
    ends = EXAMPLES[task].ends
    tokenizer = byte_tokenizer(ends) if kind == "bytes" else train_tokenizer(TEXTS, config, ends)
    assert [tokenizer.token_to_id(name) for name in SPECIALS] == [0, 1, 2, 3, 4]
    assert is_bytes(tokenizer) == (kind == "bytes")
    for text in [*TEXTS, " ελληνικά  \n\n\x00 🦊 ", ""]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        inside = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [1] * (task != "translation") + inside + [2] * (task != "lm")
        assert not set(inside) & set(range(5))


@given(st.text(max_size=40))
def test_bytes_are_their_own_tokens(text):
    BYTES.encode_special_tokens = True
    assert BYTES.encode(text, add_special_tokens=False).ids == [5 + byte for byte in text.encode()]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_name_of_a_special_token_in_a_text_is_only_text(tmp_path, kind):
    train = write_lines(tmp_path, "a.txt", [f"an <unk> or <eos> {n}" for n in range(40)])
    data = DataConfig(train=train, document="line", tokenizer=kind, vocab_size=300, validation_fraction=0.1)
    prepared = prepare(Recipe(data=data), tmp_path / "data")
    for i in range(len(prepared.train)):
        (ids,) = prepared.train[i]
        assert (ids[1:-1] > 4).all()
        assert "an <unk> or <eos>" in prepared.tokenizer.decode(ids.tolist())


def test_a_vocabulary_has_room_for_every_byte():
    with pytest.raises(ValueError, match="at least 261"):
        train_tokenizer(TEXTS, DataConfig(vocab_size=260))


@given(st.lists(st.integers(1, PIECE * 2), min_size=1, max_size=5), st.booleans())
def test_pieces_are_the_whole_text(sizes, lines):
    text = ("\n" if lines else " ").join("x" * size for size in sizes)
    found = pieces(text)
    assert "".join(found) == text
    assert max(map(len, found)) <= PIECE


def test_a_sample_is_spread_over_all_texts():
    examples = [(str(n),) for n in range(10_000)]
    found = [int(text) for text in sample_texts(examples, 0.1)]
    # A thousand of them, each by chance: five standard deviations of the count, and of the mean of what is taken.
    assert abs(len(found) - 1000) < 5 * 30
    assert abs(np.mean(found) - 5000) < 5 * 2887 / 1000**0.5
    assert list(sample_texts(examples, 2.0)) == [text for (text,) in examples]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_documents_come_back_between_their_ends(tmp_path, kind):
    prepared = prepare(corpus(tmp_path, tokenizer=kind, vocab_size=300), tmp_path / "data")
    found = []
    for store in (prepared.train, prepared.valid):
        for i in range(len(store)):
            (ids,) = store[i]
            assert (ids[0], ids[-1]) == (1, 2)
            assert len(ids) == store.lengths[i, 0]
            found.append(prepared.tokenizer.decode(ids.tolist()))
    assert sorted(found) == sorted(TEXTS)
    assert [text for (text,) in prepared.valid_texts()] == found[len(prepared.train) :]
    assert prepared.valid.text_bytes == sum(len(text.encode()) for text in found[len(prepared.train) :])
    with pytest.raises(IndexError):
        prepared.train[len(prepared.train)]


@pytest.mark.parametrize("shared", [True, False])
def test_pairs_come_back_with_a_start_and_ends(tmp_path, shared):
    prepared = prepare(parallel(tmp_path, share_vocabulary=shared), tmp_path / "data")
    assert (prepared.source_tokenizer is prepared.tokenizer) == shared
    for i in range(len(prepared.train)):
        source, target = prepared.train[i]
        assert source[-1] == target[-1] == 2
        assert target[0] == 1 != source[0]
        number = int(prepared.source_tokenizer.decode(source.tolist()).removeprefix("number "))
        assert prepared.tokenizer.decode(target.tolist()) == f"número {number * number}"


def test_a_long_document_is_whole_in_spite_of_its_pieces(tmp_path):
    text = "".join(f"line {n}\n" for n in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    data = DataConfig(train=str(tmp_path / "long.txt"), tokenizer="bpe", vocab_size=300, validation_fraction=0.1)
    prepared = prepare(Recipe(data=data), tmp_path / "data")
    both = [prepared.tokenizer.decode(s[0][0].tolist()) for s in (prepared.train, prepared.valid)]
    assert "".join(both) == text
    assert len(both[1]) == pytest.approx(0.1 * len(text), rel=0.01)


@pytest.mark.parametrize("how", ["replaced", "written in place"])
def test_another_text_of_the_same_size_and_time_is_seen(tmp_path, monkeypatch, how):
    recipe = corpus(tmp_path, cache=str(tmp_path / "cache"))
    source = Path(recipe.data.train)
    first = prepare(recipe, tmp_path / "run")
    before = source.stat()
    other = tmp_path / "other" if how == "replaced" else source
    other.write_bytes(source.read_bytes().replace(b"foxes", b"boxes"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(source)
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert find_prepared_data(recipe, first.folder, first.fingerprint)[1] is False
    second = prepare(recipe, tmp_path / "run")
    assert second.fingerprint != first.fingerprint
    assert "boxes" in second.tokenizer.decode(second.train[0][0].tolist())
    monkeypatch.setattr(module, "write", pytest.fail)
    source.chmod(0o600)  # another time of change and the same text: it is read, and nothing is prepared again
    assert prepare(recipe, tmp_path / "run").fingerprint == second.fingerprint


def test_one_long_document_is_encoded_a_part_at_a_time(tmp_path, monkeypatch):
    text = "".join(f"line {n} of one document\n" for n in range(8000))
    file = tmp_path / "book.txt"
    file.write_text(text)
    data = DataConfig(train=str(file), tokenizer="bpe", vocab_size=300, validation_fraction=0.1)
    whole = prepare(Recipe(data=data), tmp_path / "whole").fingerprint
    monkeypatch.setattr(encoding, "GROUP", 10_000)
    reports = []
    parts = prepare(Recipe(data=data), tmp_path / "parts", lambda *report: reports.append(report))
    done = [count for what, count, total in reports if what == "tokenizing" and total == len(text)]
    assert (done[0], done[-1]) == (0, len(text))
    assert max(after - before for before, after in pairwise(done)) <= PIECE
    assert parts.fingerprint == whole


def test_a_text_that_is_as_it_was_is_not_read_again(tmp_path, monkeypatch):
    recipe = corpus(tmp_path)
    prepare(recipe, tmp_path / "data")
    read = []
    monkeypatch.setattr(module, "hashes", lambda files: read.extend(files) or [])
    prepare(recipe, tmp_path / "data")
    assert read == []


def test_prepared_data_is_used_again_until_something_changes(tmp_path):
    reports = []

    def prepares(recipe, folder="data"):
        reports.clear()
        prepare(recipe, tmp_path / folder, lambda *report: reports.append(report))
        return bool(reports)

    recipe = corpus(tmp_path)
    assert prepares(recipe)
    assert reports[-1] == ("tokenizing", sum(map(len, TEXTS)), sum(map(len, TEXTS)))
    assert not prepares(recipe)
    assert not prepares(
        recipe.replace(data=recipe.data.replace(sequence_length=17, workers=3))
    )  # not what tokens depend on
    assert prepares(recipe.replace(data=recipe.data.replace(validation_fraction=0.3)))
    assert prepares(recipe)
    os.utime(recipe.data.train, ns=(1, 1))
    assert prepares(recipe)
    (tmp_path / "data" / "train.0.tokens").write_bytes(b"cut short")
    assert prepares(recipe)
    (tmp_path / "data" / MANIFEST).write_text("{")
    assert prepares(recipe)
    (tmp_path / "data" / "tokenizer.json").unlink()
    assert prepares(recipe)
    cached = recipe.replace(data=recipe.data.replace(cache=str(tmp_path / "cache")))
    assert prepares(cached, "here")
    assert not prepares(cached, "there")
    assert not (tmp_path / "here").exists()


def test_a_failure_leaves_what_was_there_and_nothing_half(tmp_path, monkeypatch):
    recipe = corpus(tmp_path)
    before = prepare(recipe, tmp_path / "data").train[3][0].tolist()
    monkeypatch.setattr(module, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        prepare(recipe.replace(data=recipe.data.replace(validation_fraction=0.4)), tmp_path / "data")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "data"]
    assert prepare(recipe, tmp_path / "data").train[3][0].tolist() == before


def prepared_alone(folder, recipe, note, *others):
    """A separate process that prepares, and says so by a note before it ends; it waits for the other notes."""
    notes = [str(folder / name) for name in (note, *others)]
    process = forkserver().Process(
        target=training_runs.prepare_alone, args=(recipe.to_json(), folder / "data", notes[0], notes[1:]), daemon=True
    )
    process.start()
    return process


def waited_for(file):
    deadline = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return file.exists()


@pytest.mark.parametrize("cached", [False, True])
def test_what_a_kill_left_is_swept_up_next_time_and_nothing_else(tmp_path, cached):
    recipe = corpus(tmp_path, cache=str(tmp_path / "cache") if cached else None)
    place = tmp_path / "cache" if cached else tmp_path
    process = prepared_alone(tmp_path, recipe, "written", "never")
    assert waited_for(tmp_path / "written")
    parts = set(place.glob(".*.part"))
    assert len(parts) == 1
    (place / ".thesis-1.part").mkdir()
    other = recipe.replace(data=recipe.data.replace(validation_fraction=0.3))
    prepare(other, tmp_path / "data")
    assert set(place.glob(".*.part")) == parts | {place / ".thesis-1.part"}  # it is still being written
    process.kill()
    process.join()
    assert set(place.glob(".*.part")) == parts | {place / ".thesis-1.part"}
    prepare(other.replace(data=other.data.replace(validation_fraction=0.4)), tmp_path / "data")
    assert list(place.glob(".*.part")) == [place / ".thesis-1.part"]


@pytest.mark.parametrize("cached", [False, True])
def test_two_processes_that_prepare_the_same_at_once_both_succeed(tmp_path, cached):
    recipe = corpus(tmp_path, cache=str(tmp_path / "cache") if cached else None)
    notes = ["one", "two"]
    both = [prepared_alone(tmp_path, recipe, note, *notes) for note in notes]
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    reports = []
    prepare(recipe, tmp_path / "data", lambda *report: reports.append(report))
    assert not reports
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("cache/.*"))


def test_a_folder_that_cannot_be_held_is_used_nevertheless(tmp_path, monkeypatch):
    """As on file systems without locks: what may be left over stays."""

    def refuse(*_):
        raise OSError(37, "No locks available")

    (tmp_path / ".data-1.part").mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    prepare(corpus(tmp_path), tmp_path / "data")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".data-1.part", "corpus.jsonl", "data"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="left alone"):
        prepare(corpus(tmp_path), tmp_path / "data")
    assert (tmp_path / "data" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no text"), (" \n\n", "holds no text"), ("just one line\n", "of one line"), ("one", "of one line")],
)
def test_too_little_text_is_refused_in_one_sentence(tmp_path, text, said):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=r"a\.txt") as error:
        prepare(Recipe(data=DataConfig(train=str(tmp_path / "a.txt"))), tmp_path / "data")
    assert said in str(error.value)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_only_one_text_again_and_again_leaves_nothing_to_train_on(tmp_path):
    train = write_lines(tmp_path, "a.tsv", ["same\tigual"] * 9)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        prepare(Recipe(task="translation", data=DataConfig(train=train, tokenizer="bytes")), tmp_path / "data")


def test_a_file_for_validation_is_used_whole(tmp_path):
    valid = write_lines(tmp_path, "valid.jsonl", ['{"text": "one line"}'])
    prepared = prepare(corpus(tmp_path, valid=valid), tmp_path / "data")
    assert (len(prepared.train), prepared.valid_texts()) == (80, [("one line",)])
    (tmp_path / "valid.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"valid\.jsonl holds no text"):
        prepare(corpus(tmp_path, valid=valid), tmp_path / "data")


def test_long_pairs_are_refused_or_left_out(tmp_path):
    train = write_lines(tmp_path, "a.tsv", [f"{n}\t{'x' * n}" for n in range(1, 40)])
    data = DataConfig(train=train, tokenizer="bytes", validation_fraction=0.1, sequence_length=30)
    recipe = Recipe(task="translation", data=data)
    with pytest.raises(ValueError, match=r"a pair has 31 tokens on a side, and data\.sequence_length is 30"):
        prepare(recipe, tmp_path / "data")
    prepared = prepare(recipe.replace(data=data.replace(too_long="skip")), tmp_path / "data")
    assert len(prepared.train) + len(prepared.valid) == 29
    assert prepared.left_out == ("10 pairs with more than 30 tokens on a side",)


def test_dates_need_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("phasor.data.dates.COUNTS", {"train": 60, "valid": 9})
    recipe = Recipe(task="translation", data=DataConfig(format="dates", tokenizer="bytes", sequence_length=64))
    prepared = prepare(recipe, tmp_path / "data")
    assert (len(prepared.train), len(prepared.valid)) == (60, 9)


def foreign(folder, names, **stated):
    """A folder with a tokenizer of words that is not ours, cutting texts short as some folders do."""
    vocabulary = {name: i for i, name in enumerate([*names, "the", "quick", "foxes", "and", "dogs"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if stated:
        (folder / "generation_config.json").write_text(json.dumps(stated))
    return folder


def test_a_folders_tokenizer_keeps_its_own_special_tokens(tmp_path):
    _, special = load_tokenizer(foreign(tmp_path / "bert", ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]))
    assert special.to_dict() == {"pad": 1, "bos": 2, "eos": 3, "mask": 4, "start": 2}
    stated = {"eos_token_id": 1, "decoder_start_token_id": 0, "pad_token_id": 0}
    _, special = load_tokenizer(foreign(tmp_path / "t5", ["<pad>", "</s>"], **stated))
    assert special.to_dict() == {"pad": 0, "bos": None, "eos": 1, "mask": None, "start": 0}
    _, special = load_tokenizer(foreign(tmp_path / "gpt", ["<|endoftext|>"]))
    assert (special.pad, special.bos, special.eos) == (0, 0, 0)
    with pytest.raises(ValueError, match="no token that ends a text"):
        load_tokenizer(foreign(tmp_path / "none", ["[UNK]"]))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folders_tokenizer_reads_texts_whole_and_is_known_by_what_is_in_it(tmp_path):
    folder = foreign(tmp_path / "gpt", ["<|endoftext|>"])
    recipe = corpus(tmp_path, tokenizer=str(folder))
    prepared = prepare(recipe, tmp_path / "data")
    assert prepared.train.lengths.min() > 6
    tuned = corpus(tmp_path, tokenizer="auto").replace(init_from=str(folder))
    assert prepare(tuned, tmp_path / "other").vocab_size == prepared.vocab_size
    with pytest.raises(ValueError, match="no mask token"):
        prepare(recipe.replace(task="mlm"), tmp_path / "data")


@pytest.mark.parametrize("how", ["zeros", "flip"])
@pytest.mark.parametrize(
    "name", ["train.0.tokens", "train.0.ends", "valid.0.ends", "valid.jsonl", "data.json", MANIFEST]
)
def test_damaged_data_are_noticed_and_prepared_again(tmp_path, name, how):
    recipe, folder = corpus(tmp_path), tmp_path / "data"
    expected = prepare(recipe, folder)
    content = {file.name: file.read_bytes() for file in folder.iterdir()}
    middle = len(content[name]) // 2
    flipped = content[name][:middle] + bytes([content[name][middle] ^ 16]) + content[name][middle + 1 :]
    (folder / name).write_bytes(bytes(len(content[name])) if how == "zeros" else flipped)
    with pytest.raises(DamagedError, match=name.replace(".", r"\.")):
        load_prepared_data(folder)
    with pytest.raises(DamagedError):
        find_prepared_data(recipe, folder, expected.fingerprint)
    assert prepare(recipe, folder).fingerprint == expected.fingerprint
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == content


@pytest.mark.parametrize("ends", [[1, 2, 3], [0, 3, 2], [0, 2, 1 << 50], [0, -1, 3]])
def test_examples_that_end_beside_their_tokens_are_refused(tmp_path, ends):
    with TokenWriter(tmp_path, "train", sides=1, vocab_size=99) as writer:
        for tokens in ([1, 2], [3]):
            writer.add((np.array(tokens),), text_bytes=1)
    (tmp_path / "train.0.ends").write_bytes(np.array(ends, "<i8").tobytes())
    with pytest.raises(ValueError, match="do not end where its tokens do"):
        TokenStore(tmp_path, "train", writer.describe())


def test_data_that_cannot_be_read_are_not_taken_for_damaged(tmp_path, monkeypatch):
    recipe = corpus(tmp_path)
    prepare(recipe, tmp_path / "data")
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "data").iterdir()}

    def refuse(file, thorough):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(manifest, "fingerprint", refuse)
    with pytest.raises(PermissionError, match=r"data/data\.json cannot be read: Permission denied"):
        prepare(recipe, tmp_path / "data")
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "data").iterdir()} == before


def test_what_a_link_points_to_is_not_replaced(tmp_path):
    """Neither other data, which take the place of the link, nor what is no data at all."""
    other = prepare(corpus(tmp_path, validation_fraction=0.4), tmp_path / "theirs").fingerprint
    (tmp_path / "data").symlink_to(tmp_path / "theirs")
    recipe = corpus(tmp_path)
    found = prepare(recipe, tmp_path / "data")
    assert not (tmp_path / "data").is_symlink()
    assert load_prepared_data(tmp_path / "theirs").fingerprint == other != found.fingerprint
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "manifest.json").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    with pytest.raises(ValueError, match="left alone"):
        prepare(recipe, tmp_path / "link")
    assert (tmp_path / "thesis" / "manifest.json").read_text() == "years of work"


@pytest.mark.parametrize("names", [["manifest.json", "corpus.txt"], [MANIFEST, "labels.csv"], ["tokenizer.json"]])
def test_a_folder_with_files_of_others_is_left_alone_whatever_they_are_called(tmp_path, names):
    (tmp_path / "data").mkdir()
    for name in names:
        (tmp_path / "data" / name).write_text("mine")
    with pytest.raises(ValueError, match="does not hold prepared data: it is left alone"):
        prepare(corpus(tmp_path), tmp_path / "data")
    assert [(tmp_path / "data" / name).read_text() for name in names] == ["mine"] * len(names)


def test_ctrl_c_while_a_tokenizer_is_learned(request: pytest.FixtureRequest) -> None:
    ended = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def texts() -> Iterator[str]:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**6)  # half a second or more in which no signal is looked at
        ended.append(True)
        yield "text"

    main = threading.main_thread().ident
    threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(texts(), DataConfig(tokenizer="bpe", vocab_size=261))
    assert not ended


def test_what_a_text_raises_while_a_tokenizer_is_learned() -> None:
    def texts() -> Iterator[str]:
        yield "text"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train_tokenizer(texts(), DataConfig(tokenizer="bpe", vocab_size=261))
