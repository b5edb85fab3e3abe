"""Fine-tuning: labelled rows and a pre-trained model to a model with an output layer (BERT paper, section 4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith import draws
from bertsmith.batch import Batch, Example, collate
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
from bertsmith.training import runlog
from bertsmith.training.fit import fit
from bertsmith.training.run import finish_run, is_finished, open_run
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
    task, where, run = find_task(config.task), pick_device(device), Path(out)
    source = find_model(model)
    rows = list(read_rows(data, config.data.columns, labelled=True))
    head = head_for(task, rows)
    loaded = _start(source, head, config)
    check_length(config.data.max_length, loaded.model.encoder.config)
    examples, shortened = encode_rows(rows, loaded.tokenizer, config.data.max_length, head, labelled=True)
    dev_rows = _dev_rows(dev, config, head) if dev is not None else None
    if shortened:
        say(f"note: {shortened} of {len(rows)} texts were cut to {config.data.max_length} tokens; see data.max_length")
    facts = {"start": str(source), "labels": list(head.labels), "rows": len(rows)}
    checkpoint = open_run(run, to_dict(config), facts, resume)
    if is_finished(run):
        return {"rows": len(rows), "labels": len(head.labels), **runlog.last_scores(run)}
    notes = Notes(config.task, asdict(config.data.columns), config.data.max_length)
    network = load_folder(checkpoint[0]).model if checkpoint is not None else loaded.model
    assert isinstance(network, TaskModel)
    network.to(where)
    network.encoder.gradient_checkpointing = config.train.gradient_checkpointing
    predictor = Predictor(Loaded(run, network, loaded.tokenizer, notes), where)

    def save(folder: Path) -> None:
        save_folder(folder, network, loaded.tokenizer, notes)

    scores = fit(
        network,
        lambda step: micro_batches(examples, step, config.train),
        config.train,
        config.train.num_steps(len(examples)),
        run,
        save=save,
        evaluate=(lambda: predictor.evaluate(dev_rows)) if dev_rows is not None else None,
        resume=checkpoint,
        title=f"fine-tuning {config.task}",
    )
    finish_run(run, save)
    return {"rows": len(rows), "labels": len(head.labels), **scores}


def micro_batches(examples: list[Example], step: int, train: TrainConfig) -> list[Batch]:
    """The batches of a step: rows in an order that each epoch draws anew; the last one of the run may be smaller."""
    samples = step * train.batch_size + np.arange(train.batch_size)
    epochs, places = np.divmod(samples, len(examples))
    last = int((train.epochs or np.inf) * len(examples)) if train.steps is None else np.inf
    chosen = [
        examples[int(draws.permute(place, len(examples), train.seed, epoch, ORDER))]
        for sample, epoch, place in zip(samples, epochs, places, strict=True)
        if sample < last
    ]
    size = train.micro_size
    return [collate(chosen[i : i + size], packed=True) for i in range(0, len(chosen), size)]


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
