"""A line on the labels of a run's rows: how many rows have each, the range of numbers, the entities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.rows.entities import entities_of
from bertsmith.tasks.sequences import label_counts, labels_counts, number_of
from bertsmith.tasks.spans import answers_of
from bertsmith.tasks.tagging import entity_words, has_spans, tags_of

SHOWN = 12  # labels in a line; of the others, the number


def label_line(rows: Sequence[Row], head: HeadConfig) -> str:
    """How many rows have each label."""
    return f"labels: {_counted(dict(zip(head.labels, label_counts(rows, head).tolist(), strict=True)))}"


def labels_line(rows: Sequence[Row], head: HeadConfig) -> str:
    """How many rows have each label, where a row may have several."""
    counts = labels_counts(rows, head).astype(int).tolist()
    return f"labels, several a row: {_counted(dict(zip(head.labels, counts, strict=True)))}"


def number_line(rows: Sequence[Row], head: HeadConfig) -> str:
    """The range and the mean of the numbers."""
    numbers = np.array([number_of(row, head) for row in rows])
    low, high, mean = (f"{value:,.6g}" for value in (numbers.min(), numbers.max(), numbers.mean()))
    return f"numbers from {low} to {high}, on average {mean}"


def tag_line(rows: Sequence[Row], head: HeadConfig) -> str:
    """How many entities of each type there are or, where tags mark none, how many words with each tag."""
    entities: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for row in rows:
        if has_spans(row):
            entities.update(entity.label for entity in entities_of(row))
        else:
            found = tags_of(row)
            tags.update(found)
            entities.update(kind for kind, _ in entity_words(found))
    return f"entities: {_counted(entities)}" if entities else f"tags of words: {_counted(tags)}"


def choice_line(rows: Sequence[Row], head: HeadConfig) -> str:
    """How many endings a row has."""
    return f"each with {len(rows[0].parts)} endings"


def answer_line(rows: Sequence[Row], head: HeadConfig) -> str:
    """How many questions have an answer."""
    answered = sum(bool(answers_of(row)) for row in rows)
    none = len(rows) - answered
    return f"questions: with an answer ({answered:,})" + (f", without one ({none:,})" if none else "")


def _counted(counts: Mapping[str, int]) -> str:
    """Names with their counts; of many, the most frequent ones."""
    few = len(counts) <= SHOWN
    shown = sorted(counts.items(), key=lambda item: -item[1])
    parts = [f"{name} ({count:,})" for name, count in (counts.items() if few else shown[:SHOWN])]
    rest = [] if few else [f"and {len(counts) - SHOWN:,} more with at most {shown[SHOWN][1]:,}"]
    return ", ".join([*parts, *rest])
