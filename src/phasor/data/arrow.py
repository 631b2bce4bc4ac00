"""What pyarrow reads: the rows of parquet files, and files that are packed as .zst."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from phasor.distribution import missing_package

ROWS = 256  # that are turned into Python objects at a time
BUFFER = 1 << 20


def parquet_rows(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a parquet file, each with its place; a column is a field, and an empty cell none.

    A row group is read at a time, so that a file is never whole in memory.
    """
    pa = import_arrow(f"{file} is a parquet file")
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file, memory_map=True) as table:
            repeated = {name for name in table.schema_arrow.names if table.schema_arrow.names.count(name) > 1}
            if repeated:
                raise ValueError(f"{file} has several columns with the name {min(repeated)!r}")
            for batch in table.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield without_empty(row), f"{file}, row {number}"
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read past row {number}: {' '.join(str(error).split())}") from None


def without_empty(value: Any) -> Any:
    """A value without the fields that are empty, which parquet has in every row that lacks them.

    >>> without_empty({"role": "user", "name": None, "parts": [{"text": "a", "url": None}]})
    {'role': 'user', 'parts': [{'text': 'a'}]}
    """
    if isinstance(value, dict):
        return {name: without_empty(inner) for name, inner in value.items() if inner is not None}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def open_zst(file: Path) -> BinaryIO:
    """A file that is packed by zstandard, unpacked as it is read."""
    pa = import_arrow(f"{file} is packed by zstandard")
    packed = pa.CompressedInputStream(pa.OSFile(str(file)), "zstd")
    return cast(BinaryIO, io.BufferedReader(packed, BUFFER))


def import_arrow(need: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing_package(f"{need}, which needs the package pyarrow", "parquet") from None
    return pyarrow
