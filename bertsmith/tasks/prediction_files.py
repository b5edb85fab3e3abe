"""Prediction files: written for GLUE's server and SQuAD's scripts; read back, as `predict`'s own, to be scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.errors import BadRow, UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.records import Form, read_records
from bertsmith.tasks.by_class import by_class
from bertsmith.tasks.description import Limits, Task
from bertsmith.tasks.glue import write_server_file
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.spans import gold_texts, keys_of
from bertsmith.tasks.squad_scores import squad1_scores, squad2_scores
from bertsmith.tasks.tagging import tags_of
from bertsmith.tasks.task import KINDS, find_task

FIELDS = {"single": "label", "multi": "labels", "regression": "value", "choice": "choice"}  # of predict's answers


def write_answers(task: Task, folder: Path, name: str, rows: Sequence[Row], answers: Sequence[dict[str, Any]]) -> None:
    """Write the answers to one file of a data set, in the form of its server or script."""
    folder.mkdir(parents=True, exist_ok=True)
    if task.head == "span":
        _write_squad(task, folder, rows, answers)
    elif task.head == "tags":
        _write_conll(folder / f"{name}.txt", rows, answers)
    elif task.head == "choice":
        write_lines(folder / f"{name}.csv", ["pred", *(str(a["choice"]) for a in answers)])
    else:
        write_server_file(folder / f"{name}.tsv", answers, task)


def _write_squad(task: Task, folder: Path, rows: Sequence[Row], answers: Sequence[dict[str, Any]]) -> None:
    keys = keys_of(rows)
    files = {
        "predictions.json": [a["text"] for a in answers],
        "nbest_predictions.json": [a["nbest"] for a in answers],
    }
    if task.no_answer:
        files["null_odds.json"] = [a["null_odds"] for a in answers]
    for name, values in files.items():
        text = json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _write_conll(path: Path, rows: Sequence[Row], answers: Sequence[dict[str, Any]]) -> None:
    lines = []
    for row, answer in zip(rows, answers, strict=True):
        lines += [f"{word} {tag}" for word, tag in zip(row.parts, answer["tags"], strict=True)] + [""]
    write_lines(path, lines)


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Lines of text, each with its end."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def score_file(
    predictions: str | Path,
    name: str,
    data: str | Path,
    *,
    null_odds: str | Path | None = None,
    threshold: float = 1.0,
) -> dict[str, Any]:
    """Score a prediction file in the official form against a labelled file, as the official script does."""
    task, path = find_task(name), Path(predictions)
    if not path.is_file():
        raise UserError(
            f"{path} is a folder; leave --task out for a model" if path.is_dir() else f"no such file: {path}"
        )
    rows = list(read_task(task, data, Columns(), labelled=True))
    if task.head == "span":
        odds = read_json(null_odds) if null_odds is not None else None
        own = path.suffix.lower() != ".json"
        texts = dict(zip(keys_of(rows), _values(path, rows, ("text",)), strict=True)) if own else read_json(path)
        found = _score_squad(task, rows, texts, path, odds, threshold)
    elif task.head == "tags":
        predicted = [tags_of(row) for row in read_task(task, path, Columns(), labelled=True)]
        found = _score_tags(task, rows, predicted, path)
    else:
        found = _score_column(task, rows, path)
    return {"task": name, "rows": len(rows), **found}


def _score_squad(
    task: Task, rows: Sequence[Row], texts: dict[str, Any], path: Path, odds: dict[str, Any] | None, threshold: float
) -> dict[str, float]:
    golds = gold_texts(rows)
    if wrong := [key for key, text in texts.items() if not isinstance(text, str)]:
        raise UserError(f"{path}: the answer to {wrong[0]!r} is {texts[wrong[0]]!r}, not a text")
    if not set(golds) & set(texts):
        raise UserError(f"{path} answers none of the questions; its first is {next(iter(texts), 'missing')!r}")
    lacking = sum(key not in texts for key in golds)
    if task.no_answer:
        if odds is not None and (absent := [key for key in texts if key in golds and key not in odds]):
            raise UserError(f"the file of null odds lacks {absent[0]!r}")
        for key, value in (odds or {}).items():
            if type(value) not in (int, float):
                raise UserError(f"the file of null odds has {value!r} for {key!r}, not a number")
        scores = squad2_scores(golds, texts, odds, threshold)
        scores["exact_match"] = scores["exact"]
    else:
        scores = squad1_scores(golds, texts, korean=task.letters)
    return {**scores, **({"unanswered": lacking} if lacking else {})}


def _score_tags(task: Task, rows: Sequence[Row], predicted: list[list[str]], path: Path) -> dict[str, Any]:
    if [len(row.parts) for row in rows] != [len(tags) for tags in predicted]:
        raise UserError(f"{path} does not have the sentences of the data: {len(predicted)} against {len(rows)}")
    return _scored(task, rows, KINDS[task.head].head_for(task, rows), [{"tags": tags} for tags in predicted])


def _values(path: Path, rows: Sequence[Row], names: tuple[str, ...]) -> list[Any]:
    """The column of a file with one prediction a row, in order."""
    values: list[Any] = []
    form = Form(literal=path.suffix.lower() != ".csv", known=names)
    for place, record in read_records(path, form):
        if isinstance(record, BadRow):
            raise record
        name = next((n for n in names if n in record), None)
        if name is None:
            raise UserError(f"{place}: no prediction; the file has the columns index and prediction")
        if str(record.get("index", len(values))) != str(len(values)):
            raise UserError(f"{place}: index {record['index']!r} where {len(values)} follows; rows stand in order")
        values.append("" if record[name] is None else record[name])
    if len(values) != len(rows):
        raise UserError(f"{path} has {len(values)} predictions, and the data {len(rows)} rows")
    return values


def _score_column(task: Task, rows: Sequence[Row], path: Path) -> dict[str, Any]:
    """A file with one prediction a row, under the heading `prediction` (or `pred`), or as `predict` writes it."""
    kind = KINDS[task.head]
    head = kind.head_for(task, rows)
    values = _values(path, rows, ("prediction", "pred", FIELDS[head.kind]))
    answers = [
        _answer(Row("", None, value, f"{path}, row {i}", parts=row.parts), head)
        for i, (value, row) in enumerate(zip(_named(task, values, path), rows, strict=True), 1)
    ]
    return _scored(task, rows, head, answers)


def _scored(task: Task, rows: Sequence[Row], head: HeadConfig, answers: list[dict[str, Any]]) -> dict[str, Any]:
    classes = by_class(head, rows, answers)
    scores: dict[str, Any] = KINDS[task.head].score(task, rows, answers, head, Limits())
    return {**scores, "per_class": classes} if classes else scores


def _answer(row: Row, head: HeadConfig) -> dict[str, Any]:
    """The answer of a model that would be written as this row's label."""
    found = KINDS[head.kind].check(row, head)
    if head.kind == "multi":
        return {"labels": [name for name, is_there in zip(head.labels, found, strict=True) if is_there]}
    if head.kind == "single":
        return {"label": head.labels[found]}
    return {"choice" if head.kind == "choice" else "value": found}


def _named(task: Task, values: list[str], path: Path) -> list[str]:
    from bertsmith.tasks.sequences import named

    if not task.labels:
        return values
    return [named(Row("", None, value, f"{path}, row {i}"), task) for i, value in enumerate(values, 1)]
