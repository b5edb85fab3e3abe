"""Tasks on whole texts and pairs: one label, several, or a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Encoded, Limits, Prediction, Task
from bertsmith.tasks.documents import in_windows, pooled
from bertsmith.tasks.examples import join_texts, texts_of
from bertsmith.tasks.metrics import METRICS, accuracy, micro_f1
from bertsmith.text.tokenizer import Tokenizer

DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
LARGEST = 1e15  # number to learn: its square has to fit into float32, which ends at 1e38


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """The head for the labels of the training rows: one label per row or, where labels are lists, several."""
    if task.labels:
        return HeadConfig(task.head, task.labels)
    several = _type_of_labels(rows) == "list"
    distinct = {name for row in rows for name in (labels_of(row) if several else [label_of(row)])}
    labels = sorted(distinct, key=lambda x: (not _is_int(x), int(x) if _is_int(x) else 0, x))
    if several and not labels:
        raise UserError("no row has a label: there is nothing to learn")
    if not several and len(labels) < 2:
        raise UserError(f"all rows have the label {labels[0]!r}: there is nothing to tell apart")
    fraction = next((row for row in rows if isinstance(row.label, float) and not row.label.is_integer()), None)
    if fraction is not None and len(labels) > len(rows) / 2:
        raise UserError(f"{fraction.place}: label {fraction.label!r} is a number out of many; use the task regress")
    return HeadConfig("multi" if several else task.head, tuple(labels))


def regression_head(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """A head for one number."""
    return HeadConfig("regression")


def _type_of_labels(rows: Sequence[Row]) -> str:
    """The type of the labels; two types in one file are refused, because training would hide the mistake."""
    types: dict[str, Row] = {}
    for row in rows:
        value = row.label
        name = "list" if isinstance(value, (list, tuple)) else type(value).__name__
        types.setdefault("float" if name == "int" else name, row)
    if len(types) > 1:
        one, other = list(types.values())[:2]
        raise UserError(
            f"{other.place}: the label {other.label!r} is of another type than {one.label!r} ({one.place}); "
            "write all labels alike"
        )
    return next(iter(types))


def label_of(row: Row) -> str:
    """The one label of a row, as text; 1.0 is 1."""
    if isinstance(row.label, (list, tuple, dict, bytes)):
        raise UserError(f"{row.place}: the label {row.label!r} is not one value{_fields(row.label)}")
    if row.label is None or row.label != row.label:
        raise UserError(f"{row.place}: {row.label} is not a label")
    is_whole = isinstance(row.label, float) and row.label.is_integer()
    return str(int(row.label)) if is_whole else str(row.label).strip()


def _fields(label: Any) -> str:
    """How to name a field of a label that is an object."""
    names = list(label) if isinstance(label, dict) else []
    return f"; name one of its fields, as in --label COLUMN.{names[0]}" if names else ""


def labels_of(row: Row) -> list[str]:
    """The labels of a row that may have several."""
    if not isinstance(row.label, (list, tuple)):
        raise UserError(f"{row.place}: the label {row.label!r} is not a list, and the model gives several labels a row")
    return [label_of(replace(row, label=value)) for value in row.label]


def check_labels(row: Row) -> None:
    """Refuse a row whose label cannot be learnt, before the labels of all rows are known."""
    labels_of(row) if isinstance(row.label, (list, tuple)) else label_of(row)


def check_number(row: Row) -> None:
    """Refuse a row whose label is not a number."""
    number_of(row, HeadConfig("regression"))


def finish_rows(rows: Iterable[Row], task: Task, *, labelled: bool) -> Iterable[Row]:
    """Rows with the label names of their task."""
    return (replace(row, label=label_name(row, task)) for row in rows) if labelled and task.labels else rows


def label_name(row: Row, task: Task) -> str:
    """A row's label by its name in the task; data sets on the hub have the number of the label instead."""
    text = label_of(row)
    if text not in task.labels and text.isdecimal() and int(text) < len(task.labels):
        return task.labels[int(text)]
    if text not in task.labels:
        raise UserError(f"{row.place}: label {text!r} is not one of {task.name}'s: {', '.join(task.labels)}")
    return text


def encode(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    limits: Limits,
    head: HeadConfig,
    *,
    labelled: bool,
    target: Callable[[Row, HeadConfig], Any],
) -> Encoded:
    """One example per row: one text or a pair of texts, with `target` as its label; in both orders, two examples.

    With `limits.windows` a row is as many examples as its text needs windows.
    """
    labels = np.asarray([target(row, head) for row in rows]) if labelled else None
    owners = np.arange(len(rows))
    if head.both_orders:
        owners = np.repeat(np.arange(len(rows)), 2)
        rows = [each for row in rows for each in (row, _swapped(row))]
    first, second = (texts_of(texts, tokenizer) for texts in ([r.text for r in rows], [r.pair or "" for r in rows]))
    has_second = np.array([row.pair is not None for row in rows], dtype=bool)
    if limits.windows:
        encoded = in_windows(first, second, has_second, tokenizer, limits)
        return replace(encoded, examples=replace(encoded.examples, labels=labels))
    examples, shortened = join_texts(first, second, has_second, tokenizer, limits.max_length)
    examples = replace(examples, labels=labels, step=head.sequences)
    return Encoded(examples, owners, shortened=int(shortened[:: head.sequences].sum()))


def _swapped(row: Row) -> Row:
    """A pair in the other order."""
    if row.pair is None:
        raise UserError(
            f"{row.place or repr(row.text)}: both_orders is for pairs of texts, and there is no second text"
        )
    return replace(row, text=row.pair, pair=row.text)


def label_index(row: Row, head: HeadConfig) -> int:
    """The index of a row's label among the head's labels."""
    return head.label_index(label_of(row), f"{row.place}: ")


def multi_hot(row: Row, head: HeadConfig) -> NDArray[np.float32]:
    """1 for each of a row's labels, 0 for the head's other labels (K,)."""
    chosen = np.zeros(len(head.labels), dtype=np.float32)
    for name in labels_of(row):
        chosen[head.label_index(name, f"{row.place}: ")] = 1
    return chosen


def number_of(row: Row, head: HeadConfig) -> float:
    """A row's label as a number that can be learnt."""
    try:
        value = float(row.label)
    except (TypeError, ValueError):
        comma = "; write the decimal point as a point" if DECIMAL_COMMA.fullmatch(str(row.label).strip()) else ""
        raise UserError(f"{row.place}: label {row.label!r} is not a number{comma}{_fields(row.label)}") from None
    except OverflowError:
        value = np.inf
    if not np.isfinite(value):
        raise UserError(f"{row.place}: label {str(row.label)[:60]!r} is not a finite number")
    if abs(value) > LARGEST:
        raise UserError(f"{row.place}: label {row.label!r} is too large to learn; scale the numbers down")
    return value


def decode(
    rows: Sequence[Row],
    encoded: Encoded,
    logits: Sequence[NDArray[np.float32]],
    head: HeadConfig,
    limits: Limits,
    *,
    predict: Callable[[NDArray[np.float32], HeadConfig], Prediction],
) -> list[Prediction]:
    """One prediction per row."""
    return [predict(scores, head) for scores in of_rows(logits, encoded, head, limits)]


def of_rows(
    logits: Sequence[NDArray[np.float32]], encoded: Encoded, head: HeadConfig, limits: Limits
) -> Sequence[NDArray[np.float32]]:
    """The logits of rows: those of windows are pooled, those of the two orders of a pair added (OpenAI GPT, 3.3)."""
    if encoded.examples.rows is not None:
        return pooled(logits, encoded, limits)
    return [a + b for a, b in zip(logits[::2], logits[1::2], strict=True)] if head.both_orders else logits


def predict_label(logits: NDArray[np.float32], head: HeadConfig) -> Prediction:
    """The likeliest label, and the probability of every label."""
    scores = softmax(logits)
    best = int(scores.argmax())
    by_label = dict(zip(head.labels, map(float, scores), strict=True))
    return {"label": head.labels[best], "score": float(scores[best]), "scores": by_label}


def predict_labels(logits: NDArray[np.float32], head: HeadConfig) -> Prediction:
    """All labels with a probability of at least 0.5, and the probability of every label."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    chosen = [name for name, s in zip(head.labels, scores, strict=True) if s >= 0.5]
    return {"labels": chosen, "scores": dict(zip(head.labels, map(float, scores), strict=True))}


def predict_number(logits: NDArray[np.float32], head: HeadConfig) -> Prediction:
    """The number that the head predicts."""
    return {"value": float(logits[0])}


def gold_label(row: Row, head: HeadConfig) -> Prediction:
    """The prediction that agrees with a row's label."""
    return {"label": head.labels[label_index(row, head)]}


def gold_labels(row: Row, head: HeadConfig) -> Prediction:
    """The prediction that agrees with a row's labels."""
    return {"labels": [name for name, is_there in zip(head.labels, multi_hot(row, head), strict=True) if is_there]}


def gold_number(row: Row, head: HeadConfig) -> Prediction:
    """The prediction that agrees with a row's number."""
    return {"value": number_of(row, head)}


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logits as probabilities."""
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return shifted / shifted.sum()


def score_label(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """The task's metrics of one label per row."""
    gold = [head.labels[label_index(row, head)] for row in rows]
    return {name: METRICS[name](gold, [p["label"] for p in predictions]) for name in task.metrics}


def score_labels(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """Accuracy (all labels of a row are right) and micro F1 of several labels per row."""
    gold = [sorted(labels_of(row)) for row in rows]
    predicted: list[Any] = [sorted(p["labels"]) for p in predictions]
    return {"accuracy": accuracy(gold, predicted), "micro_f1": micro_f1(gold, predicted)}


def score_number(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """The task's metrics of one number per row."""
    gold = [number_of(row, head) for row in rows]
    return {name: METRICS[name](gold, [p["value"] for p in predictions]) for name in task.metrics}


def label_counts(rows: Sequence[Row], head: HeadConfig) -> NDArray[Any]:
    """How many rows have each label (K,)."""
    return np.bincount([label_index(row, head) for row in rows], minlength=len(head.labels))


def labels_counts(rows: Sequence[Row], head: HeadConfig) -> NDArray[Any]:
    """How many rows have each label, where a row may have several (K,)."""
    return np.array([multi_hot(row, head) for row in rows]).sum(0)


def from_input(item: Any) -> Row | None:
    """A row of a text or of a pair of texts."""
    if isinstance(item, str):
        return Row(item, None, None, "")
    return Row(item[0], item[1], None, "") if is_pair(item) else None


def is_pair(item: Any) -> bool:
    """Whether a value is a list or tuple of two texts."""
    return are_texts(item) and len(item) == 2


def are_texts(items: Any) -> bool:
    """Whether a value is a non-empty list or tuple of texts."""
    return isinstance(items, list | tuple) and bool(items) and all(isinstance(item, str) for item in items)


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
