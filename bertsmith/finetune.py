"""Fine-tuning: labelled rows and a pre-trained model to a model with an output layer (BERT paper, section 4)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith import draws
from bertsmith.batch import Batch, Example, collate, share
from bertsmith.config import to_dict
from bertsmith.errors import UserError
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model
from bertsmith.frozen import STATES, check_features, frozen_examples
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.predict import Predictor
from bertsmith.pretrain import check_length
from bertsmith.progress import say
from bertsmith.tasks.description import Limits, Task
from bertsmith.tasks.files import write_answers
from bertsmith.tasks.metrics import seqeval_metrics
from bertsmith.tasks.reading import Splits, find_splits, guessed_columns, read_task, training_rows
from bertsmith.tasks.rows import Columns, Row
from bertsmith.tasks.sequences import class_weights
from bertsmith.tasks.spans import choose_threshold
from bertsmith.tasks.task import KINDS, find_task
from bertsmith.training import distributed, runlog
from bertsmith.training.fit import fit
from bertsmith.training.run import finish_run, open_run
from bertsmith.training.settings import TrainConfig, pick_device

HEAD_WEIGHTS, ORDER = 105, 106  # streams of draws


@dataclass(frozen=True)
class FinetuneData:
    """How rows are read and encoded; `max_length` is the task's own where it is not set.

    Answers are looked for in windows that begin `stride` tokens apart; a question keeps `max_query` tokens, an answer
    has at most `max_answer`. Rows of a class count `class_weights` times, or, `balanced`, all classes count alike.
    """

    max_length: int | None = None
    columns: Columns = field(default_factory=Columns)
    stride: int = 128
    max_query: int = 64
    max_answer: int = 30
    class_weights: dict[str, float] = field(default_factory=dict)
    balanced: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length", "stride", "max_query", "max_answer"):
            value = getattr(self, name)
            if value is not None and value < (8 if name == "max_length" else 1):
                raise UserError(f"data.{name} must be at least {8 if name == 'max_length' else 1}, not {value}")


@dataclass(frozen=True)
class FinetuneConfig:
    """One complete fine-tuning run. `random_start` keeps the model's shape and tokenizer but not its weights.

    With a variant of `features` the encoder is not trained: a BiLSTM on its states is (section 5.3).
    """

    task: str
    data: FinetuneData = field(default_factory=FinetuneData)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(epochs=3, batch_size=32, learning_rate=5e-5, warmup=0.1)
    )
    random_start: bool = False
    features: FeatureConfig = field(default_factory=FeatureConfig)


def finetune(
    config: FinetuneConfig,
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    dev: str | Path | None = None,
    device: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train all parameters with a new output layer; `out/model` is the finished model. Gives the dev scores."""
    where = pick_device(device)
    with distributed.processes(where):
        return _finetune(config, find_model(model), data, Path(out), dev, where, resume)


def _finetune(
    config: FinetuneConfig,
    source: Path,
    data: str | Path,
    run: Path,
    dev: str | Path | None,
    where: torch.device,
    resume: bool,
) -> dict[str, Any]:
    task = find_task(config.task)
    check_features(config.features, task)
    splits = find_splits(task, data, dev)
    columns = guessed_columns(task, splits.train[0], config.data.columns)
    rows, said = training_rows(task, splits.train, columns)
    kind, head = KINDS[task.head], KINDS[task.head].head_for(task, rows)
    if config.features.variant:
        head = replace(head, features=config.features)
    dev_rows = _dev_rows(task, splits, columns, head)
    loaded = _start(source, head, config)
    positions = loaded.model.encoder.config
    max_length = config.data.max_length or min(task.max_length, positions.max_positions)
    check_length(max_length, positions)
    limits = Limits(max_length, config.data.stride, config.data.max_query, config.data.max_answer)
    encoded = kind.encode(rows, loaded.tokenizer, limits, head, labelled=True)
    if encoded.shortened:
        said.append(
            f"{encoded.shortened} of {len(rows)} texts did not fit whole into {max_length} tokens; see data.max_length"
        )
    for line in said:
        say(f"note: {line}")
    facts = {"start": str(source), "labels": list(head.labels), "rows": len(rows)}
    endings = max(1, head.num_choices)
    count = len(rows) if head.features is not None else len(encoded.examples) // endings
    steps = config.train.num_steps(count)
    found, finished = open_run(run, to_dict(config), facts, resume)
    counts = {"rows": len(rows), "labels": len(head.labels)}
    if finished:
        return {**counts, **runlog.last_scores(run)}
    network = load_folder(found[0]).model if found is not None and distributed.is_main() else loaded.model
    assert isinstance(network, TaskModel)
    network.to(where)
    network.encoder.gradient_checkpointing = config.train.gradient_checkpointing
    network.class_weights = class_weights(rows, head, config.data.class_weights, config.data.balanced)
    kept = {"stride": limits.stride, "max_query": limits.max_query, "max_answer": limits.max_answer}
    notes = Notes(config.task, asdict(columns), max_length, limits=dict(kept) if task.head == "span" else {})
    predictor = Predictor(Loaded(run, network, loaded.tokenizer, notes), where)
    examples = encoded.examples
    if head.features is not None:
        examples = frozen_examples(predictor, rows, head, max_length, run / STATES)

    def batches(step: int, share: float) -> list[Batch]:
        rank, ranks = distributed.rank(), distributed.ranks()
        return micro_batches(examples, step, config.train, max_length, rank, ranks, endings)

    def save(folder: Path, tensors: Any) -> None:
        save_folder(folder, network, loaded.tokenizer, predictor.notes, tensors)

    scores = fit(
        network,
        batches,
        config.train,
        steps,
        run,
        save=save,
        evaluate=(lambda: evaluate(predictor, task, dev_rows)) if dev_rows else None,
        goal=task.metrics[0],
        resume=found,
        title=f"fine-tuning {config.task}",
    )
    _write_answers(predictor, task, splits, columns, dev_rows, run)
    finish_run(run, network, save)
    if distributed.is_main():
        shutil.rmtree(run / STATES, ignore_errors=True)
    return {**counts, **scores}


def evaluate(predictor: Predictor, task: Task, dev_rows: dict[str, list[Row]]) -> dict[str, float]:
    """The scores on every dev file; where a question may have no answer, the threshold is chosen here (section 4.3)."""
    scores: dict[str, float] = {}
    for prefix, rows in dev_rows.items():
        if task.head == "span" and task.no_answer:
            threshold = choose_threshold(task, rows, list(predictor.predict_rows(rows)))
            limits = {name: value for name, value in predictor.notes.limits.items() if name != "threshold"}
            limits |= {} if threshold is None else {"threshold": threshold}
            predictor.notes = replace(predictor.notes, limits=limits)
        found = predictor.evaluate(rows)
        scores |= {f"{prefix}_{name}" if prefix else name: value for name, value in found.items()}
    return scores


def _write_answers(
    predictor: Predictor, task: Task, splits: Splits, columns: Columns, dev_rows: dict[str, list[Row]], run: Path
) -> None:
    """The files that GLUE's server and SQuAD's scripts take, in `predictions`."""
    if task.own:
        return
    tests = {name: list(read_task(task, paths, columns, labelled=False)) for name, paths in splits.test.items()}
    wanted = dev_rows if task.head == "span" else tests
    for name, rows in wanted.items():
        answers = list(predictor.predict_rows(rows))
        if distributed.is_main():
            write_answers(task, run / "predictions", name, rows, answers)


def micro_batches(
    examples: Sequence[Example],
    step: int,
    train: TrainConfig,
    max_length: int,
    rank: int = 0,
    ranks: int = 1,
    endings: int = 1,
) -> list[Batch]:
    """A process's batches of a step: rows in an order that each epoch draws anew; the run's last one may be smaller.

    A row is as many examples as there are `endings` to choose from, which stay together.
    """
    count = len(examples) // endings
    samples = step * train.batch_size + np.arange(train.batch_size)
    by_epochs = train.epochs is not None and train.steps is None and train.hours is None
    last = int((train.epochs or 0) * count) if by_epochs else np.inf
    epochs, places = np.divmod(samples[samples < last], count)
    rows = [
        int(draws.permute(place, count, train.seed, epoch, ORDER)) for epoch, place in zip(epochs, places, strict=True)
    ]
    size = train.micro_size(max_length) if endings == 1 else max(1, train.micro_size(max_length) // endings)
    batches = []
    for begin, is_idle in share(range(0, len(rows), size), rank, ranks):
        chosen = rows[begin : begin + size]
        parts = [examples[i] for row in chosen for i in range(row * endings, (row + 1) * endings)]
        batch = collate(parts, packed=True, indices=np.array(chosen))
        batches.append(batch.idle() if is_idle else batch)
    return batches


def _start(source: Path, head: HeadConfig, config: FinetuneConfig) -> Loaded:
    """The pre-trained encoder with a fresh output layer; the pooler comes along where the folder has one."""
    torch.manual_seed(draws.seed(config.train.seed, HEAD_WEIGHTS))
    loaded = load_folder(source, head)
    if config.random_start:
        model = TaskModel(Encoder(loaded.model.encoder.config), head)
        return Loaded(loaded.folder, model, loaded.tokenizer, loaded.notes)
    return loaded


def _dev_rows(task: Task, splits: Splits, columns: Columns, head: HeadConfig) -> dict[str, list[Row]]:
    """The dev rows; a label that training has not seen is refused before the first step."""
    found = {name: list(read_task(task, paths, columns, labelled=True)) for name, paths in splits.dev.items()}
    for rows in found.values():
        for row in rows:
            KINDS[head.kind].check(row, head)
    if found and task.head == "tags":
        seqeval_metrics()
    return found
