"""Parse blocks into documents: plain text, JSON lines, parquet, Wikipedia dumps and WikiExtractor's output.

A document is the list of its paragraphs. In plain text a line is a paragraph and a blank line ends the document; in
JSON lines and parquet a row's `text` is a document and its lines are the paragraphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bertsmith.corpus.sources import Block, Reading, Source, find_sources, read_blocks
from bertsmith.corpus.wikipedia import extracted_documents, page_documents
from bertsmith.errors import UserError
from bertsmith.text.encodings import is_other_encoding, other_encoding
from bertsmith.text.safe import SafeTexts

Document = list[str]


@dataclass
class ReadErrors:
    """Invalid characters that were replaced, and records or files that could not be read and were skipped."""

    replaced: int = 0
    first_replaced: str = ""
    bad: list[str] = field(default_factory=list)

    def add(self, other: ReadErrors) -> None:
        self.first_replaced = self.first_replaced or other.first_replaced
        self.replaced += other.replaced
        self.bad += other.bad

    def warnings(self) -> list[str]:
        """A sentence on each kind of error; empty if there was none."""
        lines = []
        if self.replaced:
            count = f"replaced {self.replaced} invalid character(s) by U+FFFD"
            lines.append(f"{count} (invalid UTF-8, NUL or lone surrogates), the first in {self.first_replaced}")
        if self.bad:
            lines.append(f"skipped {len(self.bad)} bad record(s) or file(s), the first: {self.bad[0]}")
        return lines


def parse(block: Block, text_field: str, read_errors: ReadErrors, skip_bad: bool = False) -> Iterator[Document]:
    """Yield the documents of a block; errors are raised or, if `skip_bad`, added to `read_errors`."""
    safe = SafeTexts()
    for document in _parse(block, text_field, read_errors, skip_bad):
        yield [safe.text(paragraph) for paragraph in document]
    if safe.replaced:
        read_errors.add(ReadErrors(safe.replaced, f"{block.source}, in the lines from {block.first_line} on"))


def _parse(block: Block, text_field: str, read_errors: ReadErrors, skip_bad: bool) -> Iterator[Document]:
    if isinstance(block.data, list):
        yield from (document for text in block.data if (document := _paragraphs(text)))
    elif block.kind == "dump":
        yield from page_documents(block.data)
    else:
        try:
            text = _decode(block, read_errors)
        except UserError as error:
            if not skip_bad:
                raise
            read_errors.bad.append(str(error))
            return
        if block.kind == "extracted":
            yield from extracted_documents(text)
        elif block.kind == "json":
            yield from _row_documents(block, text, text_field, read_errors, skip_bad)
        else:
            yield from _text_documents(text)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of some files, in order; can be iterated any number of times."""

    sources: tuple[Source, ...]
    text_field: str
    reading: Reading
    read_errors: ReadErrors
    skip_bad: bool = False

    @classmethod
    def of(
        cls, inputs: Iterable[str | Path], text_field: str = "text", encoding: str = "", skip_bad: bool = False
    ) -> Documents:
        """Find the inputs (files, folders, globs or URLs) and check that they exist."""
        return cls(tuple(find_sources(inputs, encoding)), text_field, Reading(), ReadErrors(), skip_bad)

    def __iter__(self) -> Iterator[Document]:
        self.reading.__init__()  # type: ignore[misc]
        self.read_errors.__init__()  # type: ignore[misc]
        for block in read_blocks(self.sources, self.text_field, self.reading, self.skip_bad):
            yield from parse(block, self.text_field, self.read_errors, self.skip_bad)
        self.read_errors.bad += self.reading.bad

    @property
    def num_bytes(self) -> int:
        """The size of all files on disk, compressed or not."""
        return sum(source.size for source in self.sources)


def _decode(block: Block, read_errors: ReadErrors) -> str:
    """Decode a block; invalid UTF-8 is replaced and counted, and text in another encoding is refused."""
    assert isinstance(block.data, bytes)
    try:
        text, replaced = block.data.decode("utf-8"), 0
    except UnicodeDecodeError as error:
        if not read_errors.replaced:
            line = block.first_line + block.data.count(b"\n", 0, error.start)
            read_errors.first_replaced = f"{block.source}, line {line}"
        text = block.data.decode("utf-8", errors="replace")
        replaced = text.count("\ufffd") - block.data.count("\ufffd".encode())
    invalid = replaced + text.count("\0")  # ASCII in UTF-16 is valid UTF-8 with NUL characters
    if is_other_encoding(invalid, len(text)):
        raise other_encoding(block.source, block.encoding, block.data, invalid, len(text))
    read_errors.replaced += replaced
    return text


def _text_documents(text: str) -> Iterator[Document]:
    document: Document = []
    for line in text.split("\n"):
        if line := line.strip():
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _row_documents(block: Block, text: str, name: str, read_errors: ReadErrors, skip_bad: bool) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), block.first_line):
        if not line.strip():
            continue
        try:
            document = _paragraphs(_text_of(line, name, f"{block.source}, line {number}"))
        except UserError as error:
            if not skip_bad:
                raise
            read_errors.bad.append(str(error))
            continue
        if document:
            yield document


def _text_of(line: str, name: str, place: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise UserError(f"{place}: not valid JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(row, dict) or not isinstance(row.get(name), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{place}: no text in field {name!r}; there is: {keys}; choose with --field")
    return str(row[name])


def _paragraphs(text: str) -> Document:
    return [line for raw in text.splitlines() if (line := raw.strip())]
