"""The labelled rows of a fine-tuning run: training rows, dev rows, and the head that the labels need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bertsmith.finetuning.dev_split import hold_out
from bertsmith.finetuning.frozen import check_features
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks.description import Task
from bertsmith.tasks.metrics import seqeval_metrics
from bertsmith.tasks.reading import Splits, guessed_columns, read_task, training_rows
from bertsmith.tasks.spans import keys_of
from bertsmith.tasks.task import KINDS, find_task


@dataclass(frozen=True)
class RunData:
    """The rows of a run, the columns they were read from, their head, and notes on what was skipped or held out."""

    task: Task
    columns: Columns
    rows: list[Row]
    dev_rows: dict[str, list[Row]]  # by the prefix of their scores
    head: HeadConfig
    notes: list[str]


def read_data(config: FinetuneConfig, splits: Splits, command: str) -> RunData:
    """Read all rows of a run; `command` is what an error about columns completes with options."""
    task = find_task(config.task)
    check_features(config.features, task)
    columns = guessed_columns(task, splits.train[0], config.data.columns, command)
    rows, notes = training_rows(task, splits.train, columns, skip_bad=config.data.skip_bad)
    head = KINDS[task.head].head_for(task, rows)
    head = replace(head, features=config.features if config.features.variant else None)
    head = replace(head, bilstm_layers=config.bilstm_layers, beside=bool(config.beside))
    dev_rows = {
        name: list(read_task(task, paths, columns, labelled=True, skip_bad=config.data.skip_bad))
        for name, paths in splits.dev.items()
    }
    if not dev_rows and config.data.dev_share:
        rows, dev_rows, note = hold_out(rows, head, config.data.dev_share)
        notes.append(note)
    _check_dev(dev_rows, head)
    if not dev_rows:
        config.train.refuse_without_scores("give --dev")
    return RunData(task, columns, rows, dev_rows, head, notes)


def _check_dev(dev_rows: dict[str, list[Row]], head: HeadConfig) -> None:
    """Refuse dev rows that cannot be scored, as with a label that no training row has, before the first step."""
    for rows in dev_rows.values():
        for row in rows:
            KINDS[head.kind].check(row, head)
        if head.kind == "span":
            keys_of(rows)  # predictions are written under them
    if dev_rows and head.kind == "tags":
        seqeval_metrics()
