"""Rows of labelled files: CSV, TSV, JSON, JSON lines and parquet. Imports without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.tasks.separated import separated

Record = Mapping[str, Any]
# Where each role's column is looked for, unless a task or the user names it.
NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "document", "review", "content", "comment", "title"),
    "label": ("label", "labels", "class", "category", "target", "score", "sentiment", "rating"),
}
ENDINGS = re.compile(r"(ending|choice|option|answer)[_ -]?([0-9]|[a-e])$", re.I)


@dataclass(frozen=True)
class Columns:
    """The names of the columns; where one is not given, it is guessed from the names that the file has.

    A text, for pairs a second one, and what is to be learnt. `endings` are the endings of a choice: a column with a
    list, or several columns, separated by commas. `start` says where an answer begins, `key` names the rows.
    `separator` is no column: it divides the labels where a text file gives a row several.
    """

    text: str = ""
    pair: str = ""
    label: str = ""
    endings: str = ""
    start: str = ""
    key: str = ""
    separator: str = ""


@dataclass(frozen=True)
class Row:
    """One row: its texts, its label as written, and its place for error messages.

    `text` is a question where `pair` is the context of its answer. `parts` are the endings of a choice, or the words
    of a sentence; `document` has the words around them too, from `begin` on this row's.
    """

    text: str
    pair: str | None
    label: Any
    place: str
    key: str = ""
    parts: tuple[str, ...] = ()
    document: tuple[str, ...] = ()
    begin: int = 0


def read_rows(
    path: str | Path,
    columns: Columns,
    *,
    labelled: bool,
    names: Mapping[str, tuple[str, ...]] = NAMES,
    literal: bool = False,
    header: tuple[str, ...] = (),
    left_out: list[str] | None = None,
) -> Iterator[Row]:
    """The rows of a file, one at a time; a missing column or label is an error that names file and line.

    `names` says where the columns are looked for that are not given. `literal` and `header`: see `separated`. With
    `left_out` rows that cannot be used are left out, and their places put there.
    """
    path = Path(path)
    _refuse_no_file(path)
    found: Columns | None = None
    known = tuple(name for each in names.values() for name in each)
    for place, record in _records(path, literal=literal, header=header, known=known):
        try:
            if not isinstance(record, Mapping):
                raise UserError(f"{place}: more fields than the header names; quote the text")
            found = found or find_columns(columns, names, record, place, labelled=labelled)
            row = _row(record, found, place, labelled=labelled, own=left_out is None)
        except UserError:
            if left_out is None or found is None:
                raise
            left_out.append(place)
            continue
        yield row
    if found is None:
        raise UserError(f"{path} is empty: it holds no rows")


def _refuse_no_file(path: Path) -> None:
    if not path.exists():
        raise UserError(f"no such file: {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file: .csv, .tsv, .jsonl or .parquet")


def first_record(path: Path) -> tuple[str, Record]:
    """The first record of a file that has a header, with its place."""
    _refuse_no_file(path)
    for place, record in _records(path, literal=False, header=(), known=()):
        if isinstance(record, Mapping):
            return place, record
        raise UserError(f"{place}: more fields than the header names; quote the text")
    raise UserError(f"{path} is empty: it holds no rows")


def find_columns(
    columns: Columns, names: Mapping[str, tuple[str, ...]], record: Record, place: str, *, labelled: bool
) -> Columns:
    """The columns as given and, where not given, as guessed; a role in `names` that has none is an error."""
    optional = {"start", "key", *(["pair"] if "endings" in names else []), *([] if labelled else ["label"])}
    chosen = {}
    for role in (field.name for field in fields(Columns) if field.name != "separator"):
        given, candidates = getattr(columns, role), names.get(role, ())
        if role == "endings" and candidates and not given:
            given = ",".join(name for name in record if ENDINGS.match(name))
        given = given or next((name for name in candidates if name in record), "")
        if not given and candidates and role not in optional:
            _refuse(place, candidates[0], record)
        for name in given.split(",") if role == "endings" and given else [given]:
            if name and name not in record and (labelled or role not in optional):
                _refuse(place, name, record)
        chosen[role] = given
    return replace(columns, **chosen)


def _row(record: Record, columns: Columns, place: str, *, labelled: bool, own: bool) -> Row:
    for role in ("text", "pair", "label"):
        name = getattr(columns, role)
        if name and record.get(name) is None and (labelled or role != "label"):
            raise UserError(f"{place}: nothing in column {name!r}")
    label = record.get(columns.label)
    if columns.separator and isinstance(label, str):
        label = [name.strip() for name in label.split(columns.separator) if name.strip()]
    if labelled and (label == "" or (isinstance(label, float) and math.isnan(label))):
        raise UserError(f"{place}: no label in column {columns.label!r}")
    text, pair = record[columns.text], record[columns.pair] if columns.pair else None
    parts = _endings(record, columns.endings, place) if columns.endings else ()
    if isinstance(text, (list, tuple)):
        parts, text = tuple(map(str, text)), " ".join(map(str, text))
    if labelled and own and not str(text).strip():
        raise UserError(f"{place}: the text in column {columns.text!r} is empty; remove the row")
    if columns.start and isinstance(label, str):
        label = {"text": [label], "answer_start": [record.get(columns.start)]}
    key = str(record[columns.key]) if columns.key and record.get(columns.key) is not None else ""
    return Row(str(text), None if pair is None else str(pair), label, place, key, parts)


def _endings(record: Record, names: str, place: str) -> tuple[str, ...]:
    values = [record.get(name) for name in names.split(",")]
    if len(values) == 1:
        values = list(values[0]) if isinstance(values[0], (list, tuple)) else [None]
    if len(values) < 2 or any(value is None or not str(value).strip() for value in values):
        raise UserError(f"{place}: an ending is empty or missing in {names!r}")
    return tuple(map(str, values))


def _refuse(place: str, name: str, record: Record) -> None:
    raise UserError(
        f"{place}: no column {name!r}{suggestion(name, record)}; the columns are: {', '.join(map(str, record))}"
    )


def _records(
    path: Path, *, literal: bool, header: tuple[str, ...], known: tuple[str, ...]
) -> Iterator[tuple[str, Record | list[str]]]:
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv") or (kind == ".txt" and literal):
        delimiter = "," if kind == ".csv" else "\t"
        yield from separated(path, delimiter, literal=literal, header=header, known=known)
    elif kind in (".jsonl", ".ndjson"):
        yield from _json_lines(path)
    elif kind == ".json":
        yield from _json(path)
    elif kind == ".parquet":
        yield from _parquet(path)
    else:
        raise UserError(f"{path}: unknown kind of file {kind!r}; .csv, .tsv, .jsonl or .parquet")


def _json_lines(path: Path) -> Iterator[tuple[str, Record]]:
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


def _json(path: Path) -> Iterator[tuple[str, Record]]:
    """JSON lines, a list of objects, or SQuAD's own form."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline().strip()
    try:
        start = json.loads(first) if first else None
        lines = isinstance(start, dict) and "data" not in start
    except json.JSONDecodeError:
        lines = bool(first) and first[0] not in "[{"
    if lines:
        yield from _json_lines(path)
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig", errors="replace") or "[]")
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    values = values.get("data") if isinstance(values, dict) else values
    if not isinstance(values, list):
        raise UserError(f"{path}: expected a list of objects, or an object with such a list as 'data'")
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise UserError(f"{path}, item {number}: expected an object, found {type(value).__name__}")
        yield from _questions(path, value) if "paragraphs" in value else [(f"{path}, item {number}", value)]


def _questions(path: Path, article: Record) -> Iterator[tuple[str, Record]]:
    """The questions of an article in SQuAD's own form."""
    for paragraph in article["paragraphs"]:
        for question in paragraph.get("qas", []):
            place = f"{path}, question {question.get('id', question.get('question'))!r}"
            answers = [] if question.get("is_impossible") else question.get("answers")
            yield place, {**question, "context": paragraph.get("context"), "answers": answers}


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
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
