"""Rows of labelled files: CSV, TSV, JSON lines and parquet. Imports without torch."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion

csv.field_size_limit(sys.maxsize)


@dataclass(frozen=True)
class Columns:
    """The names of the columns: a text, for pairs a second one, and what is to be learnt."""

    text: str = "text"
    pair: str = ""
    label: str = "label"


@dataclass(frozen=True)
class Row:
    """One row: its texts, its label as written, and its place for error messages."""

    text: str
    pair: str | None
    label: Any
    place: str


def read_rows(path: str | Path, columns: Columns, *, labelled: bool) -> Iterator[Row]:
    """The rows of a file, one at a time; a missing column or label is an error that names file and line."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"no such file: {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file: .csv, .tsv, .jsonl or .parquet")
    wanted = [columns.text, *([columns.pair] if columns.pair else []), *([columns.label] if labelled else [])]
    count = 0
    for place, record in _records(path):
        for name in wanted:
            if record.get(name) is None:
                _refuse(place, name, record)
        if labelled and record[columns.label] == "":
            raise UserError(f"{place}: no label in column {columns.label!r}")
        count += 1
        pair = str(record[columns.pair]) if columns.pair else None
        yield Row(str(record[columns.text]), pair, record.get(columns.label), place)
    if not count:
        raise UserError(f"{path} is empty: it holds no rows")


def _refuse(place: str, name: str, record: dict[str, Any]) -> None:
    if name in record:
        raise UserError(f"{place}: nothing in column {name!r}")
    raise UserError(
        f"{place}: no column {name!r}{suggestion(name, record)}; the columns are: {', '.join(map(str, record))}"
    )


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return _separated(path, "\t" if kind == ".tsv" else ",")
    if kind in (".jsonl", ".ndjson", ".json"):
        return _json_lines(path)
    if kind == ".parquet":
        return _parquet(path)
    raise UserError(f"{path}: unknown kind of file {kind!r}; .csv, .tsv, .jsonl or .parquet")


def _separated(path: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        try:
            for record in reader:
                if None in record:
                    raise UserError(
                        f"{path}, line {reader.line_num}: more fields than the header names; quote the text"
                    )
                yield f"{path}, line {reader.line_num}", record
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not valid JSON: {error.msg}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: expected an object, found {type(record).__name__}")
            yield f"{path}, line {number}", record


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
    number = 0
    for chunk in table.iter_batches(batch_size=1024):
        for record in chunk.to_pylist():
            number += 1
            yield f"{path}, row {number}", record
