"""Find and open input files and cut them into blocks of whole records, through `fsspec`, so that `s3://` works too.

Cutting is cheap and runs in one process; the workers parse the blocks (`readers.py`). Where a block ends depends only
on the bytes.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import fsspec

from bertsmith.corpus.mistaken import refuse_content, refuse_other_packing, refuse_table
from bertsmith.errors import UserError
from bertsmith.text.encodings import check_encoding, recoded

Kind = Literal["text", "json", "parquet", "dump", "extracted"]
BLOCK_BYTES = 8 << 20
BEGINNING = 1 << 14  # bytes by which a file that holds something else is known
START = 64  # bytes by which the kind of a compressed file is known
MAX_RECORD = 8 * BLOCK_BYTES  # bytes; a longer document is cut at the end of a line
COMPRESSED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda file: _open_zst(file),
}
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".xml": "dump",
}
# The end of a record. A blank line may hold spaces or a carriage return.
RECORD_ENDS: dict[str, re.Pattern[bytes]] = {
    "text": re.compile(rb"\n[ \t\r]*\n"),
    "json": re.compile(rb"\n"),
    "dump": re.compile(rb"</page>\s*"),
    "extracted": re.compile(rb"</doc>\s*"),
}
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True)
class Source:
    """One input file."""

    url: str
    kind: Kind
    size: int
    encoding: str = ""  # empty: UTF-8

    @property
    def origin(self) -> str:
        """The file, its size and encoding, by which a resumed build notices that a file was changed."""
        return f"{self.url} {self.size} {self.encoding}".rstrip()

    @property
    def compression(self) -> str:
        ending = PurePosixPath(self.url).suffix.lower()
        return ending if ending in COMPRESSED else ""


@dataclass(frozen=True)
class Block:
    """Whole records of one file; `first_line` is the line (or row) where the first record starts."""

    source: str
    kind: Kind
    first_line: int
    data: bytes | list[str]
    origin: str  # `Source.origin` when it was read
    encoding: str = ""  # that it was read in; empty: UTF-8


@dataclass
class Reading:
    """The number of bytes read so far, and errors of files that could not be read to their end."""

    bytes_read: int = 0
    bad: list[str] = field(default_factory=list)


def find_sources(inputs: Iterable[str | Path], encoding: str = "") -> list[Source]:
    """Find the files of paths, folders, globs and URLs; missing, empty and unknown kinds of files are refused."""
    encoding = check_encoding(encoding) if encoding else ""
    sources = [source for item in inputs for source in _find(str(item), encoding)]
    if not sources:
        raise UserError("no input files given")
    return sources


def _find(item: str, encoding: str) -> list[Source]:
    system, path = fsspec.core.url_to_fs(item)
    try:
        if any(c in item for c in "*?["):
            found = sorted(p for p in system.glob(path) if system.isfile(p))
            if not found:
                raise UserError(f"nothing matches {item}")
        elif system.isdir(path):
            found = sorted(p for p in system.find(path) if not PurePosixPath(p).name.startswith("."))
            if not found:
                raise UserError(f"folder {item} holds no files")
        elif system.exists(path):
            found = [path]
        else:
            raise UserError(f"no such file: {item}")
    except OSError as error:
        raise UserError(f"cannot read {item}: {error.strerror or error}") from None
    local = "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,))
    if local:
        return [_source(item if len(found) == 1 and found[0] == path else p, system, p, encoding) for p in found]
    return [_source(system.unstrip_protocol(p), system, p, encoding) for p in found]


def _source(url: str, system: fsspec.AbstractFileSystem, path: str, encoding: str) -> Source:
    size = int(system.size(path) or 0)
    if size == 0:
        raise UserError(f"{url} is empty")
    pure = PurePosixPath(url)
    ending = (PurePosixPath(pure.stem).suffix if pure.suffix.lower() in COMPRESSED else pure.suffix).lower()
    if ending in KINDS and ending != ".txt":
        return Source(url, KINDS[ending], size, "" if ending == ".parquet" else encoding)
    refuse_table(url, ending)
    if ending not in KINDS and not _unnamed(ending):
        raise UserError(
            f"{url}: unknown kind of file {ending!r}; .txt, .jsonl, .parquet or .xml, plain or .gz .xz .bz2 .zst"
        )
    return Source(url, _sniff(Source(url, "text", size, encoding)), size, encoding)


def _unnamed(ending: str) -> bool:
    """Whether a file has no ending, or one that is part of a name like `wiki_00.1`."""
    return not ending or ending[1:].isdigit()


def _sniff(source: Source) -> Kind:
    """Detect the kind of a file by its first bytes: WikiExtractor writes `wiki_00` in two formats."""
    try:
        with open_source(source) as (file, _):
            start = _read_exactly(file, 512, source).removeprefix(codecs.BOM_UTF8).lstrip()
    except UserError:
        return source.kind  # the error is raised again when the file is read
    if start.startswith(b"<doc "):
        return "extracted"
    if start.startswith(b"<mediawiki"):
        return "dump"
    return "json" if start.startswith(b'{"') and not source.url.endswith(".txt") else "text"


class open_source:
    """A context manager that gives the decompressed bytes of a file, and `tell` of the raw file."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __enter__(self) -> tuple[IO[bytes], Callable[[], int]]:
        try:
            self.raw = fsspec.open(self.source.url, "rb").open()
        except OSError as error:
            raise UserError(f"cannot read {self.source.url}: {error.strerror or error}") from None
        opener = COMPRESSED.get(self.source.compression)
        if opener:
            refuse_other_packing(self.source.url, self.source.compression, self.raw.read(START))
            self.raw.seek(0)
        plain = opener(self.raw) if opener else self.raw
        return (recoded(plain, self.source.encoding) if self.source.encoding else plain), self.raw.tell

    def __exit__(self, *details: object) -> None:
        self.raw.close()


def read_blocks(
    sources: Iterable[Source], text_field: str, reading: Reading, skip_bad: bool = False
) -> Iterator[Block]:
    """Yield all blocks of all files, in order; a damaged file is an error or, if `skip_bad`, is noted and skipped."""
    for source in sources:
        before = reading.bytes_read
        try:
            yield from _read_file(source, text_field, reading)
        except UserError as error:
            if not skip_bad:
                raise
            reading.bad.append(str(error))
        reading.bytes_read = before + source.size


def _read_file(source: Source, text_field: str, reading: Reading) -> Iterator[Block]:
    if source.kind == "parquet":
        yield from _parquet_blocks(source, text_field)
        return
    before, line = reading.bytes_read, 1
    with open_source(source) as (file, tell):
        for data in _pieces(file, source, RECORD_ENDS[source.kind]):
            if line == 1:
                refuse_content(source.url, source.kind, data[:BEGINNING])
            reading.bytes_read = before + min(tell(), source.size)
            yield Block(source.url, source.kind, line, data, source.origin, source.encoding)
            line += data.count(b"\n")


def _pieces(file: IO[bytes], source: Source, record_end: re.Pattern[bytes]) -> Iterator[bytes]:
    """Yield pieces of about a block each that end at the end of a record."""
    held, first = b"", True
    while True:
        wanted = BLOCK_BYTES * (len(held) // BLOCK_BYTES + 1) - len(held)
        more = _read_exactly(file, wanted, source)
        held += more.removeprefix(codecs.BOM_UTF8) if first else more
        first = False
        if len(more) < wanted:
            break
        cut = _last_end(held, record_end)
        if not cut and len(held) >= MAX_RECORD:
            cut = held.rfind(b"\n") + 1 or len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _read_exactly(file: IO[bytes], size: int, source: Source) -> bytes:
    parts: list[bytes] = []
    try:
        while size and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
    except DAMAGE as error:
        raise UserError(f"{source.url} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {source.url}: {error.strerror or error}") from None
    return b"".join(parts)


def _last_end(data: bytes, record_end: re.Pattern[bytes]) -> int:
    """The place after the last record's end, or 0 if there is none; searches backwards in growing steps."""
    reach = 1 << 12
    while True:
        start = max(0, len(data) - reach)
        last = 0
        for match in record_end.finditer(data, start):
            last = match.end()
        if last or start == 0:
            return last
        reach *= 8


def _parquet_blocks(source: Source, text_field: str) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[str] = []
    size, first = 0, 1
    try:
        with open_source(source) as (file, _):
            table = pq.ParquetFile(pa.BufferReader(file.read()) if source.compression else file)
            _check_column(source, table.schema_arrow, text_field)
            for chunk in table.iter_batches(batch_size=256, columns=[text_field]):
                texts = [text or "" for text in chunk.column(0).to_pylist()]
                rows += texts
                size += sum(map(len, texts))
                if size >= BLOCK_BYTES:
                    yield Block(source.url, "parquet", first, rows, source.origin)
                    rows, size, first = [], 0, first + len(rows)
    except pa.ArrowInvalid as error:
        raise UserError(f"{source.url} is not a parquet file: {error}") from None
    except DAMAGE as error:
        raise UserError(f"{source.url} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {source.url}: {error.strerror or error}") from None
    if rows:
        yield Block(source.url, "parquet", first, rows, source.origin)


def _check_column(source: Source, schema: Any, text_field: str) -> None:
    import pyarrow as pa

    if text_field not in schema.names:
        names = ", ".join(schema.names)
        raise UserError(f"{source.url}: no column {text_field!r}; there is: {names}; choose with --field")
    kind = schema.field(text_field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{source.url}: column {text_field!r} holds {kind}, not text; choose with --field")


def _open_zst(file: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))
