"""Rows out of texts that a program hands over: strings, pairs, lists of words, contexts with endings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.model.config import HeadKind
from bertsmith.rows.columns import Row
from bertsmith.text.safe import SafeTexts

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".gz", ".xz", ".bz2", ".zst", ".zip")
ENDS = (".", "!", "?", "…")
FORMS = {
    "tags": "a text or a list of its words",
    "span": "a tuple (question, context)",
    "choice": "a tuple (context, [endings])",
}


def rows_given(texts: Iterable[Any], kind: HeadKind) -> Iterator[Row]:
    """A row for each text; what could be meant in two ways is refused, not guessed."""
    if isinstance(texts, dict | bytes):
        raise UserError(f"texts are given as a {type(texts).__name__}; give a string, or a list of strings")
    if isinstance(texts, tuple) and len(texts) == 2 and _are_texts(texts):
        raise UserError("a tuple may be one pair or two texts; write [(first, second)] or [first, second]")
    if kind == "tags" and _are_bare_words(texts):
        raise UserError(
            "a list of single words may be one sentence or several texts; write [[word, word, …]] for one sentence, or "
            "call predict for each word"
        )
    return _rows(texts, kind)


def _rows(texts: Iterable[Any], kind: HeadKind) -> Iterator[Row]:
    safe = SafeTexts()
    for item in texts:
        yield row_given(safe.value(item), kind)
    safe.say()


def looks_like_text(value: str) -> bool:
    """Whether an argument that could name a file is a text: nothing of this name is there, and it is no file's name."""
    if value == "-" or Path(value[:255]).exists() or Path(value).suffix.lower() in SUFFIXES:
        return False
    return any(sign.isspace() for sign in value.strip()) or value.endswith(ENDS) or not value.isascii()


def row_given(item: Any, kind: HeadKind) -> Row:
    """One row; the kind of the model's head says what a list is."""
    if isinstance(item, str) and kind not in ("span", "choice"):
        return Row(item, None, None, "")
    if isinstance(item, list | tuple):
        if kind == "tags" and _are_texts(item):
            return Row(" ".join(item), None, None, "", parts=tuple(item))
        if kind == "choice" and len(item) == 2 and isinstance(item[0], str) and _are_texts(item[1]):
            return Row(item[0], None, None, "", parts=tuple(item[1]))
        if kind not in ("tags", "choice") and len(item) == 2 and _are_texts(item):
            return Row(item[0], item[1], None, "")
    form = FORMS.get(kind, "a text or a pair of texts, (first, second)")
    shown = repr(item) if len(repr(item)) <= 80 else f"{repr(item)[:80]}…"
    raise UserError(f"cannot answer {shown}; each item has to be {form}")


def _are_texts(items: Any) -> bool:
    return isinstance(items, list | tuple) and bool(items) and all(isinstance(item, str) for item in items)


def _are_bare_words(texts: Any) -> bool:
    return _are_texts(texts) and len(texts) > 1 and all(text.split() == [text] for text in texts)
