"""Rows of files: which column is what. Imports without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.tasks.records import STDIN, Form, Record, Told, read_records

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
    of a sentence; `document` has the words around them too, from `begin` on this row's. `kept` are columns to carry
    along.
    """

    text: str
    pair: str | None
    label: Any
    place: str
    key: str = ""
    parts: tuple[str, ...] = ()
    document: tuple[str, ...] = ()
    begin: int = 0
    kept: dict[str, Any] = field(default_factory=dict)


def read_rows(
    path: str | Path,
    columns: Columns,
    *,
    labelled: bool,
    names: Mapping[str, tuple[str, ...]] = NAMES,
    literal: bool = False,
    header: tuple[str, ...] = (),
    left_out: list[str] | None = None,
    keep: Sequence[str] = (),
    told: Told = lambda share: None,
) -> Iterator[Row]:
    """The rows of a file, one at a time; a missing column or label is an error that names file and line.

    `names` says where the columns are looked for that are not given. `literal` and `header`: see `separated`. With
    `left_out` rows that cannot be used are left out, and their places put there. `keep` names columns to carry along;
    `told` hears which share of the file has been read.
    """

    def used(there: Sequence[str], place: str) -> list[str]:
        """Of a file's columns those that are needed."""
        record = dict.fromkeys(there)
        chosen = find_columns(columns, names, record, place, labelled=labelled)
        _check_kept(record, keep, place)
        wanted = [chosen.text, chosen.pair, chosen.label, *chosen.endings.split(","), chosen.start, chosen.key, *keep]
        return [name for name in there if name in wanted]

    known = tuple(name for each in names.values() for name in each)
    form = Form(literal, header, known, columns.text or names.get("text", ("text",))[0], used, told)
    found: Columns | None = None
    for place, record in read_records(path, form):
        try:
            if not isinstance(record, Mapping):
                raise UserError(f"{place}: more fields than the header names; quote the text")
            if found is None:
                found = find_columns(columns, names, record, place, labelled=labelled)
                _check_kept(record, keep, place)
            row = _row(record, found, place, labelled=labelled, own=left_out is None)
        except UserError:
            if left_out is None or found is None:
                raise
            left_out.append(place)
            continue
        yield replace(row, kept={name: record.get(name) for name in keep}) if keep else row
    if found is None:
        raise UserError(f"{'standard input' if str(path) == STDIN else path} is empty: it holds no rows")


def _check_kept(record: Record, keep: Sequence[str], place: str) -> None:
    for name in keep:
        if name not in record:
            _refuse(place, name, record)


def first_record(path: Path) -> tuple[str, Record]:
    """The first record of a file that has a header, with its place."""
    for place, record in read_records(path, Form()):
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
    for role in (each.name for each in fields(Columns) if each.name != "separator"):
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
    for role, other in (("text", "label"), ("text", "pair"), ("pair", "label")):
        if chosen[role] and chosen[role] == chosen[other] and (labelled or other != "label"):
            raise UserError(f"{place}: column {chosen[role]!r} cannot be both {role} and {other}; name another one")
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
        parts = tuple(_plain(word, columns.text, place) for word in text)
        text = " ".join(parts)
    text = _plain(text, columns.text, place)
    pair = None if pair is None else _plain(pair, columns.pair, place)
    empty = [
        name for name, value in ((columns.text, text), (columns.pair, pair)) if value is not None and not value.strip()
    ]
    if labelled and own and empty and not (columns.endings and text.strip()):
        raise UserError(f"{place}: the text in column {empty[0]!r} is empty; remove the row")
    if columns.start and isinstance(label, str):
        label = {"text": [label], "answer_start": [record.get(columns.start)]}
    key = str(record[columns.key]) if columns.key and record.get(columns.key) is not None else ""
    return Row(text, pair, label, place, key, parts)


def _plain(value: Any, name: str, place: str) -> str:
    """A value as text; what only looks like one when it is printed (an object, bytes, not a number) is refused."""
    if value is None or isinstance(value, (dict, list, tuple, bytes)) or value != value:
        raise UserError(f"{place}: {str(value)[:60]} in column {name!r} is not a text")
    return str(value)


def _endings(record: Record, names: str, place: str) -> tuple[str, ...]:
    values = [record.get(name) for name in names.split(",")]
    if len(values) == 1:
        values = list(values[0]) if isinstance(values[0], (list, tuple)) else [None]
    if len(values) < 2 or any(value is None or not str(value).strip() for value in values):
        raise UserError(f"{place}: an ending is empty or missing in {names!r}")
    return tuple(_plain(value, names, place) for value in values)


def _refuse(place: str, name: str, record: Record) -> None:
    there = ", ".join(map(str, record))
    hint = ""
    if len(record) == 1 and (sign := next((s for s in "\t;|," if s in there), "")):
        hint = f"; fields are separated by {sign!r} here: commas are for .csv, tabs for .tsv"
    raise UserError(f"{place}: no column {name!r}{suggestion(name, record)}; the columns are: {there}{hint}")
