"""The constant baseline: the loss of the best prediction that ignores the text; whether a model predicts one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks import tagging
from bertsmith.tasks.description import Prediction
from bertsmith.tasks.sequences import label_counts, label_index, labels_counts, multi_hot, number_of

NARROW = 0.05  # of the gold numbers' standard deviation: predictions that vary less are constant
Weights = Sequence[float] | None


def label_loss(rows: Sequence[Row], head: HeadConfig, weights: Weights) -> float:
    """The weighted entropy of the labels."""
    weighted = _weights(head, weights) * label_counts(rows, head)
    return _entropy(weighted) * float(weighted.sum()) / len(rows)


def labels_loss(rows: Sequence[Row], head: HeadConfig, weights: Weights) -> float:
    """The mean of the weighted binary entropies of all labels."""
    shares = labels_counts(rows, head).astype(np.float64) / len(rows)
    losses = [_entropy(np.array([share, 1 - share])) for share in shares]
    return float((_weights(head, weights) * losses).mean())


def number_loss(rows: Sequence[Row], head: HeadConfig, weights: Weights) -> float:
    """The variance of the numbers."""
    return float(np.var([number_of(row, head) for row in rows]))


def choice_loss(rows: Sequence[Row], head: HeadConfig, weights: Weights) -> float | None:
    """The loss if all endings have the same probability; None if their number differs between rows."""
    return math.log(head.num_choices) if head.num_choices else None


def tag_loss(rows: Sequence[Row], head: HeadConfig, weights: Weights) -> float:
    """The entropy of the tags."""
    return _entropy(np.bincount([i for row in rows for i in tagging.tag_indices(row, head)]))


def _weights(head: HeadConfig, weights: Weights) -> NDArray[Any]:
    return np.ones(len(head.labels)) if weights is None else np.asarray(weights)


def _entropy(counts: NDArray[Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def constant_label(rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig) -> str:
    """A description of the label that all rows get although their labels differ; empty if predictions differ."""
    gold = {label_index(row, head) for row in rows}
    return _constant("every dev row gets the label", {p["label"] for p in predictions}, gold)


def constant_labels(rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig) -> str:
    """A description of the labels that all rows get although theirs differ; empty if predictions differ."""
    gold = {tuple(multi_hot(row, head)) for row in rows}
    return _constant("every dev row gets the label", {", ".join(p["labels"]) or "none" for p in predictions}, gold)


def constant_number(rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig) -> str:
    """A description of the number that all rows get although their labels differ; empty if predictions differ."""
    gold, predicted = np.std([number_of(row, head) for row in rows]), np.array([p["value"] for p in predictions])
    return f"every dev row gets a number near {predicted.mean():.3g}" if predicted.std() < NARROW * gold else ""


def constant_tag(rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig) -> str:
    """A description of the tag that all words get although their tags differ; empty if predictions differ."""
    gold = {tag for row in rows for tag in tagging.tags_of(row)}
    return _constant("every word of the dev rows gets the tag", {t for p in predictions for t in p["tags"]}, gold)


def _constant(what: str, predicted: Collection[str], gold: Collection[Any]) -> str:
    return f"{what} {min(predicted)!r}" if len(predicted) == 1 < len(gold) else ""
