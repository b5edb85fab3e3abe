"""Documents out of files: plain text, JSON lines and parquet, compressed or not.

A document is the list of its paragraphs. In plain text a line is a paragraph and a blank line ends the document; in
JSON lines and parquet a row's `text` is a document and its lines are the paragraphs.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import UserError

Document = list[str]
COMPRESSED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda file: _open_zst(file),
}
TEXT_KINDS = (".txt", ".text", ".md", "")
ROW_KINDS = (".jsonl", ".ndjson", ".json")
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON may hold half of a surrogate pair, which is no character


@dataclass
class Reading:
    """What is known while files are read: how far it has come, and what had to be replaced."""

    bytes_read: int = 0
    replaced: int = 0  # invalid UTF-8 sequences
    first_replaced: str = ""

    def warning(self) -> str:
        """A sentence on the replaced sequences, or nothing where there were none."""
        if not self.replaced:
            return ""
        return f"replaced {self.replaced} invalid UTF-8 sequence(s) by U+FFFD, the first in {self.first_replaced}"


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of some files, in order; may be gone through again and again."""

    paths: tuple[Path, ...]
    field: str
    reading: Reading

    @classmethod
    def of(cls, inputs: Iterable[str | Path], field: str = "text") -> Documents:
        """Check that the inputs are there and readable: files, or folders of them."""
        paths: list[Path] = []
        for item in map(Path, inputs):
            if item.is_dir():
                found = sorted(p for p in item.rglob("*") if p.is_file() and not p.name.startswith("."))
                if not found:
                    raise UserError(f"folder {item} holds no files")
                paths += found
            elif item.exists():
                paths.append(item)
            else:
                raise UserError(f"no such file: {item}")
        if not paths:
            raise UserError("no input files given")
        for path in paths:
            if path.stat().st_size == 0:
                raise UserError(f"{path} is empty")
        return cls(tuple(paths), field, Reading())

    def __iter__(self) -> Iterator[Document]:
        self.reading.bytes_read = self.reading.replaced = 0
        for path in self.paths:
            before = self.reading.bytes_read
            yield from self._read(path)
            self.reading.bytes_read = before + path.stat().st_size

    @property
    def num_bytes(self) -> int:
        """The size of all files as they lie on the disk."""
        return sum(path.stat().st_size for path in self.paths)

    def paragraphs(self) -> Paragraphs:
        """All paragraphs, one after the other."""
        return Paragraphs(self)

    def _read(self, path: Path) -> Iterator[Document]:
        kind = _kind(path)
        try:
            if kind == ".parquet":
                yield from _parquet_documents(path, self.field)
            elif kind in ROW_KINDS:
                yield from _row_documents(path, self._lines(path), self.field)
            elif kind in TEXT_KINDS:
                yield from _text_documents(self._lines(path))
            else:
                raise UserError(
                    f"{path}: unknown kind of file {kind!r}; .txt, .jsonl or .parquet, plain or .gz .xz .bz2 .zst"
                )
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged: {error}") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None

    def _lines(self, path: Path) -> Iterator[str]:
        opener, before = COMPRESSED.get(path.suffix.lower()), self.reading.bytes_read
        with path.open("rb") as file, opener(file) if opener else file as plain:
            for number, raw in enumerate(plain, 1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if number % 64 == 0:
                    self.reading.bytes_read = before + file.tell()
                try:
                    yield raw.decode("utf-8")
                except UnicodeDecodeError:
                    yield self._replace(raw, f"{path}, line {number}")

    def _replace(self, raw: bytes, place: str) -> str:
        line = raw.decode("utf-8", errors="replace")
        if not self.reading.replaced:
            self.reading.first_replaced = place
        self.reading.replaced += line.count("\ufffd") - raw.count("\ufffd".encode())
        return line


@dataclass(frozen=True, eq=False)
class Paragraphs:
    """The paragraphs of documents; may be gone through again and again."""

    documents: Documents

    def __iter__(self) -> Iterator[str]:
        for document in self.documents:
            yield from document


def _kind(path: Path) -> str:
    """The file's kind by its name, without the compression's ending."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def _text_documents(lines: Iterable[str]) -> Iterator[Document]:
    document: Document = []
    for line in lines:
        if line := line.strip():
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _row_documents(path: Path, lines: Iterable[str], field: str) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise UserError(f"{path}, line {number}: not valid JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise UserError(f"{path}, line {number}: no text in field {field!r}; there is: {keys}; choose with --field")
        if document := _paragraphs(_HALF_PAIR.sub("\ufffd", row[field])):
            yield document


def _parquet_documents(path: Path, field: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    opener = COMPRESSED.get(path.suffix.lower())
    try:
        with path.open("rb") as file:
            table = pq.ParquetFile(pa.BufferReader(opener(file).read()) if opener else path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
    if field not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise UserError(f"{path}: no column {field!r}; there is: {names}; choose with --field")
    kind = table.schema_arrow.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{path}: column {field!r} holds {kind}, not text; choose with --field")
    for chunk in table.iter_batches(batch_size=1024, columns=[field]):
        for text in chunk.column(0).to_pylist():
            if text and (document := _paragraphs(text)):
                yield document


def _paragraphs(text: str) -> Document:
    return [line for raw in text.splitlines() if (line := raw.strip())]


def _open_zst(file: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))
