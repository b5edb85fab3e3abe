"""Fine-tuning: labelled rows and a pre-trained model to a model with an output layer (BERT paper, section 4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.predict import Predictor
from bertsmith.pretrain import check_length
from bertsmith.progress import say
from bertsmith.tasks.rows import Columns, Row, read_rows
from bertsmith.tasks.task import encode_rows, find_task, head_for, target
from bertsmith.training import distributed, runlog
from bertsmith.training.fit import fit
from bertsmith.training.run import finish_run, open_run
from bertsmith.training.settings import TrainConfig, pick_device

HEAD_WEIGHTS, ORDER = 105, 106  # streams of draws


@dataclass(frozen=True)
class FinetuneData:
    """How rows are read and encoded."""

    max_length: int = 128
    columns: Columns = field(default_factory=Columns)


@dataclass(frozen=True)
class FinetuneConfig:
    """One complete fine-tuning run. `random_start` keeps the model's shape and tokenizer but not its weights."""

    task: str
    data: FinetuneData = field(default_factory=FinetuneData)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(epochs=3, batch_size=32, learning_rate=5e-5, warmup=0.1)
    )
    random_start: bool = False


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
    rows = list(read_rows(data, config.data.columns, labelled=True))
    head = head_for(task, rows)
    loaded = _start(source, head, config)
    check_length(config.data.max_length, loaded.model.encoder.config)
    examples, shortened = encode_rows(rows, loaded.tokenizer, config.data.max_length, head, labelled=True)
    dev_rows = _dev_rows(dev, config, head) if dev is not None else None
    if shortened:
        say(f"note: {shortened} of {len(rows)} texts were cut to {config.data.max_length} tokens; see data.max_length")
    facts = {"start": str(source), "labels": list(head.labels), "rows": len(rows)}
    found, finished = open_run(run, to_dict(config), facts, resume)
    if finished:
        return {"rows": len(rows), "labels": len(head.labels), **runlog.last_scores(run)}
    notes = Notes(config.task, asdict(config.data.columns), config.data.max_length)
    network = load_folder(found[0]).model if found is not None and distributed.is_main() else loaded.model
    assert isinstance(network, TaskModel)
    network.to(where)
    network.encoder.gradient_checkpointing = config.train.gradient_checkpointing
    predictor = Predictor(Loaded(run, network, loaded.tokenizer, notes), where)

    def batches(step: int, share: float) -> list[Batch]:
        return micro_batches(
            examples, step, config.train, config.data.max_length, distributed.rank(), distributed.ranks()
        )

    def save(folder: Path, tensors: Any) -> None:
        save_folder(folder, network, loaded.tokenizer, notes, tensors)

    scores = fit(
        network,
        batches,
        config.train,
        config.train.num_steps(len(examples)),
        run,
        save=save,
        evaluate=(lambda: predictor.evaluate(dev_rows)) if dev_rows is not None else None,
        goal=task.metrics[0],
        resume=found,
        title=f"fine-tuning {config.task}",
    )
    finish_run(run, network, save)
    return {"rows": len(rows), "labels": len(head.labels), **scores}


def micro_batches(
    examples: list[Example], step: int, train: TrainConfig, max_length: int, rank: int = 0, ranks: int = 1
) -> list[Batch]:
    """A process's batches of a step: rows in an order that each epoch draws anew; the run's last one may be smaller."""
    samples = step * train.batch_size + np.arange(train.batch_size)
    last = int((train.epochs or np.inf) * len(examples)) if train.steps is None and train.epochs else np.inf
    epochs, places = np.divmod(samples[samples < last], len(examples))
    rows = [
        int(draws.permute(place, len(examples), train.seed, epoch, ORDER))
        for epoch, place in zip(epochs, places, strict=True)
    ]
    size = train.micro_size(max_length)
    batches = []
    for begin, is_idle in share(range(0, len(rows), size), rank, ranks):
        chosen = rows[begin : begin + size]
        batch = collate([examples[row] for row in chosen], packed=True, indices=np.array(chosen))
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


def _dev_rows(dev: str | Path, config: FinetuneConfig, head: HeadConfig) -> list[Row]:
    rows = list(read_rows(dev, config.data.columns, labelled=True))
    for row in rows:
        target(row, head)  # a label that training has not seen is refused before the first step
    if not rows:
        raise UserError(f"{dev} holds no rows")
    return rows
