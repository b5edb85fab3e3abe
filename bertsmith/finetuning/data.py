"""The labelled rows of a fine-tuning run: training rows, dev rows, and the head that the labels need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bertsmith.errors import UserError
from bertsmith.finetuning.dev_split import hold_out
from bertsmith.finetuning.doubts import doubts
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks.description import Task
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import Splits, columns_of_other_rows, guessed_columns, read_task, training_rows
from bertsmith.tasks.task import find_task


@dataclass(frozen=True)
class RunData:
    """The rows of a run, the columns they were read from, their head, and notes on what was skipped or held out."""

    task: Task
    columns: Columns
    rows: list[Row]
    dev_rows: dict[str, list[Row]]  # by the prefix of their scores
    head: HeadConfig
    notes: list[str]

    def overview(self) -> str:
        """A line on the labels of the training rows."""
        return f"{len(self.rows):,} training rows; {KINDS[self.head.kind].overview(self.rows, self.head)}"


def read_data(config: FinetuneConfig, splits: Splits, command: str) -> RunData:
    """Read all rows of a run; an error about columns shows `command` with the options that are missing."""
    task = find_task(config.task)
    columns = guessed_columns(task, splits.train[0], config.data.columns, command)
    skip_bad = config.data.skip_bad
    rows, notes = training_rows(task, splits.train, columns, skip_bad=skip_bad)
    head = KINDS[task.head].head_for(task, rows)
    head = replace(head, features=config.features if config.features.variant else None)
    head = replace(head, bilstm_layers=config.bilstm_layers, beside=bool(config.beside))
    dev_rows = {}
    for name, sources in splits.dev.items():
        named = columns_of_other_rows(task, sources[0], columns, {}, "")
        dev_rows[name] = list(read_task(task, sources, named, labelled=True, skip_bad=skip_bad))
    if not dev_rows and config.data.dev_share:
        rows, dev_rows, note = hold_out(rows, head, config.data.dev_share)
        notes.append(note)
    _check_dev(dev_rows, head)
    if task.own:
        notes += doubts(rows, dev_rows, head)
    if not dev_rows:
        config.train.refuse_without_scores("give --dev")
    return RunData(task, columns, rows, dev_rows, head, notes)


def _check_dev(dev_rows: dict[str, list[Row]], head: HeadConfig) -> None:
    """Refuse dev rows that cannot be scored, as with a label that no training row has, before the first step."""
    for rows in dev_rows.values():
        for row in rows:
            KINDS[head.kind].target(row, head)
        KINDS[head.kind].check_dev(rows)


def class_weights(
    rows: Sequence[Row], head: HeadConfig, weights: Mapping[str, float], balanced: bool
) -> list[float] | None:
    """The weight of each class in the loss: as set or, balanced, with a mean of 1 over the rows; None: no weights."""
    if not weights and not balanced:
        return None
    class_counts = KINDS[head.kind].class_counts
    if class_counts is None:
        raise UserError("class weights are for labels: data.class_weights and data.balanced do not fit this task")
    counts = class_counts(rows, head)
    values = 1 / np.maximum(counts, 1) if balanced else np.ones(len(head.labels))
    for name, weight in weights.items():
        if weight < 0 or not np.isfinite(weight):
            raise UserError(f"data.class_weights: the weight of {name!r} must be a number of at least 0, not {weight}")
        values[head.label_index(name, "data.class_weights: ")] = weight
    mean = (values * counts).sum() / max(1.0, counts.sum())
    if mean == 0:
        raise UserError("data.class_weights: all classes of the training rows have the weight 0; nothing can be learnt")
    return (values / mean).tolist() if balanced else values.tolist()
