"""Texts from files: what is read, and where a mistake is said to be."""

import datetime
import errno
import gzip
import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor.config.recipe import DataConfig
from phasor.data.dates import chinese_number, dates, in_words
from phasor.data.sources import describe_left_out, documents, pairs, source_files
from phasor.data.split import place_of, plan_split, split


def read(path, **fields):
    return list(documents(str(path), DataConfig(train=str(path), **fields)))


def read_pairs(path, target=None, **fields):
    return list(pairs(str(path), DataConfig(train=str(path), **fields), target and str(target)))


def test_a_text_is_one_document_or_one_a_line_or_paragraph(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\ntwo\n\n\nthree é\r\n".encode())
    assert read(file) == ["one\ntwo\n\n\nthree é\r\n"]
    assert read(file, document="line") == ["one", "two", "three é"]
    assert read(file, document="paragraph") == ["one\ntwo", "three é"]


def test_a_folder_is_all_its_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "three"}\n\n{"text": "four"}\n')
    assert read(tmp_path) == ["one", "two", "three", "four"]


def test_folders_that_are_links_are_left_out_and_said(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("texts/a.txt", "elsewhere/b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "texts" / "more").symlink_to(tmp_path / "elsewhere")
    config = DataConfig()
    assert [file.name for file in source_files(str(tmp_path / "texts"), config)] == ["a.txt"]
    assert "this is left out: 1 link or device" in describe_left_out(str(tmp_path / "texts"), config)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scanned = os.scandir

    def scan(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scanned(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(ValueError, match="closed cannot be read: Permission denied"):
        source_files(str(tmp_path), DataConfig())


def test_jsonl_has_its_field(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"body": "a\nb"}) + "\n")
    assert read(file, field="body") == ["a\nb"]


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_come_from_tsv_and_from_two_files(tmp_path, packed):
    ending, opened = (".gz", gzip.open) if packed else ("", open)
    for name, text in {"a.tsv": "one\tuno\ntwo\tdos\n", "a.en": "one\ntwo\n", "a.es": "uno\ndos"}.items():
        with opened(tmp_path / f"{name}{ending}", "wt") as file:
            file.write(text)
    expected = [("one", "uno"), ("two", "dos")]
    assert read_pairs(tmp_path / f"a.tsv{ending}") == expected
    assert read_pairs(tmp_path / f"a.en{ending}", tmp_path / f"a.es{ending}") == expected


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "a.jsonl, line 2: 'text' (data.field) is 3, and not text"),
        ("a.jsonl", b'{"text": "x"}\n\n[}\n', "a.jsonl, line 3: this is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: there is no text"),
        ("a.jsonl", b'{"text": "a"}\n{"a": [{"b": 1, "b": 1}], "text": "c"}\n', "line 2: an object has several fields"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: character 0 of 'text' is half a character"),
        ("a.txt", b"ab\ncd\xffe\n", "a.txt, line 2: the byte 5 (0xff) is not UTF-8"),
        ("a.txt", b"\xef\xbb\xbfab\xff", "a.txt, line 1: the byte 5 (0xff) is not UTF-8"),
        ("a.txt.gz", b"not packed", "a.txt.gz cannot be read"),
        ("a.txt.gz", gzip.compress(b"some text " * 99, mtime=0)[:-20], "a.txt.gz cannot be read"),
        ("a.tsv", b"a\tb\n", "holds pairs"),
    ],
)
def test_a_wrong_text_is_named_with_its_place(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match="a") as error:
        read(tmp_path / name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a\tb\nc\n", "line 2: a pair has 2 columns, and this line has 1"),
        (b"a\tb\tc\n", "line 1: a pair has 2 columns, and this line has 3"),
        (b"a\tb\n\tc\n", "line 2: the source is empty"),
        (b"a\tb\na\t \n", "line 2: the target is empty"),
        (b"a\tb\nc\xff\td\n", "line 2: the byte 5 (0xff) is not UTF-8"),
    ],
)
def test_a_wrong_pair_is_named_with_its_line(tmp_path, data, said):
    (tmp_path / "a.tsv").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.tsv") as error:
        read_pairs(tmp_path / "a.tsv")
    assert said in str(error.value)


def test_bytes_that_are_not_text_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    assert read(tmp_path / "a.txt", errors="replace") == ["a\ufffdb"]


def test_two_files_must_have_as_many_lines(tmp_path):
    (tmp_path / "a").write_text("1\n2\n3\n")
    (tmp_path / "b").write_text("1\n2\n")
    for left, right in (("a", "b"), ("b", "a")):
        with pytest.raises(ValueError, match=r"b ends after 2 lines, and .*a goes on"):
            read_pairs(tmp_path / left, tmp_path / right)
    with pytest.raises(ValueError, match="two files"):
        read_pairs(tmp_path, tmp_path / "b")
    with pytest.raises(ValueError, match="translation needs pairs"):
        read_pairs(tmp_path / "a")


def test_a_source_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no data: they are read"):
        read(tmp_path)
    with pytest.raises(ValueError, match="what to train on"):
        source_files(None, DataConfig())


def from_chinese(text):
    """A number read the other way, sharing nothing with how it was written."""
    total, digit = 0, None
    for letter in text:
        if letter in "零":
            continue
        if (value := "〇一二三四五六七八九".find(letter)) >= 0:
            digit = value
        else:
            total += (1 if digit is None else digit) * {"十": 10, "百": 100, "千": 1000, "万": 10_000}[letter]
            digit = None
    return total + (digit or 0)


def from_words(text):
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    values = {word: i for i, word in enumerate((small + " seventeen eighteen nineteen").split())}
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
    values |= {word: 10 * i for i, word in enumerate(tens, 2)}
    total = part = 0
    for word in text.replace("-", " ").replace(" and ", " ").split():
        if word == "thousand":
            total, part = total + part * 1000, 0
        else:
            part = part * 100 if word == "hundred" else part + values[word]
    return total + part


@given(st.integers(0, 99_999))
def test_numbers_say_what_they_are_in_both_languages(number):
    assert from_chinese(chinese_number(number)) == number
    assert from_words(in_words(number)) == number


def test_dates_say_what_they_are_and_none_is_in_both_splits():
    train, valid = list(dates("train", count=3000)), list(dates("valid", count=500))
    assert not {chinese for _, chinese in train} & {chinese for _, chinese in valid}
    assert train == list(dates("train", count=3000)) != list(dates("train", seed=1, count=3000))
    for english, chinese in random.Random(0).sample(train + valid, 500):
        if "年" in chinese:
            year, rest = chinese.split("年")
            month, day = (from_chinese(part) for part in rest.rstrip("日").split("月"))
            when = datetime.date(int("".join(str("〇一二三四五六七八九".index(d)) for d in year)), month, day)
            assert when.strftime("%b") in english
            assert str(when.year) in english
            assert f"{when.day}" in english
        else:
            plain = english.replace(",", "")
            assert from_chinese(chinese) == (int(plain) if plain.isdigit() else from_words(english))


@given(st.lists(st.text("ab\n", min_size=1).filter(str.strip), min_size=1, max_size=60), st.floats(0.02, 0.5))
def test_every_text_is_on_one_side_or_cut_in_two(texts, share):
    examples = [(text,) for text in texts]
    try:
        plan = plan_split(lambda: examples, share, "texts")
    except ValueError as error:
        assert len(texts) == 1
        assert "one line" in str(error)  # noqa: PT017
        return
    found = list(split(examples, plan))
    assert any(side == "valid" for side, _ in found)
    if plan.tails:
        assert "".join(text for _, (text,) in found) == "".join(texts)
    else:
        assert [example for _, example in found] == examples
        held = {example for side, example in found if side == "valid"}
        assert not held & {example for side, example in found if side == "train"}
        assert plan.examples < 1 / share or all(place_of(e) < max(plan.threshold, share * 2**64) for e in held)


def test_about_the_share_is_held_out_by_the_source_of_a_pair():
    examples = [(str(i // 2), str(i)) for i in range(20_000)]
    plan = plan_split(lambda: examples, 0.05, "pairs")
    sides = [side for side, _ in split(examples, plan)]
    # 10,000 sources, each held out with probability 0.05: five standard deviations are 2 * 5 * 21.8 pairs.
    assert abs(sides.count("valid") - 1000) < 220
    assert sides[::2] == sides[1::2]


def test_an_empty_corpus_is_refused():
    with pytest.raises(ValueError, match=r"empty.txt holds no text"):
        plan_split(list, 0.1, "empty.txt")
