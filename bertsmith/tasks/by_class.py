"""Precision, recall and F1 of every class, label or type of entity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.rows.conll import to_bio
from bertsmith.tasks.sequences import labels_of, target
from bertsmith.tasks.tagging import bio_labels, entity_words, tags_of

ClassScores = dict[str, dict[str, float | None]]
Item = tuple[Any, str]  # where something is, and its class


def by_class(head: HeadConfig, rows: Sequence[Row], answers: Sequence[Mapping[str, Any]]) -> ClassScores:
    """Scores of each class from 0 to 100, and its number of gold rows (words, entities); empty without classes."""
    if head.kind in ("single", "multi"):
        return _scores(head.labels, _gold_labels(head, rows), _labels(answers))
    if head.kind != "tags":
        return {}
    gold, predicted = [tags_of(row) for row in rows], [to_bio(answer["tags"]) for answer in answers]
    types = sorted({label[2:] for label in bio_labels(head) if label[:2] in ("B-", "I-")})
    if types:
        return _scores(types, _entities(gold), _entities(predicted))
    return _scores(bio_labels(head), _words(gold), _words(predicted))


def _gold_labels(head: HeadConfig, rows: Iterable[Row]) -> Iterator[Item]:
    for number, row in enumerate(rows):
        names = labels_of(row) if head.kind == "multi" else [head.labels[target(row, head)]]
        yield from ((number, name) for name in names)


def _labels(answers: Iterable[Mapping[str, Any]]) -> Iterator[Item]:
    for number, answer in enumerate(answers):
        yield from ((number, name) for name in answer.get("labels", [answer.get("label")]))


def _words(sentences: Iterable[Sequence[str]]) -> Iterator[Item]:
    for number, tags in enumerate(sentences):
        yield from (((number, place), tag) for place, tag in enumerate(tags))


def _entities(sentences: Iterable[Sequence[str]]) -> Iterator[Item]:
    """Whole entities, by their sentence and the places of their words."""
    for number, tags in enumerate(sentences):
        yield from (((number, *words), kind) for kind, words in entity_words(tags))


def _scores(classes: Iterable[str], gold: Iterable[Item], predicted: Iterable[Item]) -> ClassScores:
    there, said = set(gold), set(predicted)
    right = Counter(name for _, name in there & said)
    wanted, found = Counter(name for _, name in there), Counter(name for _, name in said)
    return {name: _figures(right[name], wanted[name], found[name]) for name in classes}


def _figures(right: int, gold: int, predicted: int) -> dict[str, float | None]:
    """Of a class without a gold row nothing can be said."""
    if not gold:
        return {"precision": None, "recall": None, "f1": None, "rows": 0}
    precision = 100.0 * right / predicted if predicted else 0.0
    return {
        "precision": precision,
        "recall": 100.0 * right / gold,
        "f1": 200.0 * right / (gold + predicted),
        "rows": gold,
    }
