"""A task: how rows become examples, which head learns them, and what is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.batch import Example
from bertsmith.errors import UserError, suggestion
from bertsmith.model.heads import HeadConfig, HeadKind
from bertsmith.tasks.metrics import METRICS
from bertsmith.tasks.rows import Columns, Row
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Task:
    """A description of a labelled data set."""

    name: str
    head: HeadKind
    columns: Columns
    metrics: tuple[str, ...]


TASKS = {
    task.name: task
    for task in (
        Task("classify", "single", Columns(), ("accuracy", "macro_f1")),
        Task("regress", "regression", Columns(), ("pearson", "spearman")),
    )
}


def find_task(name: str) -> Task:
    """A task by its name."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}{suggestion(name, TASKS) or '; one of: ' + ', '.join(TASKS)}")
    return TASKS[name]


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """The head that a task's training rows ask for."""
    if task.head == "regression":
        return HeadConfig("regression")
    labels = sorted({str(row.label) for row in rows}, key=lambda x: (not _is_int(x), int(x) if _is_int(x) else 0, x))
    if len(labels) < 2:
        raise UserError(f"all rows have the label {labels[0]!r}: there is nothing to tell apart")
    return HeadConfig(task.head, tuple(labels))


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, max_length: int, head: HeadConfig, *, labelled: bool
) -> tuple[list[Example], int]:
    """Examples of rows, `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, and how many had to be shortened."""
    firsts = tokenizer.encode([row.text for row in rows])
    seconds = tokenizer.encode([row.pair for row in rows if row.pair is not None])
    following = iter(seconds)
    cls_id, sep_id = tokenizer.id("[CLS]"), tokenizer.id("[SEP]")
    examples, shortened = [], 0
    for row, first in zip(rows, firsts, strict=True):
        second = next(following) if row.pair is not None else None
        kept_first, kept_second = shorten(first, second, max_length - (2 if second is None else 3))
        shortened += len(kept_first) < len(first) or (second is not None and len(kept_second or []) < len(second))
        tokens = [cls_id, *kept_first, sep_id]
        segments = [0] * len(tokens)
        if kept_second is not None:
            tokens += [*kept_second, sep_id]
            segments += [1] * (len(kept_second) + 1)
        label = target(row, head) if labelled else None
        examples.append(Example(np.array(tokens), np.array(segments), label))
    return examples, shortened


def shorten(first: list[int], second: list[int] | None, room: int) -> tuple[list[int], list[int] | None]:
    """Cut the end of a text, or of the longer one of a pair, until both fit."""
    if second is None:
        return first[:room], None
    kept = second[: max(room - len(first), room // 2)]
    return first[: room - len(kept)], kept


def target(row: Row, head: HeadConfig) -> Any:
    """What the model has to learn of a row."""
    if head.kind == "regression":
        try:
            value = float(row.label)
        except (TypeError, ValueError):
            raise UserError(f"{row.place}: label {row.label!r} is not a number") from None
        if not np.isfinite(value):
            raise UserError(f"{row.place}: label {row.label!r} is not a finite number")
        return value
    return head.label_index(str(row.label), f"{row.place}: ")


def score(task: Task, gold: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]:
    """The task's metrics."""
    return {name: METRICS[name](gold, predicted) for name in task.metrics}


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
