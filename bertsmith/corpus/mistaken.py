"""Refuse files that hold something else than text or an object a line, with the command that converts them."""

from __future__ import annotations

import codecs
import csv
import re
from pathlib import PurePosixPath

from bertsmith.errors import UserError
from bertsmith.text.encodings import content_of

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PACKED = {".gz": "a gzip file", ".xz": "an xz file", ".bz2": "a bzip2 file", ".zst": "a zstd file"}
ENDINGS = {content: ending for ending, content in PACKED.items()}
ROWS = 20  # lines that are looked at to see a table
FEWEST = 3  # lines of a table, with its header
TABLE = r"[for row in csv.DictReader(open({path!r}, encoding='utf-8-sig', newline=''), delimiter={separator!r})]"
LIST = r"[for row in json.load(open({path!r}, encoding='utf-8-sig'))]"


def refuse_table(url: str, ending: str) -> None:
    """Refuse a file whose ending says that it is a table."""
    if ending in SEPARATORS:
        raise _table(url, SEPARATORS[ending])


def refuse_content(url: str, kind: str, start: bytes) -> None:
    """Refuse a file, read as text or as JSON lines, that begins as another kind of file does."""
    if content := content_of(start):
        fix = f"name it {PurePosixPath(url).name}{ENDINGS[content]}" if content in ENDINGS else "extract its text first"
        raise UserError(f"{url} is {content}, whatever its name says: {fix}")
    if kind not in ("text", "json"):
        return
    lines = start.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").split("\n", ROWS)[:ROWS]
    lists = lines[0].rstrip().endswith("]") and any(map(str.strip, lines[1:]))  # one a line
    if re.match(r"\[\s*[{\"]" if kind == "text" else r"\[", "".join(lines[:2])) and not lists:
        raise UserError(
            f"{url} is one JSON list, and a corpus is plain text or JSON lines, an object a line; "
            f"{_conversion(url, 'import json', LIST)}"
        )
    if kind == "json" and lines[0].strip() == "{":
        raise UserError(f"{url} is one JSON object on several lines; write an object a line into a .jsonl file")
    if kind == "text" and (separator := _separator(lines[:-1] or lines)):
        raise _table(url, separator)


def refuse_other_packing(url: str, ending: str, start: bytes) -> None:
    """Refuse a file with the ending of a compressed one that begins as another kind of file, or as plain text does."""
    content = content_of(start) or _plain(start)
    if content and content != PACKED[ending]:
        name = PurePosixPath(url).name.removesuffix(PurePosixPath(url).suffix)
        fix = f"name it {name}{ENDINGS.get(content, '')}" if content in ENDINGS or content == "plain text" else ""
        raise UserError(f"{url} is not {PACKED[ending]}, but {content}: {fix or 'extract its text first'}")


def _table(url: str, separator: str) -> UserError:
    return UserError(
        f"{url} is a table, and a corpus is plain text, or JSON lines of which --field names the text; "
        f"{_conversion(url, 'import csv, json', TABLE, separator)}"
    )


def _conversion(url: str, imports: str, rows: str, separator: str = "") -> str:
    """The advice to convert a file into JSON lines, with a command if the file is a local one that is not packed."""
    path = PurePosixPath(url)
    if "://" in url or not re.fullmatch(r"[\w./ -]+", url) or path.suffix in PACKED:
        return "write its rows as JSON objects, one a line, into a .jsonl file"
    loop = rows.format(path=url, separator=separator).removeprefix("[")
    out = path.with_name(f"{path.stem}-lines.jsonl")
    return f'convert it: python -c "{imports}; [print(json.dumps(row)) {loop}" > "{out}"'


def _separator(lines: list[str]) -> str:
    """The separator of a table: its first line has names, and all lines have as many fields; else empty."""
    rows = [line.replace("\r", "") for line in lines if line.strip()]  # the reader refuses a single one
    header = rows[0].strip() if rows else ""
    for separator in ",;\t":
        names = header.split(separator)
        if len(names) > 1 and all(re.fullmatch(r'"?[^\W\d]\w*"?', name) for name in names):
            fields = [len(row) for row in csv.reader(rows, delimiter=separator)]
            return separator if len(fields) >= FEWEST and {*fields} == {len(names)} else ""
    return ""


def _plain(start: bytes) -> str:
    """`plain text` for bytes that begin a text without control characters; else empty."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return ""
    return "plain text" if all(character.isprintable() or character in "\t\r\n\ufeff" for character in text) else ""
