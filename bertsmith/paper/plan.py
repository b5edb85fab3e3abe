"""The estimated cost of a table on this machine: the operations and hours of every run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.corpus.shards import read_manifest
from bertsmith.finetuning.scored import SCORES
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.finetuning.task_data import Data
from bertsmith.model.cost import training_flops
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.kinds import build_objective
from bertsmith.objectives.objective import Objective
from bertsmith.paper.tables import Row, Table
from bertsmith.paper.work import DEMO_WORDS, Work
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.rows.columns import Columns
from bertsmith.rows.columns import Row as TaskRow
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.published import SIZES
from bertsmith.tasks.reading import training_rows
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


def estimate(work: Work, table: Table, seeds: int, jobs: int = 1) -> dict[str, Any]:
    """Return the runs that a table needs, which of them are finished, the hours of the others, and their disk space.

    With several `jobs` the fine-tunings share the device: their operations take as long, and their overhead is divided.
    """
    where = pick_device(work.device)
    speed = SHARE * matrix_ceiling(where, autocast_dtype(work.scale.train.precision, where))
    runs: dict[str, dict[str, Any]] = {}

    def add(run: Path, flops: float, seconds: float, done: bool, **facts: float) -> None:
        folder, left = str(run.relative_to(work.folder)), 0.0 if done else seconds / 3600
        runs[folder] = {"run": folder, "done": done, "flops": flops, "hours": left, **facts}

    for start in work.starts(table):
        run, chosen = work.run_of(start), _with_length(work, work.config(start))
        hours, steps = chosen.train.hours, chosen.train.steps or 0
        flops = 0.0 if hours else pretraining_flops(chosen)
        seconds = 3600 * hours if hours else flops / speed + STEP * steps
        done = is_finished(run) or (run / SCORES).exists()
        add(run, flops, seconds + RUN, done, gigabytes=_gigabytes(chosen))
    for run, (row, column, config, _, data) in work.finetunings(table, seeds):
        lengths = row_lengths(column.task, data)
        steps = config.train.num_steps(len(lengths)) or 0
        step = STEP + BILSTM * bool(config.bilstm_layers or config.features.variant)
        flops = _finetuning_flops(work, row, config, lengths)
        seconds = max(flops / speed, (flops / speed + step * steps + RUN) / jobs)
        add(run, flops, seconds, (run / SCORES).exists())
    hours = sum(run["hours"] for run in runs.values())
    facts = {"table": table.name, "title": table.title, "scale": work.scale.name, "seeds": seeds}
    facts |= {"gigabytes": sum(run.get("gigabytes", 0.0) for run in runs.values())}
    note = (
        f"operations at {SHARE:.0%} of this machine's peak for matrix products, {1000 * STEP:.0f} ms per step "
        f"({1000 * (STEP + BILSTM):.0f} with a BiLSTM) and {RUN:.0f} s per run, one after the other"
        f"{f', this overhead divided among {jobs} fine-tunings at a time' if jobs > 1 else ''}; "
        "evaluation is not counted"
    )
    if work.data is None:
        note += "; without --data, every data set is assumed to have its published size"
    return {**facts, "runs": list(runs.values()), "hours": hours, "absent": work.absent(table), "note": note}


def _with_length(work: Work, config: PretrainConfig) -> PretrainConfig:
    """Return a configuration with what the corpus decides: the size of its vocabulary, and the steps of its epochs."""
    folder, train = work.corpus_of(config), config.train
    if folder is None:
        words = DEMO_WORDS if work.scale.name == "tiny" else config.model.vocab_size
        return replace(config, model=replace(config.model, vocab_size=words))
    config = replace(config, model=replace(config.model, vocab_size=Tokenizer.load(folder).vocab_size))
    if train.steps is None and train.hours is None:
        sequences = read_manifest(folder).tokens // config.data.max_length
        config = replace(config, train=replace(train, steps=train.num_steps(sequences)))
    return config


def _gigabytes(config: PretrainConfig) -> float:
    """Return the disk space of a finished run: its model and those of its checkpoints, in float32."""
    train = config.train
    models = min(train.keep, 1 / train.save_every) if 0 < train.save_every < 1 else train.keep
    return (1 + models) * 4 * sum(tensor.numel() for tensor in _objective(config).parameters()) / 1e9


def pretraining_flops(config: PretrainConfig) -> float:
    """Return the operations of a whole pre-training run with full sequences, of all networks of its objective."""
    data, steps, objective = config.data, config.train.steps or 0, _objective(config)
    shares = [(1.0, data.max_length)]
    if data.long_length is not None:
        shares = [(1 - data.long_steps, data.max_length), (data.long_steps, data.long_length)]
    size = config.train.batch_size
    return sum(
        share * steps * objective.flops([length] * size, int(config.predicted_share * size * length))
        for share, length in shares
    )


def _objective(config: PretrainConfig) -> Objective:
    """Return the model of a run without weights, the shapes alone."""
    with torch.device("meta"):
        return build_objective(Encoder(config.model), config.objective)


_LENGTHS: dict[tuple[str, str], list[int]] = {}


def row_lengths(task: str, data: Data) -> list[int]:
    """Return the approximate numbers of tokens of a task's training rows."""
    if data.is_assumed:
        return [find_task(task).max_length // 2] * SIZES[task][0]
    key = task, str(data.train)
    if key not in _LENGTHS:
        rows, _ = training_rows(find_task(task), data.splits(task).train, Columns())
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
    if config.features.variant:  # a forward pass of a frozen encoder, once if its states of words are stored
        epochs = (1 if KINDS[find_task(config.task).head].tags_words else epochs) / 3
    return (2 if row.beside else 1) * epochs * training_flops(model, bounded, 0)
