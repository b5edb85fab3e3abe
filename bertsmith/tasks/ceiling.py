"""The best scores that a vocabulary allows on questions: a predicted answer begins and ends at a border of tokens.

Where a Korean particle is in one token with the end of an answer, no model finds exactly that answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Task
from bertsmith.tasks.spans import answers_of, find_answer
from bertsmith.tasks.squad_scores import squad1_scores
from bertsmith.text.offsets import Offsets
from bertsmith.text.tokenizer import Tokenizer

LOW = 95.0  # per cent; below it the vocabulary is worth a remark
ROWS = 10_000  # an evenly spread sample of more questions is taken


@dataclass(frozen=True)
class Ceiling:
    """What a model that always chooses the best tokens reaches, in per cent of the questions that have an answer."""

    questions: int
    on_borders: float  # begin and end of an answer are borders of tokens
    exact_match: float
    f1: float

    def __str__(self) -> str:
        return (
            f"{self.on_borders:.1f} % of the answers begin and end at a border of tokens, so exact match can reach "
            f"{self.exact_match:.1f} at most with this vocabulary (F1 {self.f1:.1f})"
        )


def span_ceiling(rows: Sequence[Row], tokenizer: Tokenizer, task: Task) -> Ceiling | None:
    """The ceiling of questions for a vocabulary; None if no question has an answer in its context.

    The best answer is the text of the tokens that a gold answer touches, for the gold answer where that is best.
    """
    golds: dict[str, list[str]] = {}
    best: dict[str, str] = {}
    exact, last, offsets = 0, None, list[tuple[int, int]]()
    for row in rows[:: -(-len(rows) // ROWS) or 1]:
        context, answers = row.pair or "", answers_of(row)
        places = [(text, find_answer(text, start, context)) for text, start in answers]
        if not (found := [(text, place) for text, place in places if place is not None]):
            continue
        if context != last:  # the questions of a context come together
            last, offsets = context, tokenizer.encode_aligned([context])[0].offsets
        covered = [_covered(context, offsets, place, place + len(text)) for text, place in found]
        key = str(len(golds))
        golds[key] = [text for text, _ in answers]
        exact += any(text == cover for (text, _), cover in zip(found, covered, strict=True))
        best[key] = max(covered, key=lambda text: _scores(golds[key], text, task))
    if not golds:
        return None
    scores = squad1_scores(golds, best, korean=task.letters)
    return Ceiling(len(golds), 100 * exact / len(golds), scores["exact_match"], scores["f1"])


def ceiling(rows: Sequence[Row], tokenizer: Tokenizer, head: HeadConfig, task: Task) -> tuple[str, dict[str, float]]:
    """A note on a low ceiling of questions, and its figures; empty if there is nothing to note or no answer."""
    found = span_ceiling(rows, tokenizer, task)
    if found is None:
        return "", {}
    advice = "`tokenizer train --morphemes` makes vocabularies with a higher one for Korean"
    figures = {"on_borders_percent": round(found.on_borders, 2), "ceiling_exact_match": round(found.exact_match, 2)}
    return (f"{found}; {advice}" if found.exact_match < LOW else ""), figures


def _scores(golds: Sequence[str], text: str, task: Task) -> tuple[float, float]:
    found = squad1_scores({"": golds}, {"": text}, korean=task.letters)
    return found["exact_match"], found["f1"]


def _covered(text: str, offsets: Offsets, begin: int, end: int) -> str:
    """The text of the tokens that touch a span of characters."""
    touched = [(a, b) for a, b in offsets if a < end and b > begin]
    return text[touched[0][0] : touched[-1][1]] if touched else ""
