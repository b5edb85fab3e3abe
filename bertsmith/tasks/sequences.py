"""Tasks on whole texts and pairs: one label, several, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Encoded, Limits, Task
from bertsmith.tasks.examples import join_texts, texts_of
from bertsmith.tasks.metrics import METRICS, accuracy, micro_f1
from bertsmith.text.tokenizer import Tokenizer

LARGEST = 1e15  # of a number to learn: the squares of single precision end at 1e38


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """The head that a task's training rows ask for."""
    if task.head == "regression":
        return HeadConfig("regression")
    if task.labels:
        return HeadConfig(task.head, task.labels)
    several = _same_type(rows) == "list"
    found = {name for row in rows for name in (labels_of(row) if several else [label_of(row)])}
    labels = sorted(found, key=lambda x: (not _is_int(x), int(x) if _is_int(x) else 0, x))
    if several and not labels:
        raise UserError("no row has a label: there is nothing to learn")
    if not several and len(labels) < 2:
        raise UserError(f"all rows have the label {labels[0]!r}: there is nothing to tell apart")
    fraction = next((row for row in rows if isinstance(row.label, float) and not row.label.is_integer()), None)
    if fraction is not None and len(labels) > len(rows) / 2:
        raise UserError(f"{fraction.place}: label {fraction.label!r} is a number out of many; use the task regress")
    return HeadConfig("multi" if several else task.head, tuple(labels))


def _same_type(rows: Sequence[Row]) -> str:
    """What the labels are; two kinds of them in one file is a mistake that training would hide."""
    kinds: dict[str, Row] = {}
    for row in rows:
        value = row.label
        kind = "list" if isinstance(value, (list, tuple)) else type(value).__name__
        kinds.setdefault("float" if kind == "int" else kind, row)
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise UserError(
            f"{other.place}: the label {other.label!r} is of another type than {one.label!r} ({one.place}); "
            "write all labels alike"
        )
    return next(iter(kinds))


def label_of(row: Row) -> str:
    """The one label of a row, as text; 1.0 is 1."""
    if isinstance(row.label, (list, tuple, dict, bytes)):
        raise UserError(f"{row.place}: the label {row.label!r} is not one value")
    if row.label is None or row.label != row.label:
        raise UserError(f"{row.place}: {row.label} is not a label")
    is_whole = isinstance(row.label, float) and row.label.is_integer()
    return str(int(row.label)) if is_whole else str(row.label).strip()


def labels_of(row: Row) -> list[str]:
    """The labels of a row that may have several."""
    if not isinstance(row.label, (list, tuple)):
        raise UserError(f"{row.place}: the label {row.label!r} is not a list, and the model gives several labels a row")
    return [label_of(replace(row, label=value)) for value in row.label]


def named(row: Row, task: Task) -> Any:
    """A row's label as the task names it: data sets of the hub have numbers."""
    text = label_of(row)
    if text not in task.labels and text.isdecimal() and int(text) < len(task.labels):
        return task.labels[int(text)]
    if text not in task.labels:
        raise UserError(f"{row.place}: label {text!r} is not one of {task.name}'s: {', '.join(task.labels)}")
    return text


def encode(rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, *, labelled: bool) -> Encoded:
    """One example a row, `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`."""
    labels = np.asarray([target(row, head) for row in rows]) if labelled else None
    first, second = (texts_of(texts, tokenizer) for texts in ([r.text for r in rows], [r.pair or "" for r in rows]))
    has_second = np.array([row.pair is not None for row in rows])
    examples, shortened = join_texts(first, second, has_second, tokenizer, limits.max_length)
    return Encoded(replace(examples, labels=labels), range(len(rows)), shortened=int(shortened.sum()))


def target(row: Row, head: HeadConfig) -> Any:
    """What the model has to learn of a row."""
    if head.kind == "regression":
        try:
            value = float(row.label)
        except (TypeError, ValueError):
            raise UserError(f"{row.place}: label {row.label!r} is not a number") from None
        except OverflowError:
            value = np.inf
        if not np.isfinite(value):
            raise UserError(f"{row.place}: label {str(row.label)[:60]!r} is not a finite number")
        if abs(value) > LARGEST:
            raise UserError(f"{row.place}: label {row.label!r} is too large to learn; scale the numbers down")
        return value
    if head.kind == "multi":
        chosen = np.zeros(len(head.labels), dtype=np.float32)
        for name in labels_of(row):
            chosen[head.label_index(name, f"{row.place}: ")] = 1
        return chosen
    return head.label_index(label_of(row), f"{row.place}: ")


def decode(
    rows: Sequence[Row], encoded: Encoded, logits: Sequence[NDArray[np.float32]], head: HeadConfig, limits: Limits
) -> list[dict[str, Any]]:
    """An answer a row."""
    return [answer(scores, head) for scores in logits]


def answer(logits: NDArray[np.float32], head: HeadConfig) -> dict[str, Any]:
    """Scores as an answer in plain Python values."""
    if head.kind == "regression":
        return {"value": float(logits[0])}
    if head.kind == "multi":
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
        chosen = [name for name, s in zip(head.labels, scores, strict=True) if s >= 0.5]
        return {"labels": chosen, "scores": dict(zip(head.labels, map(float, scores), strict=True))}
    scores = softmax(logits)
    best = int(scores.argmax())
    by_label = dict(zip(head.labels, map(float, scores), strict=True))
    return {"label": head.labels[best], "score": float(scores[best]), "scores": by_label}


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores as probabilities."""
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return shifted / shifted.sum()


def score(
    task: Task, rows: Sequence[Row], answers: Sequence[dict[str, Any]], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """The task's metrics."""
    if head.kind == "regression":
        gold: list[Any] = [target(row, head) for row in rows]
        return {name: METRICS[name](gold, [a["value"] for a in answers]) for name in task.metrics}
    if head.kind == "multi":
        gold = [sorted(labels_of(row)) for row in rows]
        several: list[Any] = [sorted(a["labels"]) for a in answers]
        return {"accuracy": accuracy(gold, several), "micro_f1": micro_f1(gold, several)}
    gold = [head.labels[target(row, head)] for row in rows]
    return {name: METRICS[name](gold, [a["label"] for a in answers]) for name in task.metrics}


def class_weights(rows: Sequence[Row], head: HeadConfig, given: dict[str, float], balanced: bool) -> list[float] | None:
    """How much each class counts: as given, or so that all count alike; the mean over the rows is 1."""
    if not given and not balanced:
        return None
    if head.kind not in ("single", "multi"):
        raise UserError("class weights are for labels: data.class_weights and data.balanced do not fit this task")
    weights = np.ones(len(head.labels))
    chosen = np.array([target(row, head) for row in rows])
    counts = chosen.sum(0) if head.kind == "multi" else np.bincount(chosen, minlength=len(head.labels))
    if balanced:
        weights = 1 / np.maximum(counts, 1)
    for name, weight in given.items():
        if weight < 0 or not np.isfinite(weight):
            raise UserError(f"data.class_weights: the weight of {name!r} must be a number of at least 0, not {weight}")
        weights[head.label_index(name, "data.class_weights: ")] = weight
    mean = (weights * counts).sum() / max(1.0, counts.sum())
    if mean == 0:
        raise UserError("data.class_weights: all classes of the training rows have the weight 0; nothing can be learnt")
    return (weights / mean).tolist() if balanced else weights.tolist()


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
