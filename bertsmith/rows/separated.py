"""Records of CSV and TSV files of all dialects. Imports without torch.

A TSV file may have literal quotation marks (GLUE), or quoted fields, as spreadsheets and pandas write them. A line
with as many fields as the header is a record, whose fields are unquoted where they are quoted as a whole; only a line
with another number of fields is continued up to the closing quote.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from bertsmith.errors import BadRow, UserError

csv.field_size_limit(sys.maxsize)
SEPARATORS = ",;\t|"
Fields = tuple[int, list[str]]  # the number of the line, and its fields
LONGEST = 1000  # lines of one quoted field


def separated(
    file: Iterable[str],
    path: Path,
    delimiter: str,
    *,
    literal: bool = False,
    header: Sequence[str] = (),
    known: Sequence[str] = (),
) -> Iterator[tuple[str, dict[str, str | None] | BadRow]]:
    """Each record with its place, with None for missing fields; a line with too many fields is an error.

    With `literal`, quotes are plain characters and the delimiter is fixed; else the header line may show another one. A
    file has no header line of its own where it has as many columns as `header` and its first line has no `known` name.
    """
    lines = iter(file)
    start = next(lines, "")
    delimiter = delimiter if literal else _delimiter(start, delimiter)
    lines = chain([start], lines)
    rows = _tab_rows(lines, literal) if delimiter == "\t" else _csv_rows(lines, path, delimiter, start)
    first = next(rows, None)
    if first is None:
        return
    names, has_header = [name.strip() for name in first[1]], True
    if header and len(names) == len(header) and not set(names) & set(known):
        names, rows, has_header = list(header), chain([first], rows), False
    else:
        refuse_doubles(names, f"{path}, line {first[0]}")
    for line, fields in rows:
        place = f"{path}, line {line}"
        if has_header and fields == first[1]:
            raise UserError(f"{place}: the header stands here again, as where files were joined; remove the line")
        if len(fields) > len(names):
            counts = f"more fields than the header names, {len(fields)} instead of {len(names)}"
            yield place, BadRow(f"{place}: {counts}; put quotation marks around a text with {_name(delimiter)}")
        else:
            yield place, dict(zip_longest(names, fields))


def _delimiter(header: str, usual: str) -> str:
    """The delimiter of a header line: the usual one where the line has it, else the most frequent other one."""
    bare = re.sub(r'"[^"]*"', "", header)
    return usual if usual in bare else max(usual + SEPARATORS, key=bare.count)


def _name(delimiter: str) -> str:
    return "tabs" if delimiter == "\t" else f"{delimiter!r} in it"


def refuse_doubles(names: Sequence[str], place: str) -> None:
    """Refuse two columns with the same name."""
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{place}: two columns are named {double!r}; rename one")


def _csv_rows(file: Iterable[str], path: Path, delimiter: str, header: str) -> Iterator[Fields]:
    spaced = header.count(delimiter) == header.count(f"{delimiter} ") > 0  # `text, label`: also in the lines after it
    reader = csv.reader(file, strict=True, delimiter=delimiter, skipinitialspace=spaced)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        hint = "; a quotation mark is never closed" if "unexpected end" in str(error) else ""
        raise UserError(f"{path}, line {line}: {error}{hint}") from None


def _tab_rows(file: Iterable[str], literal: bool) -> Iterator[Fields]:
    lines = _Lines(file)
    width = 0
    while (line := lines.take()) is not None:
        number, fields = lines.number, line.split("\t")
        if not line:
            continue
        width = width or len(fields)
        if literal:
            yield number, fields
        elif _goes_on(fields, width, lines) and (whole := _read_on(line, lines, width)):
            yield number, whole
        else:
            yield number, [_unquoted(field) for field in fields]


class _Lines:
    """The lines of a file, with look-ahead."""

    def __init__(self, file: Iterable[str]) -> None:
        self.rest = (line.rstrip("\r\n") for line in file)
        self.ahead: deque[str] = deque()
        self.number = 0

    def look(self, count: int) -> list[str]:
        self.ahead.extend(islice(self.rest, max(0, count - len(self.ahead))))
        return list(islice(self.ahead, count))

    def take(self) -> str | None:
        if not self.look(1):
            return None
        self.number += 1
        return self.ahead.popleft()


def _goes_on(fields: list[str], width: int, lines: _Lines) -> bool:
    """Whether a quoted field of the record may have a tab or continue on the next line."""
    if len(fields) != width:
        return any(_opens(field) for field in fields)
    return _opens(fields[-1]) and any(line.count("\t") != width - 1 for line in lines.look(1))


def _read_on(line: str, lines: _Lines, width: int) -> list[str] | None:
    """The record from this line to its closing quote; None if it does not have the file's number of fields."""
    following = lines.look(LONGEST)
    reader = csv.reader([f"{text}\n" for text in [line, *following]], delimiter="\t", strict=True)
    try:
        fields = next(reader)
    except csv.Error:
        return None
    if len(fields) != width:
        return None
    for _ in range(reader.line_num - 1):
        lines.take()
    return fields


def _opens(field: str) -> bool:
    """Whether a field begins with a quote that is not closed."""
    return field.startswith('"') and _unquoted(field) == field


def _unquoted(field: str) -> str:
    whole = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', "")
    whole = whole and not field[1:2] == field[-2:-1] == " "  # quotes with spaces inside are tokens of a sentence
    return field[1:-1].replace('""', '"') if whole else field
