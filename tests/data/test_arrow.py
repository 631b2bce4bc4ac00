"""Parquet and .zst: the same examples as from JSON lines, a row group at a time."""

import json
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phasor.config.recipe import DataConfig, Recipe
from phasor.data.conversations import conversations, preferences
from phasor.data.sources import describe_left_out, documents, records
from phasor.data.store import prepare

TEXTS = ["Grüezi", "a\nb", "  ", "天空", "x" * 300]
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            *({"role": r, "content": r} for r in ("user", "assistant")),
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Zürich?"},
            {
                "role": "assistant",
                "content": "One moment.",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "sun", "name": "f"},
            {"role": "assistant", "content": "Sun."},
        ]
    },
]
PAIRS = [
    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    {
        "prompt": [{"role": "user", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}],
    },
]


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def write_parquet(file, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return str(file)


def write_zst(file, data):
    with pa.CompressedOutputStream(str(file), "zstd") as out:
        out.write(data)
    return str(file)


def without_places(found):
    return [{name: value for name, value in row._asdict().items() if name != "where"} for row in found]


@pytest.mark.parametrize("codec", ["snappy", "zstd", "none"])
def test_texts_are_those_of_json_lines(tmp_path, codec):
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    lines = write_lines(tmp_path / "a.jsonl", rows)
    table = write_parquet(tmp_path / "a.parquet", rows, compression=codec, row_group_size=2)
    assert list(documents(table, DataConfig())) == list(documents(lines, DataConfig())) == [*TEXTS[:2], *TEXTS[3:]]
    assert list(documents(table, DataConfig(format="parquet"))) == list(documents(lines, DataConfig()))


def test_conversations_are_those_of_json_lines(tmp_path):
    """With the fields that some messages have and others lack, which parquet fills up."""
    lines, table = write_lines(tmp_path / "a.jsonl", CHATS), write_parquet(tmp_path / "a.parquet", CHATS)
    found = list(conversations(table, DataConfig()))
    assert without_places(found) == without_places(conversations(lines, DataConfig()))
    assert [row.where for row in found] == [f"{table}, row {number}" for number in (1, 2, 3)]
    for pair in PAIRS:
        lines, table = write_lines(tmp_path / "b.jsonl", [pair]), write_parquet(tmp_path / "b.parquet", [pair])
        assert without_places(preferences(table, DataConfig())) == without_places(preferences(lines, DataConfig()))


def test_a_run_has_the_same_tokens(tmp_path):
    rows = [{"text": text * 20} for text in "abcdefghij"]
    write_lines(tmp_path / "a.jsonl", rows)
    write_parquet(tmp_path / "b.parquet", rows)
    data = tmp_path / "a.jsonl"
    write_zst(tmp_path / "c.jsonl.zst", data.read_bytes())
    found = {
        prepare(
            Recipe(data=DataConfig(train=str(file), tokenizer="bytes", validation_fraction=0.2)), tmp_path / file.stem
        ).fingerprint
        for file in (data, tmp_path / "b.parquet", tmp_path / "c.jsonl.zst")
    }
    assert len(found) == 1


def test_a_folder_of_shards_is_read_in_order(tmp_path):
    for number, kind in enumerate(["jsonl", "parquet", "jsonl.zst", "parquet"]):
        rows, file = [{"text": f"{number} {i}"} for i in range(3)], tmp_path / f"shard-{number}.{kind}"
        if kind == "jsonl.zst":
            write_zst(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
        else:
            (write_parquet if kind == "parquet" else write_lines)(file, rows)
    (tmp_path / "picture.png").write_bytes(b"\0\1")
    assert list(documents(str(tmp_path), DataConfig())) == [f"{n} {i}" for n in range(4) for i in range(3)]
    assert describe_left_out(str(tmp_path), DataConfig()).endswith("this is left out: 1 binary file")


def test_shards_are_read_a_row_group_at_a_time(tmp_path):
    """What pyarrow holds is a row group and no more, and a later shard is opened when it is its turn."""
    rows = [{"text": f"{i} " + "a" * 999} for i in range(12_000)]
    write_parquet(tmp_path / "a.parquet", rows, compression="none", row_group_size=500, use_dictionary=False)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing else")
    found, before, most = documents(str(tmp_path), DataConfig()), pa.total_allocated_bytes(), 0
    for i, row in enumerate(rows):
        assert next(found) == row["text"], i
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 3_000_000 < 12_000_000  # 500 rows of 1,000 bytes, which are decoded into as much again
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read past row 0"):
        next(found)


BAD = {
    "is 3, and not text": [{"text": 3}],
    "there is no text under 'text' \\(data.field\\), only: body": [{"body": "a"}],
    "row 2: there is no text": [{"text": "a", "id": 1}, {"text": None, "id": 2}],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_rows_have_a_place(tmp_path, message):
    table = write_parquet(tmp_path / "a.parquet", BAD[message])
    with pytest.raises(ValueError, match=message) as caught:
        list(documents(table, DataConfig()))
    assert str(caught.value).startswith(f"{table}, row ")


def test_bad_files(tmp_path):
    file = tmp_path / "a.parquet"
    for data in (b"", b"not parquet at all", b"PAR1" + bytes(99)):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
            list(documents(str(file), DataConfig()))
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), file)
    with pytest.raises(ValueError, match="several columns with the name 'text'"):
        list(records(file, DataConfig()))
    zst = tmp_path / "a.jsonl.zst"
    write_zst(zst, b'{"text": "a"}\n' * 1000)
    for data in (b"not packed", zst.read_bytes()[:-9]):
        zst.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst"):
            list(documents(str(zst), DataConfig()))


def test_several_frames_are_one_file(tmp_path):
    for name, data in (("a.zst", b"one\n"), ("b.zst", b"two\n")):
        write_zst(tmp_path / name, data)
    (tmp_path / "c.txt.zst").write_bytes((tmp_path / "a.zst").read_bytes() + (tmp_path / "b.zst").read_bytes())
    assert list(documents(str(tmp_path / "c.txt.zst"), DataConfig(document="line"))) == ["one", "two"]


def test_without_pyarrow_there_is_one_sentence(tmp_path, monkeypatch):
    table, zst = write_parquet(tmp_path / "a.parquet", [{"text": "a"}]), write_zst(tmp_path / "a.txt.zst", b"a")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for file in (table, zst):
        with pytest.raises(ValueError, match=r"needs the package pyarrow: pip install 'phasor-transformer\[parquet\]'"):
            list(documents(file, DataConfig()))


def test_rows_that_are_skipped_are_counted(tmp_path):
    rows = [CHATS[0], {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]}]
    table, skipped = write_parquet(tmp_path / "a.parquet", rows), Counter()
    assert len(list(conversations(table, DataConfig(if_empty="skip"), skipped))) == 1
    assert skipped.total() == 1
