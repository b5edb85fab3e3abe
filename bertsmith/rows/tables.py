"""Rows in memory: dicts, tuples, and tables of pandas, polars, pyarrow or `datasets`, which are not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.rows.records import Record, Source, Table

TUPLES = {2: ("text", "label"), 3: ("text", "pair", "label")}


def as_source(data: Any) -> Source:
    """Return a path unchanged, and rows in memory as a table."""
    if isinstance(data, (str, Path, Table)):
        return data
    records = [_record(row, number) for number, row in enumerate(_rows(data), 1)]
    if not records:
        raise UserError("the rows in memory are empty")
    return Table(records, _classes(data))


def _rows(data: Any) -> Iterable[Any]:
    """The rows of a table, by the methods that it has."""
    if hasattr(data, "to_pylist"):  # pyarrow
        return data.to_pylist()
    if hasattr(data, "to_dicts"):  # polars
        return data.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        return data.to_dict(orient="records")
    if isinstance(data, Mapping):  # columns
        if len({len(column) for column in data.values()}) > 1:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in data.items())
            raise UserError(f"the columns have different numbers of rows: {lengths}")
        return (dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True))
    if not isinstance(data, Iterable):
        raise UserError(f"{type(data).__name__} is neither a path nor rows: give dicts, tuples or a table")
    return data


def _record(row: Any, number: int) -> Record:
    if isinstance(row, Mapping):
        return {str(name): _plain(value) for name, value in row.items()}
    if isinstance(row, (tuple, list)) and len(row) in TUPLES:
        return dict(zip(TUPLES[len(row)], map(_plain, row), strict=True))
    raise UserError(
        f"row {number} is {str(row)[:60]!r}: write a dict, or a tuple of (text, label) or (text, pair, label)"
    )


def _plain(value: Any) -> Any:
    """A value as a plain Python type instead of one of numpy or pandas."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.tolist() if hasattr(value, "tolist") else value


def _classes(data: Any) -> dict[str, tuple[str, ...]]:
    """The label names of columns with numbers, from the features of `datasets`."""
    features = getattr(data, "features", None)
    columns = features.items() if isinstance(features, Mapping) else ()
    named = {name: getattr(getattr(feature, "feature", feature), "names", None) for name, feature in columns}
    return {name: tuple(names) for name, names in named.items() if names}
