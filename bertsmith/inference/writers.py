"""Writers of predictions and sentence vectors: JSON lines, CSV, parquet and `.npy`.

Both write the kept columns of the input beside the model's output. Predictions are first collected as JSON
lines and then converted; vectors are written window by window.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.folders import new_file, sync
from bertsmith.rows.columns import Row

PREDICTION_FILES = (".jsonl", ".csv", ".parquet")
VECTOR_FILES = (".npy", ".parquet", ".jsonl")
ROWS_AT_ONCE = 4096  # of a finished file
Vectors = NDArray[np.float32]


class WriteVectors(Protocol):
    """Writes the vectors of a window of rows, and the kept columns of these rows."""

    def __call__(self, rows: Sequence[Row], vectors: Vectors) -> None: ...


def json_line(kept: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return a line of JSON: the kept columns, then the model's output."""
    return json.dumps({**kept, **values}, ensure_ascii=False, default=_json_value) + "\n"


def _json_value(value: Any) -> str:
    """Return a value that parquet has and JSON does not (dates, decimals) as text."""
    if isinstance(value, bytes):
        raise UserError("a column that is kept holds bytes, which have no place in JSON lines; keep others")
    return str(value)


def convert_lines(lines: Path, out: Path) -> None:
    """Turn JSON lines into the output file, of the kind that its suffix names, in one atomic step."""
    if out.suffix.lower() == ".jsonl":
        sync(lines)
        os.replace(lines, out)
        sync(out.parent)
        return
    with new_file(out) as made:
        (_write_csv if out.suffix.lower() == ".csv" else _write_parquet)(lines, made)


def _chunks(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open(encoding="utf-8", newline="\n") as file:
        while chunk := list(islice(file, ROWS_AT_ONCE)):
            yield [json.loads(line) for line in chunk]


def _write_csv(lines: Path, out: Path) -> None:
    """Write a column for each field and for each label of `scores`; a list or a nested object is written as JSON."""
    names = dict.fromkeys(name for chunk in _chunks(lines) for row in chunk for name in _flat(row))
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        for chunk in _chunks(lines):
            writer.writerows(map(_flat, chunk))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": entry for key, entry in value.items()})
        else:
            flat[name] = value
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
        for name, value in flat.items()
    }


def _write_parquet(lines: Path, out: Path) -> None:
    """Write parquet; a first pass finds the type of each field, since a column may begin with thousands of nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pa.schema([])
        for chunk in _chunks(lines):
            names = dict.fromkeys(name for row in chunk for name in row)
            found = pa.table({name: [row.get(name) for row in chunk] for name in names}).schema
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        with pq.ParquetWriter(out, schema) as writer:
            for chunk in _chunks(lines):
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"a column that is kept has values of several types: {error}; --out a .jsonl file") from None


@contextmanager
def vector_writer(kind: str, file: IO[bytes], size: int) -> Iterator[WriteVectors]:
    """Return the writer for a kind of file (its suffix) of vectors with `size` dimensions."""
    if kind == ".jsonl":
        yield lambda rows, vectors: _write_json_vectors(file, rows, vectors)
    elif kind == ".parquet":
        yield from _parquet_vectors(file, size)
    else:
        yield from _npy_vectors(file, size)


def _write_json_vectors(file: IO[bytes], rows: Sequence[Row], vectors: Vectors) -> None:
    for row, vector in zip(rows, vectors, strict=True):
        short = [float(str(value)) for value in vector]  # no more digits than a float32 has
        file.write(json_line(row.kept, {"vector": short}).encode())


def _npy_vectors(file: IO[bytes], size: int) -> Iterator[WriteVectors]:
    """Write the header again at the end: only then is the number of rows known, and numpy reserves room for it."""
    count = 0

    def header() -> int:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (count, size)}
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, shape)
        return file.tell()

    def write(rows: Sequence[Row], vectors: Vectors) -> None:
        nonlocal count
        file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
        count += len(vectors)

    begin = header()
    yield write
    assert header() == begin


def _parquet_vectors(file: IO[bytes], size: int) -> Iterator[WriteVectors]:
    """Write a row group for each window; the first window decides the types of the columns that are kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None

    def write(rows: Sequence[Row], vectors: Vectors) -> None:
        nonlocal writer
        columns = {name: [row.kept[name] for row in rows] for name in rows[0].kept}
        try:
            table = pa.table(columns, schema=writer and pa.schema(list(writer.schema)[:-1]))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UserError(f"{rows[0].place} and after: a column that is kept changes its type: {error}") from None
        if writer is None:  # a column that holds only nulls so far may get text
            fields = [f.with_type(pa.string()) if f.type == pa.null() else f for f in table.schema]
            table = table.cast(pa.schema(fields))
        values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), size)
        table = table.append_column("vector", values) if columns else pa.table({"vector": values})
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
