"""Files with one word per line, as CoNLL-2003: the word (or its number) first, its tag last.

A blank line ends a sentence. A file may also have one character per line, with the spaces of the text, as KLUE-NER's
does: its rows are texts with entities. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.rows.columns import Row
from bertsmith.rows.entities import SPACE, of_characters
from bertsmith.rows.records import decoded, unchanged
from bertsmith.text.safe import SafeTexts

DOCUMENT = "-DOCSTART-"
COMMENT = "##"  # of files with one character per line: a remark, or the id of the sentence that follows and its text
NAMES = ("", ".txt", ".conll", ".bio", ".iob", ".train", ".testa", ".testb")
BEGINS = {"S": "B", "U": "B", "E": "I", "L": "I"}  # prefixes of BIOES and BILOU
SAMPLE = 200  # lines by which the kind of a file is told
TYPE_FIRST = re.compile(r"(.+)[-_]([BI])")  # PER-B, PER_B: Naver's form


def is_conll(path: str | Path) -> bool:
    """Whether a file has one word or character per line: by its name or, for text files and tables, its first lines."""
    path = Path(path)
    if path.suffix.lower() not in (".txt", ".tsv") or not path.is_file():
        return path.suffix.lower() in NAMES and path.is_file()
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        raw = list(islice(file, SAMPLE))
    if has_characters(raw):
        return True
    lines = [line.strip() for line in raw]
    sentence = list(takewhile(bool, lines))
    alike = len({len(_fields(line)) for line in lines if line}) == 1
    return "".join(lines[:1]).startswith(DOCUMENT) or (alike and 1 < len(sentence) < len(lines))


def has_characters(lines: Sequence[str]) -> bool:
    """Whether lines are single characters with their tags, as the first sentence shows; comments or spaces tell it."""
    found = [line.rstrip("\r\n") for line in lines if not line.startswith(COMMENT)]
    characters = [line.rpartition("\t")[0] for line in found]
    first = list(takewhile(bool, characters))
    return bool(first) and all(len(sign) == 1 for sign in first) and (SPACE in characters or len(found) < len(lines))


def _fields(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else line.split()


def read_conll(path: str | Path, *, labelled: bool) -> Iterator[Row]:
    """The sentences of a file, each with all words of its document."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    yield from with_documents(_sentences(path, labelled))


def _sentences(path: Path, labelled: bool) -> Iterator[Row]:
    words: list[list[str]] = []  # the fields of each
    begin = width = 0
    numbered: bool | None = None  # whether the first column is the number of the word, as the first sentence shows
    safe = SafeTexts()
    with unchanged(path) as file:
        lines = [*decoded(file, str(path)), ""]
    if has_characters(lines[:SAMPLE]):
        yield from _texts(lines, path, labelled)
        return
    for number, raw in enumerate(lines, 1):
        line = safe.text(raw, f"{path}, line {number}")
        fields = _fields(line)
        if not line.strip():
            if words:
                numbered = _counts(words) if numbered is None else numbered
                yield _sentence(words, int(numbered), f"{path}, line {begin}", labelled)
            words = []
            continue
        begin = begin if words else number
        width = width or len(fields)
        if len(fields) != width and fields[0] != DOCUMENT:
            raise UserError(f"{path}, line {number}: {len(fields)} columns, where the lines before have {width}")
        if labelled and len(fields) < 2:
            raise UserError(f"{path}, line {number}: a word without a tag: {line.strip()!r}")
        words.append([field.strip() for field in fields])
    safe.say()
    if not width:
        raise UserError(f"{path} is empty: it holds no rows")


def _texts(lines: Sequence[str], path: Path, labelled: bool) -> Iterator[Row]:
    """The sentences of a file with one character per line, as texts with entities."""
    characters, tags, key, begin, safe = list[str](), list[str](), "", 0, SafeTexts()
    for number, raw in enumerate(lines, 1):
        line = safe.text(raw, f"{path}, line {number}").rstrip("\r\n")
        if line.startswith(COMMENT):
            key = line.removeprefix(COMMENT).strip().partition("\t")[0]
            continue
        if not line:
            if characters:
                label = of_characters(characters, to_bio(tags)) if labelled else None
                yield Row("".join(characters), None, label, f"{path}, line {begin}", key)
            characters, tags, key = [], [], ""
            continue
        character, tab, tag = line.rpartition("\t")
        if len(character) != 1:
            wrong = f"{character!r} is not one character" if tab else f"{line!r} is a character without a tag"
            raise UserError(f"{path}, line {number}: {wrong}; the lines before have one, a tab and its tag")
        begin = begin if characters else number
        characters.append(character)
        tags.append(tag.strip())
    safe.say()


def _counts(words: list[list[str]]) -> bool:
    """Whether the first of at least three columns counts the words of a sentence, as in Naver's files."""
    return len(words[0]) > 2 and [fields[0] for fields in words] == [str(n + 1) for n in range(len(words))]


def _sentence(words: list[list[str]], column: int, place: str, labelled: bool) -> Row:
    parts = tuple(fields[column if len(fields) > column else 0] for fields in words)
    return Row(" ".join(parts), None, [fields[-1] for fields in words] if labelled else None, place, parts=parts)


def with_documents(rows: Iterable[Row]) -> Iterator[Row]:
    """Sentences with the words of their document, which begins at `-DOCSTART-`; else every sentence is a document."""
    document: list[Row] = []
    inside = False
    for row in rows:
        if row.parts and row.parts[0] == DOCUMENT:
            yield from _together(document)
            document, inside = [], True
        elif inside:
            document.append(row)
        else:
            yield from _together([row])
    yield from _together(document)


def _together(sentences: list[Row]) -> Iterator[Row]:
    words = tuple(word for row in sentences for word in row.parts)
    begin = 0
    for row in sentences:
        yield replace(row, document=words, begin=begin)
        begin += len(row.parts)


def to_bio(tags: Iterable[Any]) -> list[str]:
    """Tags in BIO, where every entity begins with B, from IOB1 (B only between neighbours), BIOES or Naver's form."""
    found: list[str] = []
    before = "O"
    for tag in map(bio_name, tags):
        type_ = tag.removeprefix("I-")
        if type_ != tag and before not in (f"B-{type_}", tag):
            tag = f"B-{type_}"
        found.append(tag)
        before = tag
    return found


def bio_name(tag: Any) -> str:
    """The name of a single tag in BIO."""
    tag = str(tag)
    head, dash, kind = tag.partition("-")
    if head not in ("B", "I", *BEGINS) and (match := TYPE_FIRST.fullmatch(tag)):
        return f"{match[2]}-{match[1]}"
    if tag == "-":
        return "O"
    return f"{BEGINS.get(head, head)}-{kind}" if dash and head in BEGINS else tag
