"""Records of a few named texts, from JSON lines or the columns of TSV files, with the place of every mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phasor.config.recipe import DataConfig
from phasor.config.schema import name_some, quote
from phasor.data.sources import RECORDS, format_of, is_whole, lines, records, source_files


class Columns(NamedTuple):
    """One line's values by their names, and its file and line."""

    values: dict[str, object]
    where: str

    def value(self, name: str) -> object:
        """A value that has to be there."""
        if name in self.values and self.values[name] is None:
            raise ValueError(f"{self.where}: {name!r} is null")
        if name not in self.values:
            raise ValueError(f"{self.where}: there is no {name!r}, only: {name_some(self.values) or 'nothing'}")
        return self.values[name]

    def text(self, name: str) -> str:
        """A text that has to be there, and not be empty."""
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.where}: {name!r} is {quote(value)}, and not a text")
        return value

    def label(self, name: str) -> str:
        """The name of a label, given as text or as an integer."""
        return label_name(self.value(name), name, self.where)

    def list_of(self, name: str) -> list[object]:
        """A list that has to be there, and not be empty."""
        value = self.value(name)
        if not isinstance(value, list) or not value:
            raise ValueError(f"{self.where}: {name!r} is {quote(value)}, and not a list with something in it")
        return value


def label_name(value: object, name: str, where: str) -> str:
    """
    >>> label_name(3, "label", "a.jsonl, line 1"), label_name("spam", "label", "a.jsonl, line 2")
    ('3', 'spam')
    """
    if type(value) is bool or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{where}: {name!r} is {quote(value)}, and a label is a text or an integer")
    return str(value)


def read_columns(
    path: str | None, config: DataConfig, names: tuple[tuple[str, ...], ...], what: str
) -> Iterator[Columns]:
    """The records of a source; empty lines are left out.

    A line of a TSV file has as many columns as one of `names`; without any, such files are refused. `what` the records
    are is said in messages.
    """
    for file in source_files(path, config):
        kind = format_of(file, config)
        if kind in RECORDS:
            for record, where in records(file, config):
                yield Columns(json_values(record, where), where)
        elif kind == "tsv" and names:
            for line in lines(file, config):
                if line.text.strip():
                    where = f"{file}, line {line.number}"
                    yield Columns(tsv_values(line.text, names, where), where)
        else:
            takes = "JSON lines (.jsonl), parquet or TSV files" if names else "JSON lines (.jsonl) or parquet files"
            raise ValueError(f"{file} is read as {kind}, and {what} are read from {takes}")


def json_values(record: object, where: str) -> dict[str, object]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: this is {quote(record)}, and not a JSON object")
    if not is_whole(record):
        raise ValueError(f"{where}: a text has half a character (a surrogate that stands alone)")
    return record


def tsv_values(text: str, names: tuple[tuple[str, ...], ...], where: str) -> dict[str, object]:
    columns = text.split("\t")
    for each in names:
        if len(each) == len(columns):
            return dict(zip(each, columns, strict=True))
    known = " or ".join(f"{len(each)} columns ({', '.join(each)})" for each in names)
    raise ValueError(f"{where}: there are {known}, and this line has {len(columns)}")
