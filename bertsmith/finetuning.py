"""Fine-tuning: labelled rows and a pre-trained model to a model with an output layer (BERT paper, section 4)."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bertsmith import draws
from bertsmith.batch import Batch, largest_id, share
from bertsmith.config import Bounds, check_bounds, to_dict
from bertsmith.errors import UserError
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model
from bertsmith.formats.saved_config import head_in, read_config
from bertsmith.frozen import STATES, FrozenExamples, check_features, frozen_examples
from bertsmith.model.encoder import Encoder, init_weights
from bertsmith.model.fast import can_fuse
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.predictor import Predictor
from bertsmith.pretraining import check_length
from bertsmith.progress import say
from bertsmith.tasks.collapse import collapse, guess_loss, same_answer
from bertsmith.tasks.description import Limits, Task
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.files import write_answers
from bertsmith.tasks.judged import write_judged
from bertsmith.tasks.metrics import seqeval_metrics
from bertsmith.tasks.reading import Splits, find_splits, guessed_columns, read_task, training_rows
from bertsmith.tasks.row_cache import encode_once, rows_hash
from bertsmith.tasks.rows import Columns, Row
from bertsmith.tasks.sequences import class_weights
from bertsmith.tasks.spans import answers_of, choose_threshold, keys_of, stride_note
from bertsmith.tasks.task import KINDS, find_task
from bertsmith.training import distributed, runlog
from bertsmith.training.fit import fit
from bertsmith.training.restarts import seed_now, starts_again
from bertsmith.training.run import final_scores, finish_run, open_run
from bertsmith.training.settings import TrainConfig, autocast_dtype, pick_device

HEAD_WEIGHTS, ORDER = 105, 106  # streams of draws


@dataclass(frozen=True)
class FinetuneData:
    """How rows are read and encoded; `max_length` is the task's own where it is not set.

    Answers are looked for in windows that begin `stride` tokens apart; a question keeps `max_query` tokens, an answer
    has at most `max_answer`. Rows of a class count `class_weights` times, or, `balanced`, all classes count alike.
    `partial` says that the rows are only a part of their data set, so that reports mark the scores. With `skip_bad`,
    rows that cannot be used (an empty text, no label) are left out and counted; else they end the run.
    """

    max_length: int | None = None
    columns: Columns = field(default_factory=Columns)
    stride: int = 128
    max_query: int = 64
    max_answer: int = 30
    class_weights: dict[str, float] = field(default_factory=dict)
    balanced: bool = False
    partial: bool = False
    skip_bad: bool = False
    BOUNDS = {
        "max_length": Bounds(8, 2**24),
        "stride": Bounds(1, 2**24),
        "max_query": Bounds(1, 2**24),
        "max_answer": Bounds(1, 2**24),
        "class_weights": Bounds(0, 10**9),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "data.")


@dataclass(frozen=True)
class FinetuneConfig:
    """One complete fine-tuning run. `random_start` keeps the model's shape and tokenizer but not its weights.

    A run that collapses starts again with another seed, at most `restarts` times. The top `reinit_layers` layers and
    the pooler start anew (Zhang et al. 2021); `frozen_layers` keeps the embeddings and as many of the lowest layers as
    they are (0: the embeddings alone). With a variant of `features` the encoder is not trained: a BiLSTM on its states
    is (section 5.3). `bilstm_layers` puts a random BiLSTM between the encoder and the output layer, trained with them
    (Table 5); `beside` is a second model that reads the other way, whose states stand beside the first one's. `dropout`
    is set everywhere instead of the model's own: one that was pre-trained without any may still need some here.
    """

    task: str
    data: FinetuneData = field(default_factory=FinetuneData)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(epochs=3, batch_size=32, learning_rate=5e-5, warmup=0.1)
    )
    random_start: bool = False
    restarts: int = 2
    reinit_layers: int = 0
    frozen_layers: int | None = None
    features: FeatureConfig = field(default_factory=FeatureConfig)
    bilstm_layers: int = 0
    beside: str = ""
    dropout: float | None = None
    BOUNDS = {
        "restarts": Bounds(0, 1000),
        "reinit_layers": Bounds(0, 1000),
        "frozen_layers": Bounds(0, 1000),
        "bilstm_layers": Bounds(0, 100),
        "dropout": Bounds(0, 1, "[)"),
    }

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.features.variant and (self.bilstm_layers or self.beside):
            name = "bilstm_layers" if self.bilstm_layers else "beside"
            raise UserError(f"--features trains a BiLSTM on a frozen encoder, and {name} is for one that is trained")


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
    where = pick_device(device, config.train.precision)
    with distributed.processes(where), distributed.locked(out):
        source, scores = find_model(model), None
        while scores is None:
            scores = _finetune(config, source, data, Path(out), dev, where, resume)
            resume = True  # a run that has collapsed goes on, from its beginning
        return scores


def _finetune(
    config: FinetuneConfig,
    source: Path,
    data: str | Path,
    run: Path,
    dev: str | Path | None,
    where: torch.device,
    resume: bool,
) -> dict[str, Any] | None:
    """Gives the scores, or None where the run has collapsed and is ready to start again."""
    restarts = config.restarts if config.train.hours is None else 0  # by the clock there is no time for another
    given, seed = config, seed_now(run, config.train.seed, restarts)
    config = replace(config, train=replace(config.train, seed=seed))
    task = find_task(config.task)
    check_features(config.features, task)
    splits = find_splits(task, data, dev)
    command = f"bertsmith finetune {task.name} --model {source} --data {data} --out {run}"
    columns = guessed_columns(task, splits.train[0], config.data.columns, command)
    rows, said = training_rows(task, splits.train, columns, skip_bad=config.data.skip_bad)
    head = KINDS[task.head].head_for(task, rows)
    head = replace(head, features=config.features if config.features.variant else None)
    head = replace(head, bilstm_layers=config.bilstm_layers, beside=bool(config.beside))
    dev_rows = _dev_rows(task, splits, columns, head, config.data.skip_bad)
    if not dev_rows:
        config.train.refuse_without_scores("give --dev")
    loaded = _start(source, head, config)
    positions = loaded.model.encoder.config
    max_length = config.data.max_length or min(task.max_length, positions.max_positions)
    check_length(max_length, positions)
    limits = Limits(max_length, config.data.stride, config.data.max_query, config.data.max_answer)
    if task.head == "span" and (line := stride_note(limits)):
        said.append(line)
    weights = class_weights(rows, head, config.data.class_weights, config.data.balanced)
    encoded = encode_once(rows, loaded.tokenizer, limits, head, labelled=True)
    loaded.model.encoder.check_ids(largest_id(encoded.examples.tokens), largest_id(encoded.examples.segments))
    if encoded.shortened:
        said.append(
            f"{encoded.shortened} of {len(rows)} texts did not fit whole into {max_length} tokens; see data.max_length"
        )
    for line in said:
        say(f"note: {line}")
    facts = {"start": str(source), "labels": list(head.labels), "rows": len(rows), "rows_hash": rows_hash(rows)}
    facts |= {"dev_rows_hash": rows_hash(row for part in dev_rows.values() for row in part)}
    endings = max(1, head.num_choices)
    count = len(rows) if head.features is not None else len(encoded.examples) // endings
    steps = config.train.num_steps(count)
    found, finished = open_run(run, to_dict(given), facts, resume, {"start_task": _start_task(loaded)})
    counts = {"rows": len(rows), "labels": len(head.labels)}
    if finished:
        return {**counts, **final_scores(run)}
    network = load_folder(found[0]).model if found is not None and distributed.is_main() else loaded.model
    assert isinstance(network, TaskModel)
    network.to(where)
    _freeze(network, config.frozen_layers)
    for encoder in network.encoders:
        encoder.gradient_checkpointing = config.train.gradient_checkpointing
    network.class_weights = weights
    kept: dict[str, float | None] = {}
    if task.head == "span":
        kept = {"stride": limits.stride, "max_query": limits.max_query, "max_answer": limits.max_answer}
        if all(map(answers_of, rows)):
            kept["threshold"] = None  # there is always an answer
    notes = Notes(config.task, asdict(columns), max_length, limits=kept)
    predictor = Predictor(Loaded(run, network, loaded.tokenizer, notes), where)
    predictor.encode = encode_once  # the dev rows are the same at every evaluation, and in the next run
    examples: Examples | FrozenExamples = encoded.examples
    if head.features is not None:
        examples = frozen_examples(predictor, rows, head, max_length, run / STATES)

    def batches(step: int, share: float) -> list[Batch]:
        rank, ranks = distributed.rank(), distributed.ranks()
        return micro_batches(examples, step, config.train, max_length, rank, ranks, endings)

    def save(folder: Path, tensors: Any) -> None:
        save_folder(folder, network, loaded.tokenizer, predictor.notes, tensors)

    def load(folder: Path) -> dict[str, torch.Tensor]:
        best = load_folder(folder)
        predictor.notes = best.notes  # a threshold belongs to the model that it was chosen for
        return best.model.state_dict()

    noticed, answered = dict[str, str](), dict[str, list[dict[str, Any]]]()
    scores = fit(
        network,
        batches,
        replace(config.train, workers=config.train.workers or 0),  # cut out of arrays faster than sent by a process
        steps,
        run,
        save=save,
        load=load,
        evaluate=(lambda: evaluate(predictor, task, dev_rows, noticed, answered)) if dev_rows else None,
        goal=_goal(task, head),
        resume=found,
        recordable=can_fuse(positions, where, autocast_dtype(config.train.precision, where)),
        title=f"fine-tuning {config.task}",
    )
    guess = guess_loss(rows, head, network.class_weights)
    why = distributed.by_main(lambda: collapse(runlog.last_loss(run), guess, noticed.get("", "")))
    if why and starts_again(run, seed, scores["steps"], restarts, why):
        return None
    if "best_step" in scores or task.no_answer:  # another model, or a threshold chosen since
        answered.clear()
    _write_answers(predictor, task, splits, columns, dev_rows, run, answered)
    finish_run(run, network, save)
    if distributed.is_main():
        shutil.rmtree(run / STATES, ignore_errors=True)
    return {**counts, **scores}


def _goal(task: Task, head: HeadConfig) -> str:
    """The score that makes a model the best: the task's first; of tags that mark no entities the accuracy."""
    entities = head.kind != "tags" or any(label.startswith(("B-", "I-")) for label in head.labels)
    return task.metrics[0] if entities else "accuracy"


def evaluate(
    predictor: Predictor,
    task: Task,
    dev_rows: dict[str, list[Row]],
    noticed: dict[str, str],
    answered: dict[str, list[dict[str, Any]]],
) -> dict[str, float]:
    """The scores on every dev file; where a question may have no answer, the threshold is chosen here (section 4.3).

    `noticed` is told where all rows of a file get the same answer, `answered` keeps the answers.
    """
    scores: dict[str, float] = {}
    head, predictor.shortened = predictor.head, 0
    for prefix, rows in dev_rows.items():
        answers = list(predictor.predict_rows(rows))
        noticed[prefix], answered[prefix] = same_answer(rows, answers, head), answers
        if task.head == "span" and task.no_answer:
            threshold = choose_threshold(task, rows, answers)
            predictor.notes = replace(predictor.notes, limits={**predictor.notes.limits, "threshold": threshold})
        found = KINDS[head.kind].score(predictor.task, rows, answers, head, predictor.limits)
        scores |= {f"{prefix}_{name}" if prefix else name: value for name, value in found.items()}
    return scores


def _write_answers(
    predictor: Predictor,
    task: Task,
    splits: Splits,
    columns: Columns,
    dev_rows: dict[str, list[Row]],
    run: Path,
    answered: dict[str, list[dict[str, Any]]],
) -> None:
    """What a report shows of the dev rows, and, in `predictions`, the files of GLUE's server and SQuAD's scripts."""
    if not answered:
        predictor.shortened = 0  # until here, the dev rows of an evaluation
    judged = {name: answered.get(name) or list(predictor.predict_rows(rows)) for name, rows in dev_rows.items()}
    if judged and distributed.is_main():
        write_judged(run, task, predictor.head, dev_rows, judged)
    for name, paths in splits.official(task).items():
        is_dev = task.head == "span"
        rows = dev_rows[name] if is_dev else list(read_task(task, paths, columns, labelled=False))
        answers = judged[name] if is_dev else list(predictor.predict_rows(rows))
        if distributed.is_main():
            write_answers(task, run / "predictions", name, rows, answers)
    if predictor.shortened:
        say(f"note: {predictor.shortened} dev and test texts did not fit whole into {predictor.max_length} tokens")


def micro_batches(
    examples: Examples | FrozenExamples,
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
    by_epochs = train.epochs is not None and train.steps is None and train.hours is None
    last = max(1, int((train.epochs or 0) * count)) if by_epochs else sys.maxsize
    begin = step * train.batch_size
    rows = draws.in_epochs(begin, min(begin + train.batch_size, last), count, train.seed, ORDER)
    size = train.micro_size(max_length) if endings == 1 else max(1, train.micro_size(max_length) // endings)
    batches = []
    for place, is_idle in share(range(0, len(rows), size), rank, ranks):
        batch = examples.batch(rows[place : place + size])
        batches.append(batch.idle() if is_idle else batch)
    return batches


def _start(source: Path, head: HeadConfig, config: FinetuneConfig) -> Loaded:
    """The pre-trained encoder with a fresh output layer; the pooler comes along where the folder has one."""
    torch.manual_seed(draws.seed(config.train.seed, HEAD_WEIGHTS))
    loaded = load_folder(source, head, dropout=config.dropout)
    model = loaded.model
    assert isinstance(model, TaskModel)
    _check_layers(config, model.encoder.config.num_layers)
    if config.beside:
        _put_beside(model, loaded, load_folder(find_model(config.beside), dropout=config.dropout))
    if config.random_start:
        model = TaskModel(Encoder(model.encoder.config), head)
    elif config.reinit_layers:
        parts = [part for e in model.encoders for part in (*e.layers[-config.reinit_layers :], e.final_norm)]
        for part in (*parts, getattr(model.head, "pooler", None)):
            if part is not None:
                init_weights(part, model.encoder.config.init_std)
    return replace(loaded, model=model)


def _put_beside(model: TaskModel, loaded: Loaded, other: Loaded) -> None:
    """Give the second encoder the weights of a folder, which has to be the first one's mirror image."""
    assert model.beside is not None
    if other.model.encoder.config != model.beside.config or other.tokenizer.hash != loaded.tokenizer.hash:
        raise UserError(
            f"beside: {other.folder} is not the same encoder as {loaded.folder}, read the other way: the size, the "
            f"vocabulary or the direction ({other.model.encoder.config.direction}) differs"
        )
    model.beside.load_state_dict(other.model.encoder.state_dict())


def _start_task(loaded: Loaded) -> str:
    """The task that a start was trained for: `pretrain`, or nothing where that is not known."""
    saved = head_in(read_config(loaded.folder), loaded.folder)
    return loaded.notes.task or ("" if saved is None else "an unnamed task")


def _check_layers(config: FinetuneConfig, layers: int) -> None:
    """Refuse layers that the model does not have, and random ones that would not be trained."""
    anew, frozen = config.reinit_layers, config.frozen_layers
    for name, value in (("reinit_layers", anew), ("frozen_layers", frozen)):
        if (value or 0) > layers:
            raise UserError(f"{name} is {value}, and the model has {layers} layers")
    if frozen is not None and (config.random_start or anew + frozen > layers):
        which = "random_start" if config.random_start else f"reinit_layers {anew}"
        raise UserError(f"{which} and frozen_layers {frozen}: random layers would never be trained; leave one out")


def _freeze(network: TaskModel, layers: int | None) -> None:
    """Keep the embeddings and the lowest layers as they are."""
    if layers is not None:
        for encoder in network.encoders:
            encoder.embeddings.requires_grad_(False)
            encoder.layers[:layers].requires_grad_(False)


def _dev_rows(task: Task, splits: Splits, columns: Columns, head: HeadConfig, skip_bad: bool) -> dict[str, list[Row]]:
    """The dev rows; a label that training has not seen is refused before the first step."""
    found = {
        name: list(read_task(task, paths, columns, labelled=True, skip_bad=skip_bad))
        for name, paths in splits.dev.items()
    }
    for rows in found.values():
        for row in rows:
            KINDS[head.kind].check(row, head)
        if task.head == "span":
            keys_of(rows)  # answers are written under them
    if found and task.head == "tags":
        seqeval_metrics()
    return found
