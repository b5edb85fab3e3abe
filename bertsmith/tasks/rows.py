"""Rows of files: CSV, TSV, JSON lines, parquet, plain text and standard input. Imports without torch.

Nothing here holds a whole file: rows come one at a time, of parquet a thousand.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from bertsmith.errors import UserError, suggestion

csv.field_size_limit(sys.maxsize)

STDIN = "-"
KINDS = ".csv, .tsv, .jsonl, .parquet or .txt"
Record = tuple[str, dict[str, Any]]
Told = Callable[[float], None]


@dataclass(frozen=True)
class Columns:
    """The names of the columns: a text, for pairs a second one, and what is to be learnt."""

    text: str = "text"
    pair: str = ""
    label: str = "label"


@dataclass(frozen=True)
class Row:
    """One row: its texts, its label as written, its place for error messages, and the columns that are kept."""

    text: str
    pair: str | None
    label: Any
    place: str
    kept: dict[str, Any] = field(default_factory=dict)


def read_rows(
    path: str | Path,
    columns: Columns,
    *,
    labelled: bool,
    keep: Sequence[str] = (),
    told: Told = lambda share: None,
) -> Iterator[Row]:
    """The rows of a file, one at a time; a missing column or label is an error that names file and line.

    `keep` names columns to carry along; `told` hears which share of the file has been read (of standard input, 0).
    """
    needed = [columns.text, *([columns.pair] if columns.pair else []), *([columns.label] if labelled else [])]
    count = 0
    for place, record in _records(path, columns, [*needed, *keep], told):
        for name in needed:
            if record.get(name) is None:
                _refuse(place, name, record)
        for name in keep:
            if name not in record:
                _refuse(place, name, record)
        if labelled and record[columns.label] == "":
            raise UserError(f"{place}: no label in column {columns.label!r}")
        count += 1
        pair = str(record[columns.pair]) if columns.pair else None
        kept = {name: record[name] for name in keep}
        yield Row(str(record[columns.text]), pair, record.get(columns.label), place, kept)
    if not count:
        raise UserError(f"{_name(path)} is empty: it holds no rows")


def _refuse(place: str, name: str, record: dict[str, Any]) -> None:
    if name in record:
        raise UserError(f"{place}: nothing in column {name!r}")
    raise UserError(
        f"{place}: no column {name!r}{suggestion(name, record)}; the columns are: {', '.join(map(str, record))}"
    )


def _name(path: str | Path) -> str:
    return "standard input" if str(path) == STDIN else str(path)


def _records(path: str | Path, columns: Columns, names: Sequence[str], told: Told) -> Iterator[Record]:
    if str(path) == STDIN:
        return _lines_or_json(_decoded(sys.stdin.buffer), columns.text)
    path = Path(path)
    if not path.exists():
        raise UserError(f"no such file: {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file: {KINDS}")
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _parquet(path, names, told)
    if kind in (".csv", ".tsv"):
        return _opened(path, told, lambda lines: _separated(lines, path, "\t" if kind == ".tsv" else ","))
    if kind in (".jsonl", ".ndjson", ".json"):
        return _opened(path, told, lambda lines: _json_lines(enumerate(lines, 1), str(path)))
    if kind == ".txt":
        return _opened(path, told, lambda lines: _texts(enumerate(lines, 1), str(path), columns.text))
    raise UserError(f"{path}: unknown kind of file {kind!r}; {KINDS}")


def _opened(path: Path, told: Told, records: Callable[[io.TextIOWrapper], Iterator[Record]]) -> Iterator[Record]:
    """The records of a file of lines, with word of how far it has been read."""
    size = max(1, path.stat().st_size)
    with path.open("rb") as file:
        for record in records(_decoded(file)):
            told(min(1.0, file.tell() / size))
            yield record


def _decoded(file: BinaryIO) -> io.TextIOWrapper:
    """Lines as they stand, also those inside the quotes of a CSV file."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")


def _separated(lines: io.TextIOWrapper, path: Path, delimiter: str) -> Iterator[Record]:
    reader = csv.DictReader(lines, delimiter=delimiter)
    try:
        for record in reader:
            if None in record:
                raise UserError(f"{path}, line {reader.line_num}: more fields than the header names; quote the text")
            yield f"{path}, line {reader.line_num}", record
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _json_lines(lines: Iterator[tuple[int, str]], name: str) -> Iterator[Record]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{name}, line {number}: not valid JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise UserError(f"{name}, line {number}: expected an object, found {type(record).__name__}")
        yield f"{name}, line {number}", record


def _texts(lines: Iterator[tuple[int, str]], name: str, column: str) -> Iterator[Record]:
    """A text a line; an empty line is an empty text, so that answers stand beside their lines."""
    for number, line in lines:
        yield f"{name}, line {number}", {column: line.rstrip("\r\n")}


def _lines_or_json(file: io.TextIOWrapper, column: str) -> Iterator[Record]:
    """Standard input: JSON lines where the first line is an object, else a text a line."""
    lines = enumerate(file, 1)
    for first in lines:
        both = chain([first], lines)
        if _is_object(first[1]):
            return _json_lines(both, _name(STDIN))
        return _texts(both, _name(STDIN), column)
    return iter(())


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _parquet(path: Path, names: Sequence[str], told: Told) -> Iterator[Record]:
    """The named columns alone, so that what nobody asked for takes no memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
    there, rows, number = table.schema_arrow.names, max(1, table.metadata.num_rows), 0
    whole = not set(names) <= set(there)  # an error will name the columns
    for chunk in table.iter_batches(batch_size=1024, columns=None if whole else list(dict.fromkeys(names))):
        for record in chunk.to_pylist():
            number += 1
            told(number / rows)
            yield f"{path}, row {number}", record
