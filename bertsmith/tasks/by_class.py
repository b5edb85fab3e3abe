"""Precision, recall and F1 of every label, tag or type of entity, from 0 to 100, with its number of gold rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Prediction
from bertsmith.tasks.sequences import label_index, labels_of
from bertsmith.tasks.tagging import bio_labels, entity_words, predicted_tags, tags_of

ClassScores = dict[str, dict[str, float | None]]
Item = tuple[Any, str]  # the place of a label, tag or entity, and its class


def label_scores(head: HeadConfig, rows: Sequence[Row], predictions: Sequence[Prediction]) -> ClassScores:
    """The scores of each label, where a row has one."""
    gold = enumerate(head.labels[label_index(row, head)] for row in rows)
    return _scores(head.labels, gold, enumerate(p["label"] for p in predictions))


def labels_scores(head: HeadConfig, rows: Sequence[Row], predictions: Sequence[Prediction]) -> ClassScores:
    """The scores of each label, where a row may have several."""
    gold = ((number, name) for number, row in enumerate(rows) for name in labels_of(row))
    return _scores(head.labels, gold, ((number, name) for number, p in enumerate(predictions) for name in p["labels"]))


def tag_scores(head: HeadConfig, rows: Sequence[Row], predictions: Sequence[Prediction]) -> ClassScores:
    """The scores of each type of entity or, where tags mark no entities, of each tag."""
    gold = [tags_of(row) for row in rows]
    predicted = [predicted_tags(row, prediction) for row, prediction in zip(rows, predictions, strict=True)]
    types = sorted({label[2:] for label in bio_labels(head) if label[:2] in ("B-", "I-")})
    if types:
        return _scores(types, _entities(gold), _entities(predicted))
    return _scores(bio_labels(head), _words(gold), _words(predicted))


def _words(sentences: Iterable[Sequence[str]]) -> Iterator[Item]:
    for number, tags in enumerate(sentences):
        yield from (((number, place), tag) for place, tag in enumerate(tags))


def _entities(sentences: Iterable[Sequence[str]]) -> Iterator[Item]:
    """Whole entities, by their sentence and the places of their words."""
    for number, tags in enumerate(sentences):
        yield from (((number, *words), kind) for kind, words in entity_words(tags))


def _scores(classes: Iterable[str], gold: Iterable[Item], predicted: Iterable[Item]) -> ClassScores:
    gold, predicted = set(gold), set(predicted)
    right, of_gold, of_predicted = (Counter(name for _, name in s) for s in (gold & predicted, gold, predicted))
    return {name: _figures(right[name], of_gold[name], of_predicted[name]) for name in classes}


def _figures(right: int, gold: int, predicted: int) -> dict[str, float | None]:
    """The scores of a class; None if no gold row has it."""
    if not gold:
        return {"precision": None, "recall": None, "f1": None, "rows": 0}
    precision = 100.0 * right / predicted if predicted else 0.0
    return {
        "precision": precision,
        "recall": 100.0 * right / gold,
        "f1": 200.0 * right / (gold + predicted),
        "rows": gold,
    }
