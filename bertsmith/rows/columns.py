"""Rows of files and tables, and the columns of their texts and labels. Imports without torch."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any

from bertsmith.errors import BadRow, UserError
from bertsmith.rows.records import STDIN, Form, OnProgress, Record, Source, read_records

# The usual names of the columns, for roles whose column is named neither by the task nor by the user.
NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "document", "review", "content", "comment", "title"),
    "label": ("gold_label", "label", "labels", "class", "category", "target", "score", "sentiment", "rating"),
}
ANSWERS, IMPOSSIBLE = "answers", "is_impossible"  # as in SQuAD 2.0
ENDINGS = re.compile(r"(ending|choice|option|answer)[_ -]?([0-9]|[a-e])$", re.I)
VOTE = re.compile(r"(label|annotator|annotation|worker|vote)s?[_ -]?\d+|(annotator|annotation|worker|vote).*", re.I)


@dataclass(frozen=True)
class Columns:
    """The names of the columns; those that are not set are guessed from the columns that the file has.

    `text` and, for pairs, `pair` are the texts, `label` is the gold label. `endings` are the endings of a multiple
    choice: a column with lists, or several columns, separated by commas (a name with a comma is quoted). `start` is the
    character at which an answer begins, `key` the id of a row. `separator` is not a column: it separates several labels
    in one field of a text file. A column of JSON rows may be a field of an object: `labels.label`.
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
    """One row: its texts, its label as the file has it, and its place for error messages.

    `text` is a question where `pair` is the context of its answer. `parts` are the endings of a multiple choice, or the
    words of a sentence; `document` has all words of the sentence's document, in which the sentence begins at word
    `begin`. `kept` are other columns that go into the output.
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


def split_names(names: str) -> list[str]:
    """The names of a comma-separated list; a name with a comma is quoted."""
    return [name.strip() for name in next(csv.reader([names], skipinitialspace=True), []) if name.strip()]


def join_names(names: Sequence[str]) -> str:
    """A comma-separated list of names, the inverse of `split_names`."""
    return ",".join(f'"{name}"' if "," in name else name for name in names)


def read_rows(
    path: Source,
    columns: Columns,
    *,
    labelled: bool,
    names: Mapping[str, tuple[str, ...]] = NAMES,
    literal: bool = False,
    header: tuple[str, ...] = (),
    empty: bool = False,
    errors: list[str] | None = None,
    keep: Sequence[str] = (),
    on_progress: OnProgress = lambda share: None,
) -> Iterator[Row]:
    """The rows of a file, one at a time; a missing column or label is an error with the file and line.

    `names` are the usual names of columns that are not set. `literal` and `header`: see `separated`. Labelled rows may
    have empty texts only with `empty`. With `errors`, bad rows are skipped, and their errors are added there. Rows keep
    the columns in `keep`; `on_progress` gets the share of the file that has been read.
    """
    where = "standard input" if str(path) == STDIN else str(path)

    def find(record: Record) -> Columns:
        for name in keep:
            if not has_column(record, name):
                raise missing_columns(where, {"": name}, record)
        return find_columns(columns, names, record, where, labelled=labelled)

    def needed(all_names: Sequence[str]) -> list[str]:
        """The columns of a file that are needed."""
        chosen = find(dict.fromkeys(all_names))
        wanted = [chosen.text, chosen.pair, chosen.label, *split_names(chosen.endings), chosen.start, chosen.key, *keep]
        wanted += [IMPOSSIBLE] if chosen.label == ANSWERS else []
        return [name for name in all_names if name in wanted or any(each.startswith(f"{name}.") for each in wanted)]

    known = tuple(name for each in names.values() for name in each)
    form = Form(literal, header, known, columns.text or names.get("text", ("text",))[0], needed, on_progress)
    found: Columns | None = None
    for place, record in read_records(path, form):
        try:
            if isinstance(record, BadRow):
                raise record
            found = found or find(record)
            row = _row(record, found, place, labelled=labelled, empty=empty)
        except BadRow as error:
            if errors is None:
                raise
            errors.append(str(error))
            continue
        yield replace(row, kept={name: value_of(record, name) for name in keep}) if keep else row
    if found is None:
        raise UserError(f"{where} is empty: it holds no rows")


def first_records(path: Source, count: int) -> list[Record]:
    """The first records of a file, without those that cannot be read."""
    placed = list(islice(read_records(path, Form()), count))
    records = [record for _, record in placed if not isinstance(record, BadRow)]
    if not records:
        raise next(
            (bad for _, bad in placed if isinstance(bad, BadRow)), UserError(f"{path} is empty: it holds no rows")
        )
    return records


def find_columns(
    columns: Columns, names: Mapping[str, tuple[str, ...]], record: Record, where: str, *, labelled: bool
) -> Columns:
    """The columns as set or by their usual names; a role in `names` without a column is an error."""
    optional = {"start", "key", *(["pair"] if "endings" in names else []), *([] if labelled else ["label"])}
    found = named_columns(columns, names, record)
    missing = {r: found[r] or (r if r in usual else usual[0]) for r, usual in names.items() if r not in optional}
    missing |= {role: name for role, name in found.items() if name and (labelled or role not in optional)}
    missing = {
        role: name
        for role, name in missing.items()
        if not found[role]
        or not all(has_column(record, each) for each in (split_names(name) if role == "endings" else [name]))
    }
    if missing:
        options = [f"--{role}" for role in ("text", "pair") if role in missing and not labelled]
        hint = f"; name another one with {' and '.join(options)}" if options else ""
        raise UserError(f"{missing_columns(where, missing, record)}{hint}")
    for role, other in (("text", "label"), ("text", "pair"), ("pair", "label")):
        if found[role] and found[role] == found[other] and (labelled or other != "label"):
            raise UserError(f"{where}: column {found[role]!r} cannot be both {role} and {other}; name another one")
    return replace(columns, **found)


def has_column(record: Record, name: str) -> bool:
    """Whether a record has a column; `labels.label` is the field `label` of the object in the column `labels`."""
    if name in record:
        return True
    first, dot, rest = name.partition(".")
    inside = record.get(first)
    return (
        bool(dot) and first in record and (inside is None or (isinstance(inside, Mapping) and has_column(inside, rest)))
    )


def value_of(record: Record, name: str) -> Any:
    """The value of a column, which may be a field of an object; None where there is none."""
    first, dot, rest = name.partition(".")
    if name in record or not dot:
        return record.get(name)
    inside = record.get(first)
    return value_of(inside, rest) if isinstance(inside, Mapping) else None


def named_columns(columns: Columns, names: Mapping[str, tuple[str, ...]], record: Record) -> dict[str, str]:
    """The column of each role: the one that is set, else the first usual name in the file, else an empty string."""
    found = {}
    for role in (each.name for each in fields(Columns) if each.name != "separator"):
        name, candidates = getattr(columns, role), names.get(role, ())
        if role == "endings" and candidates and not name:
            name = join_names([name for name in record if ENDINGS.match(name)])
        found[role] = name or next((candidate for candidate in candidates if has_column(record, candidate)), "")
    return found


def missing_columns(where: str, missing: Mapping[str, str], record: Record) -> UserError:
    """An error that names all missing columns and the columns that the file has."""
    near = {name: near_column(name, record) for name in missing.values()}
    parts = [f"no column {name!r}" + (f"; did you mean {other!r}?" if other else "") for name, other in near.items()]
    return UserError(f"{where}: {', '.join(parts)}; the columns are: {', '.join(map(str, record))}")


def near_column(name: str, record: Record) -> str:
    """The column that may be meant: one with this name as a whole word, else a similar one; annotators' votes never."""
    nested = [f"{column}.{each}" for column, value in record.items() if isinstance(value, Mapping) for each in value]
    columns = [column for column in (*record, *nested) if not VOTE.fullmatch(column)]
    whole = [column for column in columns if name.lower() in words_of_name(column)]
    return next(iter(whole or get_close_matches(name, columns, n=1)), "")


def words_of_name(name: str) -> list[str]:
    """The words of a column's name: `gold_label`, `goldLabel` and `Gold label` have two."""
    return [word.lower() for word in re.findall(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![a-z])|\d+", name)]


def _row(record: Record, columns: Columns, place: str, *, labelled: bool, empty: bool) -> Row:
    for role in ("text", "pair", "label"):
        name = getattr(columns, role)
        if name and value_of(record, name) is None and (labelled or role != "label"):
            raise BadRow(f"{place}: nothing in column {name!r}")
    label = value_of(record, columns.label)
    if columns.label == ANSWERS and record.get(IMPOSSIBLE) is True:
        label = []  # the hub's KLUE-MRC has plausible answers there, which are wrong
    if columns.separator and isinstance(label, str):
        label = [name.strip() for name in label.split(columns.separator) if name.strip()]
    if labelled and (label == "" or (isinstance(label, float) and math.isnan(label))):
        raise BadRow(f"{place}: no label in column {columns.label!r}")
    text, pair = value_of(record, columns.text), value_of(record, columns.pair) if columns.pair else None
    parts = _endings(record, columns.endings, place) if columns.endings else ()
    if isinstance(text, (list, tuple)):
        parts = tuple(_plain(word, columns.text, place) for word in text)
        text = " ".join(parts)
    text = _plain(text, columns.text, place)
    pair = None if pair is None else _plain(pair, columns.pair, place)
    blank = [
        name for name, value in ((columns.text, text), (columns.pair, pair)) if value is not None and not value.strip()
    ]
    if labelled and not empty and blank and not (columns.endings and text.strip()):
        raise BadRow(f"{place}: the text in column {blank[0]!r} is empty")
    if columns.start and isinstance(label, str):
        label = {"text": [label], "answer_start": [value_of(record, columns.start)]}
    key = str(value_of(record, columns.key)) if columns.key and value_of(record, columns.key) is not None else ""
    return Row(text, pair, label, place, key, parts)


def _plain(value: Any, name: str, place: str) -> str:
    """A value as text; a value that is not text (an object, a list, bytes, NaN) is refused."""
    if value is None or isinstance(value, (dict, list, tuple, bytes)) or value != value:
        raise BadRow(f"{place}: {str(value)[:60]} in column {name!r} is not a text")
    return str(value)


def _endings(record: Record, names: str, place: str) -> tuple[str, ...]:
    values = [value_of(record, name) for name in split_names(names)]
    if len(values) == 1:
        values = list(values[0]) if isinstance(values[0], (list, tuple)) else [None]
    if len(values) < 2 or any(value is None or not str(value).strip() for value in values):
        raise BadRow(f"{place}: an ending is empty or missing in {names!r}")
    return tuple(_plain(value, names, place) for value in values)
