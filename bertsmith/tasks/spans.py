"""Extractive question answering (sections 4.2 and 4.3): windows with a stride, character offsets, n-best lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.batch import Example, Label
from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Encoded, Limits, Prediction, Task
from bertsmith.tasks.examples import TARGET, Examples
from bertsmith.tasks.sequences import is_pair, softmax
from bertsmith.tasks.squad_scores import best_threshold, klue_question, klue_scores, squad1_scores, squad2_scores
from bertsmith.text.frame import Frame
from bertsmith.text.tokenizer import Tokenizer

NOTHING: dict[str, Any] = {"text": "", "start": None, "end": None}
CERTAIN = 1e6  # the odds of no answer where the context has no tokens


@dataclass(frozen=True)
class Window:
    """A window of a context, which begins at token `shift` of its example.

    `offsets` are the character offsets of its tokens; `best` marks the tokens that have more context here than in
    other windows.
    """

    shift: int
    offsets: NDArray[Any]  # (n, 2)
    best: NDArray[np.bool_]  # (n,)


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """A head for the start and the end of an answer."""
    return HeadConfig("span")


def answers_of(row: Row) -> list[tuple[str, int | None]]:
    """The gold answers of a question with their places, in the hub's form, SQuAD's, or as a text; [] is no answer."""
    value = row.label
    if isinstance(value, str):
        value = [{"text": value}] if value else []
    if isinstance(value, dict) and isinstance(value.get("text"), (list, tuple)):
        starts = value.get("answer_start")
        starts = [None] * len(value["text"]) if starts is None else starts
        if len(starts) != len(value["text"]):
            raise UserError(f"{row.place}: {len(value['text'])} answers and {len(starts)} places")
        value = [{"text": text, "answer_start": start} for text, start in zip(value["text"], starts, strict=True)]
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{row.place}: the answers are {row.label!r}, not a list of text and answer_start")
    return [
        _answer(answer, row) for answer in value if (answer.get("text") if isinstance(answer, dict) else answer) != ""
    ]


def _answer(answer: Any, row: Row) -> tuple[str, int | None]:
    if isinstance(answer, str):
        return answer, None
    if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
        raise UserError(f"{row.place}: an answer without a text: {answer!r}")
    start = answer.get("answer_start")
    try:
        return answer["text"], None if start in (None, "") else int(start)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{row.place}: answer_start {start!r} is not a number") from None


def gold_answers(row: Row, head: HeadConfig) -> list[tuple[str, int | None]]:
    """The gold answers of a row, which must have a context."""
    _check_context(row)
    return answers_of(row)


def check_row(row: Row) -> None:
    """Refuse a row without a context, or whose answers cannot be read."""
    gold_answers(row, HeadConfig("span"))


def check_dev(rows: Sequence[Row]) -> None:
    """Refuse questions whose ids are not unique: predictions are written under them."""
    keys_of(rows)


def _check_context(row: Row) -> None:
    if row.pair is None:
        raise UserError(f"{row.place or repr(row.text)}: a question needs a context to find its answer in")


def align_answers(rows: Iterable[Row], skipped: list[str] | None) -> tuple[list[Row], str]:
    """Rows whose first answer is at its answer_start, and a note on the answers that were found elsewhere.

    A row whose answer is not in its context is an error; with `skipped` it is skipped, and its place is added there.
    """
    kept, moved = list[Row](), list[str]()
    for row in rows:
        answers = gold_answers(row, HeadConfig("span"))
        if not answers:
            kept.append(replace(row, label=[]))
            continue
        text, start = answers[0]
        found = find_answer(text, start, row.pair or "")
        if found is None and skipped is None:
            raise UserError(f"{row.place}: the answer {text!r} is not in its context")
        if found is None:
            skipped.append(row.place)  # type: ignore[union-attr]
            continue
        if start is not None and found != start:
            moved.append(row.place)
        kept.append(replace(row, label=[{"text": text, "answer_start": found}]))
    note = f"{len(moved)} answers were found at another place than they name; the first: {moved[0]}" if moved else ""
    return kept, note


def find_answer(text: str, start: int | None, context: str) -> int | None:
    """Where an answer begins: at `start`, else at the nearest occurrence; None if the context does not have it."""
    if start is not None and start >= 0 and context.startswith(text, start):
        return start
    found = context.find(text)
    places = []
    while found >= 0:
        places.append(found)
        found = context.find(text, found + 1)
    return min(places, key=lambda place: abs(place - (start or 0)), default=None)


def encode(rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, *, labelled: bool) -> Encoded:
    """Encode `[CLS] question [SEP] context [SEP]`, in as many windows as the context needs.

    `shortened` counts truncated questions, and answers that no window holds whole.
    """
    for row in rows:
        _check_context(row)
    questions = tokenizer.encode([row.text for row in rows])
    contexts = list(dict.fromkeys(row.pair or "" for row in rows))
    aligned = {
        text: (np.array(e.ids, dtype=np.int64), np.array(e.offsets, dtype=np.int64).reshape(-1, 2))
        for text, e in zip(contexts, tokenizer.encode_aligned(contexts), strict=True)
    }
    examples: list[Example] = []
    owners: list[int] = []
    details: list[Window] = []
    shortened = 0
    space = limits.max_length - tokenizer.frame.size(2)
    most = min(limits.max_query, space - 1)
    for number, (row, question) in enumerate(zip(rows, questions, strict=True)):
        shortened += len(question) > most
        tokens, offsets = aligned[row.pair or ""]
        answer = _tokens_of_answer(row, offsets) if labelled else None
        spans = windows(len(tokens), space - len(question[:most]), limits.stride)
        if answer is not None and not any(begin <= answer[0] and answer[1] < end for begin, end in spans):
            shortened += 1
        best = most_context(spans, len(tokens))
        for index, (begin, end) in enumerate(spans):
            joined = tokenizer.joiner.join(question[:most], tokens[begin:end])
            first = int(joined.begins[1])
            labels = {}
            if labelled:
                inside = answer is not None and begin <= answer[0] and answer[1] < end
                label = np.array(answer) - begin + first if inside else np.array([0, 0])
                labels["label"] = Label(label, TARGET)
            examples.append(Example(joined.tokens, joined.segments, labels))
            owners.append(number)
            details.append(Window(first, offsets[begin:end], best[begin:end] == index))
    return Encoded(Examples.of(examples), owners, details, shortened)


def _tokens_of_answer(row: Row, offsets: NDArray[Any]) -> tuple[int, int] | None:
    """The first and the last token of a row's first answer; None if it has no answer."""
    answers = answers_of(row)
    if not answers:
        return None
    text, start = answers[0]
    start = find_answer(text, start, row.pair or "")
    if start is None:
        raise UserError(f"{row.place}: the answer {text!r} is not in its context")
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < start + len(text)))
    return (int(inside[0]), int(inside[-1])) if inside.size else None


def windows(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Where windows of at most `room` tokens begin and end, `stride` apart, to the end of the text."""
    spans = [(0, min(length, room))]
    while spans[-1][1] < length:
        begin = spans[-1][0] + min(room, stride)
        spans.append((begin, min(length, begin + room)))
    return spans


def stride_note(limits: Limits, frame: Frame) -> str | None:
    """A note if windows may not overlap, so that an answer across their border is in none of them."""
    space = limits.max_length - frame.size(2)
    query = min(limits.max_query, space - 1)
    room = space - query
    if limits.stride < room:
        return None
    return (
        f"beside a question of {query} tokens a window has room for {room}, and data.stride is {limits.stride}: such "
        f"windows share no token, and answers across their border are lost; data.stride={max(1, room // 2)} suits"
    )


def most_context(spans: Sequence[tuple[int, int]], length: int) -> NDArray[Any]:
    """The window in which each token has the most context on its shorter side; the first one of several."""
    chosen, highest = np.zeros(length, dtype=np.int64), np.full(length, -1.0)
    for number, (begin, end) in enumerate(spans if len(spans) > 1 else ()):
        places = np.arange(end - begin)
        scores = np.minimum(places, end - begin - 1 - places) + 0.01 * (end - begin)
        better = scores > highest[begin:end]
        chosen[begin:end][better], highest[begin:end][better] = number, scores[better]
    return chosen


def decode(
    rows: Sequence[Row], encoded: Encoded, logits: Sequence[NDArray[np.float32]], head: HeadConfig, limits: Limits
) -> list[Prediction]:
    """The best answers of each question over all its windows."""
    predictions = []
    for number, row in enumerate(rows):
        parts = [(logits[i], encoded.details[i]) for i in encoded.parts_of(number)]
        predictions.append(_decode_one(row.pair or "", parts, limits))
    return predictions


def _decode_one(context: str, parts: Sequence[tuple[NDArray[np.float32], Window]], limits: Limits) -> Prediction:
    found = [candidate for scores, window in parts for candidate in candidates(scores, window, limits)]
    found.sort(key=lambda candidate: -candidate[0])
    null = min(float(scores[0].sum()) for scores, _ in parts)
    best: dict[str, tuple[float, int, int]] = {}
    for total, begin, end in found:
        best.setdefault(context[begin:end], (total, begin, end))
        if len(best) == limits.n_best:
            break
    if not best:
        return {**NOTHING, "score": 1.0, "null_odds": CERTAIN, "nbest": []}
    probabilities = softmax(np.array([total for total, _, _ in best.values()]))
    nbest = [
        {"text": text, "start": begin, "end": end, "score": float(probability)}
        for (text, (_, begin, end)), probability in zip(best.items(), probabilities, strict=True)
    ]
    return _chosen(nbest, null - found[0][0], limits)


def _chosen(nbest: list[dict[str, Any]], odds: float, limits: Limits) -> Prediction:
    """The best answer of an n-best list, or no answer if that is likelier."""
    return {**nbest[0], **(NOTHING if predicts_none(odds, limits) else {}), "null_odds": odds, "nbest": nbest}


def predicts_none(odds: float, limits: Limits) -> bool:
    """Whether the prediction is no answer: one rule for predictions and for their scores."""
    return limits.threshold is not None and odds > limits.threshold


def merge(predictions: Sequence[Prediction], limits: Limits) -> Prediction:
    """One prediction from those of several models: an answer's score is its mean over their n-best lists."""
    found: dict[str, dict[str, Any]] = {}
    for entry in (entry for prediction in predictions for entry in prediction["nbest"]):
        known = found.setdefault(entry["text"], {**entry, "score": 0.0})
        known["score"] += entry["score"] / len(predictions)
    odds = sum(prediction["null_odds"] for prediction in predictions) / len(predictions)
    if not found:
        return {**NOTHING, "score": 1.0, "null_odds": odds, "nbest": []}
    return _chosen(sorted(found.values(), key=lambda entry: -entry["score"])[: limits.n_best], odds, limits)


def candidates(scores: NDArray[np.float32], window: Window, limits: Limits) -> list[tuple[float, int, int]]:
    """The answers made of the n best starts and ends of a window: start + end logits, and character offsets."""
    starts, ends = (np.argsort(-scores[:, i], kind="stable")[: limits.n_best] - window.shift for i in range(2))
    count = len(window.offsets)
    starts = starts[(starts >= 0) & (starts < count)]
    starts, ends = starts[window.best[starts]], ends[(ends >= 0) & (ends < count)]
    return [
        (
            float(scores[s + window.shift, 0]) + float(scores[e + window.shift, 1]),
            int(window.offsets[s, 0]),
            int(window.offsets[e, 1]),
        )
        for s in starts
        for e in ends
        if s <= e < s + limits.max_answer
    ]


def keys_of(rows: Sequence[Row]) -> list[str]:
    """The ids of the questions; questions without an id have their number."""
    keys = [row.key or str(number) for number, row in enumerate(rows)]
    if len(set(keys)) < len(keys):
        double = next(i for i, key in enumerate(keys) if key in keys[:i])
        raise UserError(f"{rows[double].place}: a second question has the id {keys[double]!r}")
    return keys


def gold_texts(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The gold answers of each question, by its id."""
    return {key: [text for text, _ in answers_of(row)] for key, row in zip(keys_of(rows), rows, strict=True)}


def limits_to_save(rows: Sequence[Row], limits: Limits) -> dict[str, object]:
    """The limits that a saved model needs in order to answer questions as in training."""
    saved: dict[str, object] = {name: getattr(limits, name) for name in ("stride", "max_query", "max_answer")}
    return {**saved, "threshold": None} if all(map(answers_of, rows)) else saved  # None: there is always an answer


def tune(task: Task, rows: Sequence[Row], predictions: Sequence[Prediction]) -> dict[str, float | None]:
    """The threshold with the best F1 or ROUGE-W on dev rows (section 4.3); None, always an answer, if all have one."""
    if not task.no_answer:
        return {}
    if all(answers_of(row) for row in rows):
        return {"threshold": None}
    golds, (texts, odds) = gold_texts(rows), _answers_and_odds(rows, predictions)
    if "rouge_w" in task.metrics:
        scores = {key: klue_question(golds[key], text)[1] for key, text in texts.items()}
        has_answer = {key: bool(answers) for key, answers in golds.items()}
        return {"threshold": best_threshold(scores, texts, odds, has_answer)[1]}
    return {"threshold": squad2_scores(golds, texts, odds)["best_f1_thresh"]}


def _answers_and_odds(
    rows: Sequence[Row], predictions: Sequence[Prediction]
) -> tuple[dict[str, str], dict[str, float]]:
    """The best answer of each question, whatever the threshold, and the odds of no answer, by the question's id."""
    keys = keys_of(rows)
    return (
        dict(zip(keys, [p["nbest"][0]["text"] if p["nbest"] else "" for p in predictions], strict=True)),
        dict(zip(keys, [p["null_odds"] for p in predictions], strict=True)),
    )


def score(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """The official scores of SQuAD 1.1, 2.0, KorQuAD or KLUE-MRC."""
    golds, (texts, odds) = gold_texts(rows), _answers_and_odds(rows, predictions)
    predicted = {key: "" if predicts_none(odds[key], limits) else text for key, text in texts.items()}
    if "rouge_w" in task.metrics:
        return klue_scores(golds, predicted)
    if not task.no_answer or all(golds.values()):
        return squad1_scores(golds, predicted, korean=task.letters)
    scores = squad2_scores(golds, texts, odds, math.inf if limits.threshold is None else limits.threshold)
    return {**scores, "exact_match": scores["exact"]}


def from_input(item: Any) -> Row | None:
    """A row of a question and its context."""
    return Row(item[0], item[1], None, "") if is_pair(item) else None
