"""Records of files (CSV, TSV, JSON, JSON lines, parquet, plain text), standard input and tables in memory.

No file is held in memory as a whole, apart from JSON that is one list: records are read one at a time, or a thousand
at a time from parquet.
Imports without torch.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from bertsmith.errors import BadRow, UserError
from bertsmith.rows.separated import refuse_doubles, separated
from bertsmith.text.encodings import content_of, guess_encoding
from bertsmith.text.safe import SafeTexts

STDIN = "-"
HINTS = dict.fromkeys((".xlsx", ".xls", ".ods"), "; save the sheet as CSV UTF-8")
HINTS |= {".conll": "; a file with one word a line is for the task tag"}
KINDS = ".csv, .tsv, .jsonl, .parquet or .txt"
Record = Mapping[str, Any]
Placed = tuple[str, Record | BadRow]  # the place of a record, or of the error where it cannot be read
OnProgress = Callable[[float], None]  # gets the share of a file that has been read


@dataclass(frozen=True)
class Table:
    """Rows in memory; `classes` are the label names of columns with numbers, from a table of `datasets`."""

    records: Sequence[Record]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "the rows in memory"


Source = str | Path | Table


@dataclass(frozen=True)
class Form:
    """How a file is read: `literal`, `header` and `known` as in `separated`; `text` is the column of a plain text.

    `used` chooses the columns of a parquet file that are read, so that the others take no memory; `on_progress` gets
    the share of the file that has been read (never for standard input).
    """

    literal: bool = False
    header: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    text: str = "text"
    used: Callable[[Sequence[str]], list[str]] = list
    on_progress: OnProgress = lambda share: None


def read_records(path: Source, form: Form) -> Iterator[Placed]:
    """Each record with its place; a note is printed if characters that are not allowed in text were replaced."""
    safe = SafeTexts()
    for place, record in _records(path, form):
        yield place, safe.value(record, place)
    safe.say()


def _records(path: Source, form: Form) -> Iterator[Placed]:
    if isinstance(path, Table):
        return ((f"row {number}", record) for number, record in enumerate(path.records, 1))
    if str(path) == STDIN:
        return _lines_or_json(decoded(sys.stdin.buffer, "standard input"), form.text)
    path = Path(path)
    if not path.exists():
        raise UserError(f"no such file: {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file: {KINDS}")
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv") or (kind == ".txt" and form.literal and _has_columns(path, form.known)):
        options: dict[str, Any] = {"literal": form.literal, "header": form.header, "known": form.known}
        delimiter = "," if kind == ".csv" else "\t"
        return _opened(path, form.on_progress, lambda lines: separated(lines, path, delimiter, **options))
    if kind in (".jsonl", ".ndjson") or (kind == ".json" and _has_lines(path)):
        return _opened(path, form.on_progress, lambda lines: _json_lines(enumerate(lines, 1), str(path)))
    if kind == ".json":
        return _json(path)
    if kind == ".parquet":
        return _parquet(path, form)
    if kind == ".txt":
        return _opened(path, form.on_progress, lambda lines: _texts(enumerate(lines, 1), str(path), form.text))
    raise UserError(f"{path}: unknown kind of file {kind!r}; {KINDS}{HINTS.get(kind, '')}")


def _opened(
    path: Path, on_progress: OnProgress, records: Callable[[Iterator[str]], Iterator[Placed]]
) -> Iterator[Placed]:
    """The records of a file of lines."""
    size = max(1, path.stat().st_size)
    with unchanged(path) as file:
        for record in records(decoded(file, str(path))):
            on_progress(min(1.0, file.tell() / size))
            yield record


@contextmanager
def unchanged(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; it is an error if the file is changed before the block ends."""
    before = path.stat()
    with path.open("rb") as file:
        yield file
    after = path.stat() if path.exists() else None
    if path.is_fifo() or (after and (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)):
        return
    raise UserError(f"{path} was changed while it was read ({before.st_size:,} bytes at first); run the command again")


def decoded(file: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, which matter inside CSV quotes; other encodings are refused."""
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    for number, line in enumerate(lines, 1):
        _refuse_bytes(line, name, number)
        yield line
    lines.detach()  # else the file would be closed, and `tell` fails for the records that are still to come


def _refuse_bytes(text: str, name: str, line: int) -> None:
    """Refuse a text that was not UTF-8: undecodable bytes are lone surrogates in it."""
    try:
        text.encode("utf-8")
        good = line > 1 or "\0" not in text  # UTF-16 without its mark
    except UnicodeEncodeError as error:
        good, line = False, line + text.count("\n", 0, error.start)
    if not good:
        data = text.encode("utf-8", errors="surrogateescape")
        content = content_of(data)
        if content:
            raise UserError(f"{name} is {content}, whatever its name says; unpack it, or save it as plain UTF-8")
        guess = guess_encoding(data)
        fix = f"it looks like {guess}; convert it: iconv -f {guess} -t UTF-8" if guess else "save it as plain UTF-8"
        raise UserError(f"{name}, line {line}: this is not UTF-8, but another encoding or a compressed file; {fix}")


def _json_lines(lines: Iterator[tuple[int, str]], name: str) -> Iterator[Placed]:
    for number, line in lines:
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            record = BadRow(f"{place}: not valid JSON: {getattr(error, 'msg', 'too deep')}")
        if not isinstance(record, (dict, BadRow)):
            record = BadRow(f"{place}: expected an object, found {type(record).__name__}")
        yield place, record


def _texts(lines: Iterator[tuple[int, str]], name: str, column: str) -> Iterator[Placed]:
    """One text per line; an empty line is an empty text, so that predictions and lines correspond."""
    for number, line in lines:
        yield f"{name}, line {number}", {column: line.rstrip("\r\n")}


def _lines_or_json(file: Iterable[str], column: str) -> Iterator[Placed]:
    """Standard input: JSON lines where the first line is an object, else one text per line."""
    lines = enumerate(file, 1)
    for first in lines:
        both = chain([first], lines)
        if isinstance(_loaded(first[1]), dict):
            return _json_lines(both, "standard input")
        return _texts(both, "standard input", column)
    return iter(())


def _loaded(line: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None


def _has_columns(path: Path, known: Sequence[str]) -> bool:
    """Whether a `.txt` file of a data set is a table: its first line has a tab or is a known column name."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline().rstrip("\r\n")
    return "\t" in first or first in known


def _has_lines(path: Path) -> bool:
    """Whether a `.json` file is JSON lines: its first line is a whole object, or not JSON at all."""
    with path.open("rb") as file:
        first = next(decoded(file, str(path)), "").strip()
    start = _loaded(first)
    if start is None:
        return bool(first) and first[0] not in "[{"
    return isinstance(start, dict) and "data" not in start


def _json(path: Path) -> Iterator[Placed]:
    """A list of objects, or SQuAD's own form."""
    try:
        with unchanged(path) as file:
            text = file.read().decode("utf-8-sig", errors="surrogateescape")
        _refuse_bytes(text, str(path), 1)
        values = json.loads(text or "[]")
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid JSON: too deep") from None
    values = values.get("data") if isinstance(values, dict) else values
    if not isinstance(values, list):
        raise UserError(f"{path}: expected a list of objects, or an object with such a list as 'data'")
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise UserError(f"{path}, item {number}: expected an object, found {type(value).__name__}")
        place = f"{path}, item {number}"
        yield from _questions(path, value, place) if "paragraphs" in value else [(place, value)]


def _questions(path: Path, article: Record, where: str) -> Iterator[Placed]:
    """The questions of an article in SQuAD's own form."""
    for paragraph in _objects(article, "paragraphs", where):
        for question in _objects(paragraph, "qas", where):
            place = f"{path}, question {question.get('id', question.get('question'))!r}"
            answers = [] if question.get("is_impossible") else question.get("answers")
            yield place, {**question, "context": paragraph.get("context"), "answers": answers}


def _objects(parent: Record, name: str, where: str) -> list[Record]:
    values = parent.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UserError(f"{where}: {name!r} is not a list of objects, as in SQuAD's own files")
    return values


def class_names(path: Source, columns: Sequence[str]) -> tuple[str, ...]:
    """The label names of the first of these columns that has numbers, as `datasets` saves them in parquet files."""
    if isinstance(path, Table):
        return next((path.classes[name] for name in columns if name in path.classes), ())
    import pyarrow as pa
    import pyarrow.parquet as pq

    if Path(path).suffix.lower() != ".parquet" or not Path(path).is_file():
        return ()
    try:
        noted = json.loads((pq.read_schema(path).metadata or {}).get(b"huggingface", b"{}"))
        features = noted["info"]["features"]
        feature = next(features[name] for name in columns if name in features)
    except (pa.ArrowInvalid, ValueError, KeyError, TypeError, StopIteration):
        return ()
    inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # a list of labels
    names = inner.get("names") if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _parquet(path: Path, form: Form) -> Iterator[Placed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
    refuse_doubles(table.schema_arrow.names, str(path))
    columns, rows, number = form.used(table.schema_arrow.names), max(1, table.metadata.num_rows), 0
    chunks = table.iter_batches(batch_size=1024, columns=columns)
    while True:
        try:
            chunk = next(chunks, None)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}, after row {number}: the file is damaged: {error}") from None
        if chunk is None:
            return
        for record in chunk.to_pylist():
            number += 1
            form.on_progress(number / rows)
            yield f"{path}, row {number}", record
