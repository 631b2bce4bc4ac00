"""Texts from files: documents and pairs, with the place of every mistake.

A source is a file or a folder, packed or not, or nothing for the formats that generate their own data.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from phasor.checkpoints.runs import is_run
from phasor.config.recipe import DataConfig
from phasor.config.schema import name_some, quote
from phasor.config.text_files import check_regular
from phasor.data import recall
from phasor.data.arrow import open_zst, parquet_rows
from phasor.data.dates import Split, dates
from phasor.manifest import MANIFEST

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv", ".parquet": "parquet"}
PACKED = (".gz", ".zst")
RECORDS = ("jsonl", "parquet")  # formats whose rows have fields
TEXT_BYTES = 1 << 30  # of one line or document, unpacked: a small packed file may hold one without end
READ = "read from UTF-8 text, .jsonl and .tsv files, each of them also packed as .gz or .zst, and .parquet files"
HEAD = 8192  # bytes that tell text from other files
MAGIC = (b"PAR1", b"ARROW1", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"\x1f\x8b", b"%PDF")
MARK = b"\xef\xbb\xbf"  # what some editors put before UTF-8


class Line(NamedTuple):
    """A line of a file, without its end, and where it stands."""

    text: str
    number: int


def source_files(path: str | None, config: DataConfig) -> list[Path]:
    """The files a source is made of, in order; none where its format generates its own data."""
    if config.format in ("python", "docstrings"):
        return standard_library()
    if config.format in ("dates", "recall"):
        return []
    if path is None:
        raise ValueError("data.train says what to train on: give a file or a folder, or the format 'python'")
    start = Path(path)
    if not start.exists():
        raise ValueError(f"{start} does not exist")
    if not start.is_dir():
        check_regular(start.stat(), f"{start} (data are read more than once)")
        if config.errors == "strict" and format_of(start, config) != "parquet" and is_binary(start):
            raise ValueError(f"{start} is not a text file: data are {READ}")
        return [start]
    files = data_files(start, Counter())
    if not files:
        raise ValueError(f"the folder {start} holds no data: they are {READ}")
    return files


def data_files(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The files of data below a folder, in order; what else is there is counted in `left_out`, by its kind."""
    files = []

    def refuse(error: OSError) -> None:
        raise read_error(Path(str(error.filename)), error)

    for place, inner, names in os.walk(folder, onerror=refuse):
        if is_phasor_folder(Path(place)):
            left_out["folder that phasor wrote"] += 1
            inner.clear()
            continue
        left_out["hidden file or folder"] += sum(name.startswith(".") for name in (*inner, *names))
        inner[:] = [name for name in inner if not name.startswith(".")]
        left_out["link or device"] += sum(Path(place, name).is_symlink() for name in inner)
        for file in (Path(place, name) for name in names if not name.startswith(".")):
            if not file.is_file():
                left_out["link or device"] += 1
            elif file.suffix != ".parquet" and is_binary(file):
                left_out["binary file"] += 1
            else:
                files.append(file)
    return sorted(files)


def describe_left_out(path: str | None, config: DataConfig) -> str | None:
    """What of a folder is not read, in a sentence; None where all of it is, or where it is not a folder."""
    if path is None or config.generates_data or not Path(path).is_dir():
        return None
    left_out: Counter[str] = Counter()
    data_files(Path(path), left_out)
    named = [count_of(what, count) for what, count in left_out.items() if count]
    return f"of the folder {path}, this is left out: {', '.join(named)}" if named else None


def count_of(what: str, count: int) -> str:
    """
    >>> count_of("hidden file or folder", 2), count_of("folder that phasor wrote", 3), count_of("binary file", 1)
    ('2 hidden files or folders', '3 folders that phasor wrote', '1 binary file')
    """
    several = re.sub(r"(file|folder|link|device)", r"\1s", what)
    return f"{count} {what if count == 1 else several}"


def is_phasor_folder(folder: Path) -> bool:
    """Whether a folder is a run, a model, prepared data or a checkpoint that phasor wrote."""
    return (folder / MANIFEST).is_file() or is_run(folder)


def is_binary(file: Path) -> bool:
    """Whether a file is not text, by its first bytes, unpacked if it is packed; False where it cannot be read."""
    try:
        with open_file(file) as stream:
            head = stream.read(HEAD)
    except (OSError, EOFError, zlib.error):
        return False
    return b"\0" in head or head.startswith(MAGIC)


def standard_library() -> list[Path]:
    """The Python files of the standard library, without its tests."""
    files: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def format_of(file: Path, config: DataConfig) -> str:
    """The format of one file: as stated, or by its name."""
    if config.format != "auto":
        return "text" if config.format == "python" else config.format
    return SUFFIXES.get(file.with_suffix("").suffix if file.suffix in PACKED else file.suffix, "text")


def documents(path: str | None, config: DataConfig) -> Iterator[str]:
    """The documents of a source, empty ones left out.

    >>> sum("def getcwd" in text or "import" in text for text in documents(None, DataConfig(format="python"))) > 100
    True
    """
    if config.format == "recall":
        yield from recall.texts(config.sequence_length - 1)  # with the token that begins a text, a row each
        return
    for file in source_files(path, config):
        kind = format_of(file, config)
        if kind in RECORDS:
            texts: Iterator[str] = (record_text(*record, config.field) for record in records(file, config))
        elif kind == "text":
            texts = text_documents(file, config)
        else:
            raise ValueError(f"{file} holds pairs ({kind}), which are for translation")
        yield from (text for text in texts if text.strip())


def text_documents(file: Path, config: DataConfig) -> Iterator[str]:
    """A plain text as one document, or one per line, or one per paragraph."""
    if config.document == "file":
        yield decode(read_bytes(file, ": set data.document to 'line' or 'paragraph'"), file, config)
    elif config.document == "line":
        yield from (line.text for line in lines(file, config))
    else:
        kept: list[str] = []
        size = 0
        for line in lines(file, config):
            if line.text.strip():
                kept.append(line.text)
                size += len(line.text) + 1
                if size > TEXT_BYTES:
                    raise ValueError(
                        f"{file}, line {line.number}: this paragraph is longer than {TEXT_BYTES >> 20} MiB"
                    )
            elif kept:
                yield "\n".join(kept)
                kept, size = [], 0
        yield "\n".join(kept)


def record_text(record: object, where: str, field: str) -> str:
    """The text of a record."""
    if isinstance(record, dict) and field in record and not isinstance(record[field], str):
        raise ValueError(f"{where}: {field!r} (data.field) is {quote(record[field])}, and not text")
    if not isinstance(record, dict) or field not in record:
        has = name_some(record) if isinstance(record, dict) else quote(record)
        raise ValueError(f"{where}: there is no text under {field!r} (data.field), only: {has}")
    text = str(record[field])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} of {field!r} is half a character") from None
    return text


def records(file: Path, config: DataConfig) -> Iterator[tuple[object, str]]:
    """The rows of a file of JSON lines or parquet, each with its place; empty lines are left out."""
    if format_of(file, config) == "parquet":
        yield from parquet_rows(file)
        return
    for line in lines(file, config):
        if line.text.strip():
            yield json_record(line, file), f"{file}, line {line.number}"


def json_record(line: Line, file: Path) -> object:
    """The value on one line of JSON."""
    repeated: list[str] = []

    def fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return made

    try:
        value = json.loads(line.text, object_pairs_hook=fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {line.number}: this is not JSON: {error}") from None
    if repeated:
        raise ValueError(f"{file}, line {line.number}: an object has several fields with the name {quote(repeated[0])}")
    return value


def json_records(path: str | None, config: DataConfig) -> Iterator[tuple[object, str]]:
    """The rows of a source of JSON lines or parquet, each with its place, whose texts can be written as UTF-8."""
    for file in source_files(path, config):
        kind = format_of(file, config)
        if kind not in RECORDS:
            raise ValueError(
                f"{file} is read as {kind}, and conversations are read from JSON lines (.jsonl) or parquet (.parquet)"
            )
        for record, where in records(file, config):
            if not is_whole(record):
                raise ValueError(f"{where}: a text has half a character (a surrogate that stands alone)")
            yield record, where


def is_whole(value: object) -> bool:
    """Whether all texts within a value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def pairs(
    path: str | None, config: DataConfig, target: str | None = None, split: Split = "train"
) -> Iterator[tuple[str, str]]:
    """The pairs of a source: TSV files, two files line by line, or generated dates.

    >>> next(pairs(None, DataConfig(format="dates")))[1][-1] in "日年月〇一二三四五六七八九十百千万零"
    True
    """
    if config.format == "dates":
        yield from dates(split)
        return
    if target is not None:
        yield from side_by_side(single(path, config), single(target, config), config)
        return
    for file in source_files(path, config):
        kind = format_of(file, config)
        if kind != "tsv":
            raise ValueError(
                f"{file} is read as {kind}, and translation needs pairs: a TSV file, or a file for each side "
                "(data.train_target)"
            )
        for line in lines(file, config):
            columns = line.text.split("\t")
            if len(columns) != 2:
                raise ValueError(f"{file}, line {line.number}: a pair has 2 columns, and this line has {len(columns)}")
            yield from whole_pair(columns[0], columns[1], f"{file}, line {line.number}", config)


def single(path: str | None, config: DataConfig) -> Path:
    files = source_files(path, config)
    if len(files) != 1 or Path(str(path)).is_dir():
        raise ValueError(f"{path} is a folder, and the sides of a parallel text are two files")
    return files[0]


def side_by_side(file: Path, other: Path, config: DataConfig) -> Iterator[tuple[str, str]]:
    """Line by line of two files, which must have as many."""
    for number, (left, right) in enumerate(zip_longest(lines(file, config), lines(other, config)), 1):
        if left is None or right is None:
            short, long = (file, other) if left is None else (other, file)
            raise ValueError(f"{short} ends after {number - 1} lines, and {long} goes on: they must have as many")
        yield from whole_pair(left.text, right.text, f"{file} and {other}, line {number}", config)


def whole_pair(source: str, target: str, where: str, config: DataConfig) -> Iterator[tuple[str, str]]:
    """The pair, unless a side is empty: then nothing where such pairs are skipped."""
    if source.strip() and target.strip():
        yield source, target
    elif config.if_empty == "refuse":
        side = "target" if source.strip() else "source"
        raise ValueError(f"{where}: the {side} is empty (data.if_empty 'skip' leaves such pairs out)")


def lines(file: Path, config: DataConfig) -> Iterator[Line]:
    """The lines of a file, decoded one by one."""
    place = 0
    for number, line in enumerate(raw_lines(file), 1):
        yield Line(decode(line, file, config, place, number).rstrip("\r\n"), number)
        place += len(line)


def raw_lines(file: Path) -> Iterator[bytes]:
    try:
        with open_file(file) as stream:
            for number in itertools.count(1):
                line = stream.readline(TEXT_BYTES + 1)
                if len(line) > TEXT_BYTES:
                    raise ValueError(f"{file}, line {number} is longer than {TEXT_BYTES >> 20} MiB")
                if not line:
                    return
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise read_error(file, error) from None


def read_bytes(file: Path, advice: str = "") -> bytes:
    """All of a file, unpacked; an error with some advice where it is too long."""
    try:
        with open_file(file) as stream:
            data = stream.read(TEXT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise read_error(file, error) from None
    if len(data) > TEXT_BYTES:
        raise ValueError(f"{file} holds a text of more than {TEXT_BYTES >> 20} MiB{advice}")
    return data


def open_file(file: Path) -> BinaryIO:
    if file.suffix == ".zst":
        return open_zst(file)
    return cast(BinaryIO, gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb"))


def read_error(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")


def decode(data: bytes, file: Path, config: DataConfig, place: int = 0, line: int | None = None) -> str:
    """Bytes as text; a byte that is not UTF-8 is named by its place in the file (unpacked, where it is packed)."""
    marked = place == 0 and data.startswith(MARK)
    try:
        return (data[len(MARK) :] if marked else data).decode("utf-8", errors=config.errors)
    except UnicodeDecodeError as error:
        at = error.start + len(MARK) * marked
        number = data[:at].count(b"\n") + 1 if line is None else line
        raise ValueError(
            f"{file}, line {number}: the byte {place + at} (0x{data[at]:02x}) is not UTF-8; "
            "set data.errors to 'replace' to read on"
        ) from None
