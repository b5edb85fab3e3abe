"""Rows and their predictions, in one form that reports read for every kind of task.

A comparison has `gold` and `predicted` as lists of text: one label, several labels, the tags of all words, the index of
an ending, the gold answers of a question, or a number. `probability` is that of the prediction, `gold_probability` that
of the gold label, `loss` the loss that training would count; `scores` are those of the labels (in the order of the
head's labels), of the endings, of each word's tag, the predicted number, or exact match and F1 of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.choice import ending_index
from bertsmith.tasks.description import Prediction, Task
from bertsmith.tasks.sequences import label_index, multi_hot, number_of
from bertsmith.tasks.spans import answers_of
from bertsmith.tasks.squad_scores import squad1_scores, squad2_scores
from bertsmith.tasks.tagging import gold_entities, predicted_entities, scores_at, tags_of
from bertsmith.tasks.units import cut_at, unit_tags

AROUND = 200  # characters of a context before and after an answer
SMALLEST = 1e-12  # a probability whose logarithm is still a number
Comparison = dict[str, Any]


def compare_label(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """One label."""
    probabilities, gold = list(prediction["scores"].values()), label_index(row, head)
    predicted = [prediction["label"]]
    return _comparison([head.labels[gold]], predicted, probabilities, prediction["score"], probabilities[gold])


def compare_labels(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """Several labels."""
    target, probabilities = multi_hot(row, head), np.array(list(prediction["scores"].values()))
    of_gold = np.maximum(np.where(target > 0, probabilities, 1 - probabilities), SMALLEST)
    gold = [name for name, is_there in zip(head.labels, target, strict=True) if is_there]
    return _comparison(gold, prediction["labels"], probabilities.tolist(), loss=float(-np.log(of_gold).mean()))


def compare_number(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """A number."""
    gold, value = number_of(row, head), prediction["value"]
    return _comparison([repr(gold)], [repr(value)], [value], loss=(value - gold) ** 2)


def compare_choice(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """The index of an ending."""
    probabilities, gold = prediction["scores"], ending_index(row, head)
    predicted = [str(prediction["choice"])]
    return _comparison([str(gold)], predicted, probabilities, prediction["score"], probabilities[gold])


def compare_tags(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """The tags of all words; a text without a list of words is cut at spaces and at the entities' boundaries."""
    if row.parts and len(row.parts) == len(prediction["tags"]):
        return _comparison(tags_of(row), prediction["tags"], prediction["scores"])
    sides = gold_entities(row), predicted_entities(prediction)
    cuts = {place for side in sides for entity in side for place in (entity.start, entity.end)}
    places = cut_at(row.text, cuts)
    gold, predicted = (unit_tags(places, side) for side in sides)
    found = _comparison(gold, predicted, scores_at([begin for begin, _ in places], row.text, prediction))
    return {**found, "parts": [row.text[begin:end] for begin, end in places]}


def compare_answer(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """An answer and the part of its context around it."""
    golds, texts = {"": [text for text, _ in answers_of(row)]}, {"": prediction["text"]}
    if golds[""]:
        scores = squad1_scores(golds, texts, korean=task.letters)
        exact = scores["exact_match"]
    else:
        scores = squad2_scores(golds, texts)
        exact = scores["exact"]
    none = float(1 / (1 + np.exp(-np.clip(prediction["null_odds"], -50, 50)))) if task.no_answer else 0.0
    probability = (1 - none) * prediction["score"] if prediction["text"] else none
    found = _comparison(list(dict.fromkeys(golds[""])), [prediction["text"]], [exact, scores["f1"]], probability)
    return {**found, "pair": _around(row, prediction)}


def _comparison(
    gold: Sequence[str],
    predicted: Sequence[str],
    scores: Sequence[float],
    probability: float | None = None,
    gold_probability: float | None = None,
    loss: float | None = None,
) -> Comparison:
    if gold_probability is not None:
        loss = float(-np.log(max(gold_probability, SMALLEST)))
    probabilities = {"probability": probability, "gold_probability": gold_probability, "loss": loss}
    return {"gold": gold, "predicted": predicted, "scores": scores, **probabilities}


def _around(row: Row, prediction: Prediction) -> str:
    """The part of a context around the gold answer or, where there is none, around the prediction."""
    context = row.pair or ""
    golds = answers_of(row)
    place = context.find(golds[0][0]) if golds else prediction["start"] or 0
    begin, end = context.rfind(" ", 0, max(0, place - AROUND)) + 1, context.find(" ", place + AROUND)
    return f"{'… ' if begin else ''}{context[begin:end] + ' …' if end > 0 else context[begin:]}"
