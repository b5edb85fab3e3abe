"""Prediction files: written in the form of a data set's server or script, read back and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.errors import BadRow, UserError
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.records import Form, read_records
from bertsmith.tasks.description import Limits, Prediction, Task
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.sequences import label_name
from bertsmith.tasks.spans import gold_texts, keys_of
from bertsmith.tasks.squad_scores import klue_scores, squad1_scores, squad2_scores
from bertsmith.tasks.tagging import has_spans, tags_of
from bertsmith.tasks.task import find_task


def write_predictions(
    task: Task, folder: Path, name: str, rows: Sequence[Row], predictions: Sequence[Prediction]
) -> None:
    """Write the predictions for one file of a data set, in the form of its server or script."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[task.head].write(folder, name, task, rows, predictions)


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
    if KINDS[task.head].gold is None:
        odds = read_json(null_odds) if null_odds is not None else None
        scores = _score_answers(task, rows, _answers(path, rows), path, odds, threshold)
    else:
        scores = _score_labels(task, rows, path)
    return {"task": name, "rows": len(rows), **scores}


def _answers(path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The answer to each question, from the file of SQuAD's script or a file that `predict` has written."""
    if path.suffix.lower() == ".json":
        return read_json(path)
    return dict(zip(keys_of(rows), _column(path, rows, ("text",)), strict=True))


def _score_answers(
    task: Task, rows: Sequence[Row], texts: dict[str, Any], path: Path, odds: dict[str, Any] | None, threshold: float
) -> dict[str, float]:
    golds = gold_texts(rows)
    if wrong := [key for key, text in texts.items() if not isinstance(text, str)]:
        raise UserError(f"{path}: the answer to {wrong[0]!r} is {texts[wrong[0]]!r}, not a text")
    if not set(golds) & set(texts):
        raise UserError(f"{path} answers none of the questions; its first is {next(iter(texts), 'missing')!r}")
    missing = sum(key not in texts for key in golds)
    if "rouge_w" in task.metrics:
        scores = klue_scores(
            golds, {key: "" if odds and odds.get(key, 0.0) > threshold else t for key, t in texts.items()}
        )
    elif task.no_answer:
        if odds is not None and (absent := [key for key in texts if key in golds and key not in odds]):
            raise UserError(f"the file of null odds lacks {absent[0]!r}")
        for key, value in (odds or {}).items():
            if type(value) not in (int, float):
                raise UserError(f"the file of null odds has {value!r} for {key!r}, not a number")
        scores = squad2_scores(golds, texts, odds, threshold)
        scores["exact_match"] = scores["exact"]
    else:
        scores = squad1_scores(golds, texts, korean=task.letters)
    return {**scores, **({"unanswered": missing} if missing else {})}


def _column(path: Path, rows: Sequence[Row], names: tuple[str, ...]) -> list[Any]:
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


def _score_labels(task: Task, rows: Sequence[Row], path: Path) -> dict[str, Any]:
    """Score a file that has one label per row, or the tags of all sentences."""
    head = KINDS[task.head].head_for(task, rows)
    kind = KINDS[head.kind]
    assert kind.gold is not None
    labelled = _rows_of_column(task, rows, path, kind.column) if kind.column else _sentences(task, rows, path)
    predictions = [kind.gold(row, head) for row in labelled]
    scores: dict[str, Any] = kind.score(task, rows, predictions, head, Limits())
    classes = kind.by_class(head, rows, predictions)
    return {**scores, "per_class": classes} if classes else scores


def _rows_of_column(task: Task, rows: Sequence[Row], path: Path, column: str) -> list[Row]:
    """Rows with the predictions as labels: under the heading `prediction` or `pred`, or as `predict` writes them."""
    values = _column(path, rows, ("prediction", "pred", column))
    labelled = [Row("", None, value, f"{path}, row {i}") for i, value in enumerate(values, 1)]
    labelled = [replace(row, label=label_name(row, task)) for row in labelled] if task.labels else labelled
    return [replace(row, parts=gold.parts) for row, gold in zip(labelled, rows, strict=True)]


def _sentences(task: Task, rows: Sequence[Row], path: Path) -> list[Row]:
    """The sentences of a file with the predicted tags, which have to be those of the data.

    Where entities are given by their characters, the file may be one that `predict` has written.
    """
    if any(map(has_spans, rows)) and path.suffix.lower() in (".jsonl", ".json", ".parquet"):
        return [replace(row, label=found) for row, found in zip(rows, _column(path, rows, ("entities",)), strict=True)]
    labelled = list(read_task(task, path, Columns(), labelled=True))
    if [len(tags_of(row)) for row in rows] != [len(tags_of(row)) for row in labelled]:
        raise UserError(f"{path} does not have the sentences of the data: {len(labelled)} against {len(rows)}")
    return labelled
