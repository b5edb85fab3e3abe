"""The estimated cost of a table on this machine: the operations and hours of every run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.corpus.shards import Corpus
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.model.cost import training_flops
from bertsmith.paper.tables import Row, Table
from bertsmith.paper.work import DEMO_WORDS, SCORES, Data, Work
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.rows.columns import Columns
from bertsmith.rows.columns import Row as TaskRow
from bertsmith.tasks.published import SIZES
from bertsmith.tasks.reading import find_splits, training_rows
from bertsmith.tasks.task import find_task
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.run import is_finished
from bertsmith.training.settings import autocast_dtype, pick_device
from bertsmith.training.speed import matrix_ceiling

SHARE = 0.4  # of the peak of matrix products that training is assumed to reach
STEP, RUN = 0.005, 3.0  # seconds of overhead for every step and every run
BILSTM = 0.01  # seconds more for a step with a BiLSTM, which is sequential
PIECES = 1.35  # tokens per word


def estimate(work: Work, table: Table, seeds: int) -> dict[str, Any]:
    """Return the runs that a table needs, which of them are finished, and the hours of the others."""
    where = pick_device(work.device)
    speed = SHARE * matrix_ceiling(where, autocast_dtype(work.scale.train.precision, where))
    corpus = Corpus.open(work.corpus) if work.corpus is not None else None
    words = Tokenizer.load(corpus.folder).vocab_size if corpus else DEMO_WORDS if work.scale.name == "tiny" else None
    runs: dict[str, dict[str, Any]] = {}

    def add(run: Path, flops: float, steps: float, done: bool, step: float = STEP) -> None:
        folder, hours = str(run.relative_to(work.folder)), 0.0 if done else (flops / speed + step * steps + RUN) / 3600
        runs[folder] = {"run": folder, "done": done, "flops": flops, "hours": hours}

    for start in work.starts(table):
        run, chosen = work.run_of(start), work.config(start)
        if chosen.train.steps is None and corpus:
            sequences = corpus.manifest.tokens // chosen.data.max_length
            chosen = replace(chosen, train=replace(chosen.train, steps=chosen.train.num_steps(sequences)))
        add(run, pretraining_flops(chosen, words or chosen.model.vocab_size), chosen.train.steps or 0, is_finished(run))
    for run, (row, column, config, _, data) in work.finetunings(table, seeds):
        lengths = row_lengths(column.task, data)
        steps = config.train.num_steps(len(lengths)) or 0
        step = STEP + BILSTM * bool(config.bilstm_layers or config.features.variant)
        add(run, _finetuning_flops(work, row, config, lengths), steps, (run / SCORES).exists(), step)
    hours = sum(run["hours"] for run in runs.values())
    facts = {"table": table.name, "title": table.title, "scale": work.scale.name, "seeds": seeds}
    note = (
        f"operations at {SHARE:.0%} of this machine's peak for matrix products, {1000 * STEP:.0f} ms per step "
        f"({1000 * (STEP + BILSTM):.0f} with a BiLSTM) and {RUN:.0f} s per run, one after the other; "
        "evaluation is not counted"
    )
    if work.data is None:
        note += "; without --data, every data set is assumed to have its published size"
    return {**facts, "runs": list(runs.values()), "hours": hours, "absent": work.absent(table), "note": note}


def pretraining_flops(config: PretrainConfig, vocab_size: int) -> float:
    """Return the operations of a whole pre-training run with full sequences."""
    data, steps = config.data, config.train.steps or 0
    model = replace(config.model, vocab_size=vocab_size)
    shares = [(1.0, data.max_length)]
    if data.long_length is not None:
        shares = [(1 - data.long_share, data.max_length), (data.long_share, data.long_length)]
    size = config.train.batch_size
    return sum(
        share * steps * training_flops(model, [length] * size, int(config.predicted_share * size * length))
        for share, length in shares
    )


_LENGTHS: dict[tuple[str, str], list[int]] = {}


def row_lengths(task: str, data: Data) -> list[int]:
    """Return the approximate numbers of tokens of a task's training rows."""
    if data.is_assumed:
        return [find_task(task).max_length // 2] * SIZES[task][0]
    key = task, str(data.train)
    if key not in _LENGTHS:
        described = find_task(task)
        rows, _ = training_rows(described, find_splits(described, data.train, data.dev).train, Columns())
        _LENGTHS[key] = [_tokens(row) for row in rows]
    return _LENGTHS[key]


def _tokens(row: TaskRow) -> int:
    texts = (
        [f"{row.text} {row.pair or ''}"] if not row.parts or row.document else [f"{row.text} {e}" for e in row.parts]
    )
    return sum(WORDPIECE.size(2) + int(PIECES * len(text.split())) for text in texts)


def _finetuning_flops(work: Work, row: Row, config: FinetuneConfig, lengths: list[int]) -> float:
    assert row.start is not None
    model = work.encoder(row.start)
    longest = min(config.data.max_length or find_task(config.task).max_length, model.max_positions)
    bounded = [min(length, longest) for length in lengths]
    epochs = (config.train.num_steps(len(lengths)) or 0) * config.train.batch_size / max(1, len(lengths))
    epochs = 1 / 3 if config.features.variant else epochs  # a frozen encoder runs one forward pass
    return (2 if row.beside else 1) * epochs * training_flops(model, bounded, 0)
