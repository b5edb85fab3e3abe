"""Fine-tuning: labelled rows and a pre-trained model to a model with an output layer (BERT paper, section 4)."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bertsmith import draws
from bertsmith.batch import Batch, largest_id, split_for_rank
from bertsmith.config import override, to_dict, with_short
from bertsmith.errors import Diverged, NotFinite, UserError
from bertsmith.finetuning.collapse import collapse, guess_loss, same_answer
from bertsmith.finetuning.dev_split import hold_out
from bertsmith.finetuning.frozen import STATES, FrozenExamples, check_features, frozen_examples
from bertsmith.finetuning.restarts import seed_now, starts_again
from bertsmith.finetuning.row_cache import encode_once, rows_hash
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.card import write_card
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model, hub_name
from bertsmith.formats.saved_config import head_in, read_config
from bertsmith.inference.predictor import Predictor
from bertsmith.model.encoder import Encoder, init_weights
from bertsmith.model.fused_choice import can_fuse
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.pretraining.run import check_length
from bertsmith.progress import say
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks.description import Limits, Task
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.judged import write_judged
from bertsmith.tasks.metrics import seqeval_metrics
from bertsmith.tasks.prediction_files import write_answers
from bertsmith.tasks.reading import Splits, find_splits, guessed_columns, read_task, training_rows
from bertsmith.tasks.sequences import class_weights
from bertsmith.tasks.spans import answers_of, choose_threshold, keys_of, stride_note
from bertsmith.tasks.task import KINDS, find_task
from bertsmith.text.unknown import Unknowns
from bertsmith.training import distributed, runlog
from bertsmith.training.fit import fit
from bertsmith.training.run import final_scores, finish_run, open_run
from bertsmith.training.settings import TrainConfig, autocast_dtype, pick_device

HEAD_WEIGHTS, ORDER = 105, 106  # streams of draws


def finetune(
    task: str | FinetuneConfig,
    model: str | Path,
    data: Any,
    out: str | Path = "finetuned",
    *,
    dev: Any = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    learning_rate: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    skip_bad: bool | None = None,
    device: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train all parameters with a new output layer; `out/model` is the finished model. Gives the dev scores.

    `task` is a task's name or a whole configuration; `data` and `dev` are files, the folder of a data set, or rows in
    memory: dicts, tuples `(text, label)` or `(text, pair, label)`, a table of pandas, polars, pyarrow or `datasets`.
    Columns that are not named are guessed. Without `dev`, a tenth of the rows is held out to score on.

    >>> import bertsmith
    >>> rows = [(f"The battery of phone {n} died.", "bad") for n in range(20)]
    >>> rows += [(f"I love phone {n}.", "good") for n in range(20)]
    >>> bertsmith.finetune("classify", "bert-base-uncased", rows, "reviews", learning_rate=3e-5, epochs=4)
    {'rows': 35, 'labels': 2, ...'accuracy': ...}
    >>> bertsmith.Predictor.load("reviews")("It broke.")
    {'label': ..., 'score': ..., 'scores': {'bad': ..., 'good': ...}}
    """
    short = {"text": text, "pair": pair, "label": label, "learning_rate": learning_rate, "epochs": epochs}
    short |= {"steps": steps, "batch_size": batch_size, "max_length": max_length, "seed": seed, "skip_bad": skip_bad}
    start = FinetuneConfig(task) if isinstance(task, str) else task
    config = override(start, with_short([], **short))
    sources = find_splits(find_task(config.task), data, dev)
    where = pick_device(device, config.train.precision)
    with distributed.process_group(where), distributed.locked(out):
        source, scores = find_model(model), None
        while scores is None:
            scores = _finetune(config, source, sources, Path(out), where, resume)
            resume = True  # a run that has collapsed goes on, from its beginning
        return scores


def _finetune(
    config: FinetuneConfig, source: Path, splits: Splits, run: Path, where: torch.device, resume: bool
) -> dict[str, Any] | None:
    """Gives the scores, or None where the run has collapsed and is ready to start again."""
    restarts = config.restarts if config.train.hours is None else 0  # by the clock there is no time for another
    given, seed = config, seed_now(run, config.train.seed, restarts)
    config = replace(config, train=replace(config.train, seed=seed))
    task = find_task(config.task)
    check_features(config.features, task)
    command = f"bertsmith finetune {task.name} --model {source} --data {splits.train[0]} --out {run}"
    columns = guessed_columns(task, splits.train[0], config.data.columns, command)
    rows, said = training_rows(task, splits.train, columns, skip_bad=config.data.skip_bad)
    head = KINDS[task.head].head_for(task, rows)
    head = replace(head, features=config.features if config.features.variant else None)
    head = replace(head, bilstm_layers=config.bilstm_layers, beside=bool(config.beside))
    dev_rows = _dev_rows(task, splits, columns, config.data.skip_bad)
    if not dev_rows and config.data.dev_share:
        rows, dev_rows, what = hold_out(rows, head, config.data.dev_share)
        said.append(what)
    _check_dev(dev_rows, head)
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
    unknowns = Unknowns(loaded.tokenizer)
    unknowns.add_framed(encoded.examples.tokens)
    if warning := unknowns.warning("the training rows"):
        say(f"warning: {warning}")
    facts = {"start": str(source), "labels": list(head.labels), "rows": len(rows), "rows_hash": rows_hash(rows)}
    facts |= {"dev_rows_hash": rows_hash(row for part in dev_rows.values() for row in part)}
    endings = max(1, head.num_choices)
    count = len(rows) if head.features is not None else len(encoded.examples) // endings
    steps = config.train.num_steps(count)
    found, finished = open_run(run, given, facts, resume, {"start_task": _start_task(loaded)})
    counts = {"rows": len(rows), "labels": len(head.labels), "unknown_percent": round(100 * unknowns.share, 2)}
    if finished:
        return {**counts, **final_scores(run)}
    network = load_folder(found[0]).model if found is not None and distributed.is_rank_zero() else loaded.model
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
        rank, ranks = distributed.rank(), distributed.world_size()
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
        capturable=can_fuse(positions, where, autocast_dtype(config.train.precision, where)),
        title=f"fine-tuning {config.task}",
    )
    guess = guess_loss(rows, head, network.class_weights)
    why = distributed.on_rank_zero(lambda: collapse(runlog.last_loss(run), guess, noticed.get("", "")))
    if why and starts_again(run, seed, scores["steps"], restarts, why):
        return None
    if "best_step" in scores or task.no_answer:  # another model, or a threshold chosen since
        answered.clear()
    _write_answers(predictor, task, splits, columns, dev_rows, run, answered)

    def save_with_card(folder: Path, tensors: Any) -> None:
        save(folder, tensors)
        told, train = f"{len(rows):,} labelled rows", to_dict(config)["train"]
        write_card(folder, data=told, settings=train, scores=final_scores(run), base_model=hub_name(source))

    finish_run(run, network, save_with_card)
    if distributed.is_rank_zero():
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
        answers = _answers(predictor, rows)
        noticed[prefix], answered[prefix] = same_answer(rows, answers, head), answers
        if task.head == "span" and task.no_answer:
            threshold = choose_threshold(task, rows, answers)
            predictor.notes = replace(predictor.notes, limits={**predictor.notes.limits, "threshold": threshold})
        found = KINDS[head.kind].score(predictor.task, rows, answers, head, predictor.limits)
        scores |= {f"{prefix}_{name}" if prefix else name: value for name, value in found.items()}
    return scores


def _answers(predictor: Predictor, rows: list[Row]) -> list[dict[str, Any]]:
    """What the model in training answers; where its scores are not finite, the run has diverged."""
    try:
        return list(predictor.predict_rows(rows))
    except NotFinite:
        raise Diverged(
            "the model's scores of dev or test rows are not finite numbers: training has diverged. Lower "
            "train.learning_rate or raise train.warmup"
        ) from None


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
    judged = {name: answered.get(name) or _answers(predictor, rows) for name, rows in dev_rows.items()}
    if judged and distributed.is_rank_zero():
        write_judged(run, task, predictor.head, dev_rows, judged)
    for name, paths in splits.official(task).items():
        is_dev = task.head == "span"
        rows = dev_rows[name] if is_dev else list(read_task(task, paths, columns, labelled=False))
        answers = judged[name] if is_dev else _answers(predictor, rows)
        if distributed.is_rank_zero():
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
    for place, is_idle in split_for_rank(range(0, len(rows), size), rank, ranks):
        batch = examples.batch(rows[place : place + size])
        batches.append(batch.zero_weight() if is_idle else batch)
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


def _dev_rows(task: Task, splits: Splits, columns: Columns, skip_bad: bool) -> dict[str, list[Row]]:
    return {
        name: list(read_task(task, paths, columns, labelled=True, skip_bad=skip_bad))
        for name, paths in splits.dev.items()
    }


def _check_dev(dev_rows: dict[str, list[Row]], head: HeadConfig) -> None:
    """Refuse dev rows that cannot be scored, as with a label that training has not seen, before the first step."""
    for rows in dev_rows.values():
        for row in rows:
            KINDS[head.kind].check(row, head)
        if head.kind == "span":
            keys_of(rows)  # answers are written under them
    if dev_rows and head.kind == "tags":
        seqeval_metrics()
