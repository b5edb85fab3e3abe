"""Dev rows beside their answers: what a report needs to show where a model is wrong, and how sure it was.

`dev_predictions.parquet` of a run has one line a row. `gold` and `predicted` are lists of text: one label, several
labels, the tags of all words, the number of an ending, the gold answers of a question, or a number. `probability` is
that of what was predicted, `gold_probability` that of the gold label, `loss` what training would have counted;
`scores` are those of the labels (in the order of the file's `labels`), of the endings, of each word's tag, the
predicted number, or exact match and F1 of an answer in per cent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Task
from bertsmith.tasks.sequences import target
from bertsmith.tasks.spans import answers_of
from bertsmith.tasks.squad_scores import squad1_scores, squad2_scores
from bertsmith.tasks.tagging import tags_of
from bertsmith.tasks.task import KINDS

FILE = "dev_predictions.parquet"
LONGEST = 1000  # characters of a text that are kept
AROUND = 200  # characters of a context before and after an answer
SMALLEST = 1e-12  # a probability whose logarithm is still a number
Line = dict[str, Any]


def write_judged(
    run: Path,
    task: Task,
    head: HeadConfig,
    rows: Mapping[str, Sequence[Row]],
    answers: Mapping[str, Sequence[dict[str, Any]]],
) -> None:
    """Write the answers to the dev rows of a run, by the name of their file (empty where there is one)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [
        {"file": name, **judge(task, head, row, answer)}
        for name in rows
        for row, answer in zip(rows[name], answers[name], strict=True)
    ]
    text, number, texts, numbers = pa.string(), pa.float64(), pa.list_(pa.string()), pa.list_(pa.float64())
    kinds = {"file": text, "key": text, "text": text, "pair": text, "parts": texts, "gold": texts, "predicted": texts}
    kinds |= {"probability": number, "gold_probability": number, "loss": number, "scores": numbers}
    facts = {"task": task.name, "kind": head.kind, "labels": json.dumps(head.labels)}
    schema = pa.schema(list(kinds.items()), metadata=facts)
    with new_file(run / FILE) as work:
        pq.write_table(pa.Table.from_pylist(lines, schema), work, compression="zstd")


def read_judged(run: Path) -> tuple[dict[str, Any], list[Line]] | None:
    """The facts (task, kind, labels) and the lines that a run has written; None where it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not (run / FILE).is_file():
        return None
    try:
        table = pq.read_table(run / FILE)
        facts: dict[str, Any] = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
        return {**facts, "labels": json.loads(facts["labels"])}, table.to_pylist()
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run / FILE} cannot be read: {error}; remove it, and the report goes without it") from None


def judge(task: Task, head: HeadConfig, row: Row, answer: Mapping[str, Any]) -> Line:
    """A row and its answer side by side."""
    text = {"key": row.key, "text": row.text[:LONGEST], "pair": row.pair and row.pair[:LONGEST], "parts": row.parts}
    if head.kind == "regression":
        gold = target(row, head)
        judged = _line([repr(gold)], [repr(answer["value"])], [answer["value"]], loss=(answer["value"] - gold) ** 2)
    elif head.kind == "multi":
        judged = _several(head, row, answer)
    elif head.kind == "tags":
        judged = _line(tags_of(row), answer["tags"], answer["scores"])
    elif head.kind == "span":
        judged = _answer(task, row, answer)
        text["pair"] = _around(row, answer)
    elif head.kind == "choice":
        chances, gold = answer["scores"], KINDS["choice"].check(row, head)
        judged = _line([str(gold)], [str(answer["choice"])], chances, answer["score"], chances[gold])
    else:
        chances, gold = list(answer["scores"].values()), target(row, head)
        judged = _line([head.labels[gold]], [answer["label"]], chances, answer["score"], chances[gold])
    return {**text, **judged}


def _line(
    gold: Sequence[str],
    predicted: Sequence[str],
    scores: Sequence[float],
    probability: float | None = None,
    gold_probability: float | None = None,
    loss: float | None = None,
) -> Line:
    if gold_probability is not None:
        loss = float(-np.log(max(gold_probability, SMALLEST)))
    chances = {"probability": probability, "gold_probability": gold_probability, "loss": loss}
    return {"gold": gold, "predicted": predicted, "scores": scores, **chances}


def _several(head: HeadConfig, row: Row, answer: Mapping[str, Any]) -> Line:
    wanted, chances = target(row, head), np.array(list(answer["scores"].values()))
    of_truth = np.maximum(np.where(wanted > 0, chances, 1 - chances), SMALLEST)
    gold = [name for name, is_there in zip(head.labels, wanted, strict=True) if is_there]
    return _line(gold, answer["labels"], chances.tolist(), loss=float(-np.log(of_truth).mean()))


def _answer(task: Task, row: Row, answer: Mapping[str, Any]) -> Line:
    golds, texts = {"": [text for text, _ in answers_of(row)]}, {"": answer["text"]}
    if golds[""]:
        scores = squad1_scores(golds, texts, korean=task.letters)
        exact = scores["exact_match"]
    else:
        scores = squad2_scores(golds, texts)
        exact = scores["exact"]
    silent = float(1 / (1 + np.exp(-np.clip(answer["null_odds"], -50, 50)))) if task.no_answer else 0.0
    probability = (1 - silent) * answer["score"] if answer["text"] else silent
    return _line(list(dict.fromkeys(golds[""])), [answer["text"]], [exact, scores["f1"]], probability)


def _around(row: Row, answer: Mapping[str, Any]) -> str:
    """The part of a context in which the answer stands, the gold one if there is one."""
    context = row.pair or ""
    golds = answers_of(row)
    place = context.find(golds[0][0]) if golds else answer["start"] or 0
    begin, end = context.rfind(" ", 0, max(0, place - AROUND)) + 1, context.find(" ", place + AROUND)
    return f"{'… ' if begin else ''}{context[begin:end] + ' …' if end > 0 else context[begin:]}"
