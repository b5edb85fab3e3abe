"""Prediction files in the form of a data set's server or script, one writer for each kind of task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bertsmith.rows.columns import Row
from bertsmith.rows.conll import COMMENT
from bertsmith.tasks.description import Prediction, Task
from bertsmith.tasks.spans import keys_of
from bertsmith.tasks.tagging import predicted_tags, text_tags


def write_glue(folder: Path, name: str, task: Task, rows: Sequence[Row], predictions: Sequence[Prediction]) -> None:
    """Write the file of GLUE's server: `index` and `prediction`, in the order of the test file."""
    values = [p["label"] if task.labels else format(clipped(p["value"], task), ".3f") for p in predictions]
    write_lines(folder / f"{name}.tsv", ["index\tprediction", *(f"{i}\t{value}" for i, value in enumerate(values))])


def clipped(value: float, task: Task) -> float:
    """A number inside the task's scale."""
    low, high = task.scale or (value, value)
    return min(max(value, low), high)


def write_choices(folder: Path, name: str, task: Task, rows: Sequence[Row], predictions: Sequence[Prediction]) -> None:
    """Write SWAG's file: the index of the ending, under the heading `pred`."""
    write_lines(folder / f"{name}.csv", ["pred", *(str(p["choice"]) for p in predictions)])


def write_tags(folder: Path, name: str, task: Task, rows: Sequence[Row], predictions: Sequence[Prediction]) -> None:
    """Write the file of conlleval: one word and its tag per line, an empty line after each sentence.

    A text that has no list of words is written as KLUE-NER's file has it: one character, a tab and its tag per line,
    also for spaces, and the id of the text before it.
    """
    lines = []
    for row, prediction in zip(rows, predictions, strict=True):
        if row.parts:
            tags = prediction["tags"] if len(prediction["tags"]) == len(row.parts) else predicted_tags(row, prediction)
            lines += [f"{word} {tag}" for word, tag in zip(row.parts, tags, strict=True)]
        else:
            lines += [f"{COMMENT} {row.key}", *map("\t".join, zip(row.text, text_tags(row, prediction), strict=True))]
        lines.append("")
    write_lines(folder / f"{name}.txt", lines)


def write_squad(folder: Path, name: str, task: Task, rows: Sequence[Row], predictions: Sequence[Prediction]) -> None:
    """Write the files of SQuAD's scripts: the answers, the n-best lists and, for SQuAD 2.0, the odds of no answer."""
    keys = keys_of(rows)
    files = {
        "predictions.json": [p["text"] for p in predictions],
        "nbest_predictions.json": [p["nbest"] for p in predictions],
    }
    if task.no_answer:
        files["null_odds.json"] = [p["null_odds"] for p in predictions]
    for file, values in files.items():
        text = json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False, indent=1)
        (folder / file).write_text(text + "\n", encoding="utf-8")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text, each with a newline at its end."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
