"""Rows of the values that a program predicts: texts, pairs, lists of words, contexts with endings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.model.config import HeadKind
from bertsmith.rows.columns import Row
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.sequences import are_texts, is_pair
from bertsmith.text.safe import SafeTexts

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".gz", ".xz", ".bz2", ".zst", ".zip")
ENDS = (".", "!", "?", "…")


def rows_of_inputs(inputs: Iterable[Any], kind: HeadKind) -> Iterator[Row]:
    """One row per input; an input that could be meant in two ways is refused, not guessed."""
    if isinstance(inputs, dict | bytes):
        raise UserError(f"texts are given as a {type(inputs).__name__}; give a string, or a list of strings")
    if isinstance(inputs, tuple) and is_pair(inputs):
        raise UserError("a tuple may be one pair or two texts; write [(first, second)] or [first, second]")
    if KINDS[kind].tags_words and _are_single_words(inputs):
        raise UserError(
            "a list of single words may be one sentence or several texts; write [[word, word, …]] for one sentence, or "
            "call predict for each word"
        )
    return _rows(inputs, kind)


def _rows(inputs: Iterable[Any], kind: HeadKind) -> Iterator[Row]:
    safe = SafeTexts()
    for item in inputs:
        yield row_of_input(safe.value(item), kind)
    safe.say()


def row_of_input(item: Any, kind: HeadKind) -> Row:
    """The row of one input, in which all characters are valid."""
    row = KINDS[kind].from_input(item)
    if row is None:
        shown = repr(item) if len(repr(item)) <= 80 else f"{repr(item)[:80]}…"
        raise UserError(f"cannot answer {shown}; each item has to be {KINDS[kind].input_form}")
    return row


def _are_single_words(inputs: Any) -> bool:
    return are_texts(inputs) and len(inputs) > 1 and all(text.split() == [text] for text in inputs)


def looks_like_text(value: str) -> bool:
    """Whether an argument that could be a path is a text: no such file exists, and it does not look like a path."""
    if value == "-" or Path(value[:255]).exists() or Path(value).suffix.lower() in SUFFIXES:
        return False
    return any(sign.isspace() for sign in value.strip()) or value.endswith(ENDS) or not value.isascii()
