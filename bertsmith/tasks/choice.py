"""Multiple choice, as SWAG (section 4.4): the text is paired with each ending, and each pair gets one score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Encoded, Limits, Prediction, Task
from bertsmith.tasks.examples import join_texts, texts_of
from bertsmith.tasks.metrics import METRICS
from bertsmith.tasks.sequences import are_texts, softmax
from bertsmith.text.tokenizer import Tokenizer


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """A head for as many endings as the rows have."""
    head = HeadConfig("choice", num_choices=len(rows[0].parts))
    for row in rows:
        ending_index(row, head)
    return head


def check_row(row: Row) -> None:
    """Refuse a row without endings, or whose label is not one of them."""
    ending_index(row, HeadConfig("choice"))


def ending_index(row: Row, head: HeadConfig) -> int:
    """The index of a row's right ending, from 0; a row with another number of endings than the head is refused."""
    _check_endings(row, head)
    text = str(row.label).strip()
    if text.isdecimal() and int(text) < len(row.parts):  # before the texts: an ending of "1 + 2 is" may be the text "2"
        return int(text)
    endings = [part.strip() for part in row.parts]
    if text in endings:
        return endings.index(text)
    number = ord(text.upper()) - ord("A") if len(text) == 1 and text.isascii() and text.isalpha() else -1
    if not 0 <= number < len(row.parts):
        raise UserError(
            f"{row.place}: label {row.label!r} is none of the {len(row.parts)} endings; "
            f"write a number from 0 to {len(row.parts) - 1}, a letter, or the ending itself"
        )
    return number


def _check_endings(row: Row, head: HeadConfig) -> None:
    if len(row.parts) < 2:
        raise UserError(f"{row.place or repr(row.text)}: no endings to choose from; see data.columns.endings")
    if head.num_choices and len(row.parts) != head.num_choices:
        raise UserError(f"{row.place}: {len(row.parts)} endings, where the others have {head.num_choices}")


def encode(rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, *, labelled: bool) -> Encoded:
    """One example for each ending of a row; the first example of a row has its label."""
    for row in rows:
        _check_endings(row, head)
    labels = np.asarray([ending_index(row, head) for row in rows]) if labelled else None
    counts = np.array([len(row.parts) for row in rows])
    first = texts_of([row.text for row in rows], tokenizer)
    second = texts_of([f"{row.pair} {e}" if row.pair else e for row in rows for e in row.parts], tokenizer)
    owners = np.repeat(np.arange(len(rows)), counts)
    pairs = np.ones(len(owners), dtype=bool)
    examples, cut = join_texts(first.at(owners), second, pairs, tokenizer, limits.max_length)
    shortened = len(set(owners[cut].tolist()))
    return Encoded(replace(examples, labels=labels, step=int(counts[0])), owners, shortened=shortened)


def decode(
    rows: Sequence[Row], encoded: Encoded, logits: Sequence[NDArray[np.float32]], head: HeadConfig, limits: Limits
) -> list[Prediction]:
    """The likeliest ending of each row."""
    predictions = []
    for number, row in enumerate(rows):
        scores = softmax(np.array([logits[i][0] for i in encoded.parts_of(number)]))
        best = int(scores.argmax())
        predictions.append(
            {"choice": best, "text": row.parts[best], "score": float(scores[best]), "scores": scores.tolist()}
        )
    return predictions


def score(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """The share of rows whose ending is right."""
    gold = [ending_index(row, head) for row in rows]
    return {name: METRICS[name](gold, [p["choice"] for p in predictions]) for name in task.metrics}


def gold_choice(row: Row, head: HeadConfig) -> Prediction:
    """The prediction that agrees with a row's label."""
    return {"choice": ending_index(row, head)}


def from_input(item: Any) -> Row | None:
    """A row of a text and its endings."""
    is_choice = isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str) and are_texts(item[1])
    return Row(item[0], None, None, "", parts=tuple(item[1])) if is_choice else None
