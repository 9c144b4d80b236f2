"""Read the rows of JSON and Parquet files, and of data sets on the Hub.

A row is a dict of columns; `columns.py` checks their values, `data.py` calls both. Rows are yielded one by one as they
are read (a JSON array is read whole). So an error in a row is raised only when the caller reaches that row.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from megatron_rlspec import files
from megatron_rlspec.config.base import shown
from megatron_rlspec.tasks.order import DataError
from megatron_rlspec.texts import first_line

Rows = Iterator[tuple[str, dict[str, Any]]]  # (place, row); error messages begin with the place
MOST_BYTES = 1 << 32  # of a file with a JSON array, which is read whole; a larger one is refused


def read_rows(source: str | Path) -> Rows:
    """Yield (place, row) of every row. The place is "file:line", or "source: row n" where there are no lines.

    source  files, separated by commas, or patterns of their names; or NAME?OPTION=VALUE of a data set on the Hub, with
            the options of `datasets.load_dataset`, which also reads other files: csv?data_files=FILE. The name of
            an existing file is not split at commas

    Raises DataError, and FileError for what is no JSON. This is a generator: it raises nothing before its first row is
    asked for. A file without rows is no error here.
    """
    for file in _files(str(source)):
        # None: a data set on the Hub
        reader = None if "?" in file else READERS.get(Path(file).suffix)
        if Path(file).is_dir():
            raise DataError(f"{file}: a directory; expected files, such as {file}/train-*.parquet")
        if reader is None and Path(file).exists():
            raise DataError(
                f"{file}: expected a name that ends in {', '.join(READERS)}, or csv?data_files={file} for CSV"
            )
        try:
            yield from _hub_rows(file) if reader is None else reader(Path(file))
        except OSError as error:
            raise DataError(f"{file}: {error.strerror or first_line(error)}") from None


def _files(source: str) -> Iterator[str]:
    """Yield the names in `read_rows`'s `source`, with patterns expanded in alphabetical order."""
    if Path(source).exists():
        yield source
        return
    for part in source.split(","):
        # A question mark begins the options of a data set, so a part with one is no pattern of file names.
        named = sorted(glob(part)) if has_magic(part) and "?" not in part else [part]
        if not named:
            raise DataError(f"{part}: no file has such a name")
        yield from named


def _hub_rows(source: str) -> Rows:
    """Read a data set on the Hub; its split is "train" unless the options name another."""
    expected = f"expected a file whose name ends in {', '.join(READERS)}, or a data set on the Hub"
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"{source}: no such file; {expected}, which needs `pip install datasets`"
        ) from None
    name, _, options = source.partition("?")
    try:
        rows = load_dataset(name, **{"split": "train", **dict(parse_qsl(options))})
    except Exception as error:  # of the network, of the Hub, of a builder
        raise DataError(f"{source}: {first_line(error)}; {expected}") from None
    for number, row in enumerate(rows, 1):
        yield f"{source}: row {number}", row


def _jsonl_rows(path: Path) -> Rows:
    """Read one row on each line. Lines are counted from 1; a byte-order mark at the beginning is dropped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():  # an empty line is no row, but counts as a line
                yield where, json_row(where, line)


def json_row(where: str, line: bytes) -> dict[str, Any]:
    """Parse one row of JSONL. Raises DataError or FileError, which begin with `where`.

    `commands/journal.py` calls it, too, for the rows that `rlspec answer` has written.
    """
    try:
        row = files.parse_json(line.decode(), where)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON: not UTF-8 at byte {error.start} of the line"
        ) from None
    return _object(where, row)


def _object(where: str, row: Any) -> dict[str, Any]:
    """Return the row if it is a JSON object. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object (got {shown(row)})")
    return row


def _json_rows(path: Path) -> Rows:
    """Read one array of rows, or one row on each line: files of both kinds end in .json."""
    with path.open("rb") as file:
        # The first 1024 bytes tell which kind it is, unless they are all white space.
        begin = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()
    if not begin.startswith(b"["):
        yield from _jsonl_rows(path)
        return
    for number, row in enumerate(files.read_json(path, MOST_BYTES), 1):
        where = f"{path}: row {number}"
        yield where, _object(where, row)


def _parquet_rows(path: Path) -> Rows:
    """Read the rows of a Parquet file, batch by batch."""
    # Imported here, because only a Parquet file needs them.
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: truncated or not Parquet ({first_line(error)})") from None


# The reader of a file, by the end of its name. Error messages list these ends.
READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
