"""Fine-tuning: labelled rows and a pre-trained model to a model with an output layer (BERT paper, section 4)."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.batch import Batch, largest_id
from bertsmith.config import override, to_dict, with_short
from bertsmith.errors import UserError
from bertsmith.finetuning.batches import micro_batches
from bertsmith.finetuning.collapse import collapse
from bertsmith.finetuning.data import RunData, class_weights, read_data
from bertsmith.finetuning.frozen import STATES, FrozenExamples, frozen_examples, measure_states, stores_states
from bertsmith.finetuning.model import freeze, start_at_numbers, start_model, start_task, with_settings_of_family
from bertsmith.finetuning.restarts import seed_now, starts_again
from bertsmith.finetuning.row_cache import encode_once, rows_hash
from bertsmith.finetuning.scoring import DevScores, write_predictions
from bertsmith.finetuning.settings import EPOCHS, FinetuneConfig
from bertsmith.finetuning.teacher import find_teacher
from bertsmith.formats.card import write_card
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model, known_name, usual_model
from bertsmith.inference.predictor import Predictor
from bertsmith.model.fused_choice import choose_for_run
from bertsmith.model.heads import TaskModel
from bertsmith.pretraining.checks import check_length
from bertsmith.progress import say
from bertsmith.tasks.description import Encoded, Limits
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import Splits, find_splits
from bertsmith.tasks.task import find_task
from bertsmith.text.unknown import Unknowns
from bertsmith.training import distributed, runlog
from bertsmith.training.checkpoint import TrainerState
from bertsmith.training.fit import fit
from bertsmith.training.run import final_scores, finish_run, open_run, refuse_taken
from bertsmith.training.settings import autocast_dtype, pick_device


def finetune(
    task: str | FinetuneConfig,
    model: str | Path | None = None,
    data: Any = None,
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
    windows: int | None = None,
    seed: int | None = None,
    skip_bad: bool | None = None,
    teacher: str | Path | None = None,
    device: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train all parameters with a new output layer; `out/model` is the finished model. Return the dev scores.

    `task` is a task's name or a whole configuration; if `model` is None, it is the one in BERTSMITH_MODEL or the
    default model of the package. `data` and `dev` are files, the folder of a data set, or rows in memory: dicts, tuples
    `(text, label)` or `(text, pair, label)`, a table of pandas, polars, pyarrow or `datasets`. Columns that are not
    named are guessed. Without `dev`, a tenth of the rows is held out for evaluation. A text that is longer than
    `max_length` is read in up to so many `windows`, and its label is predicted from all of them. `teacher` is a
    fine-tuned model whose predictions for the training rows are learnt beside their labels.

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
    short["windows"] = windows
    short |= {"teacher": None if teacher is None else str(teacher)}
    start = FinetuneConfig(task) if isinstance(task, str) else task
    config = override(start, with_short([], **short))
    if data is None:
        raise UserError("no data is given; name a file or the folder of a data set, or give rows")
    splits = find_splits(find_task(config.task), data, dev)
    named = "" if model is None else f" --model {model}"
    command = f"bertsmith finetune {config.task}{named} --data {splits.train[0]} --out {out}"
    on = pick_device(device, config.train.precision)
    with distributed.process_group(on), distributed.locked(out):
        refuse_taken(Path(out), resume)
        source, scores = find_model(usual_model() if model is None else model), None
        while scores is None:
            scores = _finetune(config, source, splits, Path(out), on, resume, command)
            resume = True  # a run that has collapsed is resumed from its beginning
        return scores


def _finetune(
    config: FinetuneConfig, source: Path, splits: Splits, run: Path, device: torch.device, resume: bool, command: str
) -> dict[str, Any] | None:
    """Train once and return the scores, or None if the run has collapsed and is ready to start again.

    An error about columns shows `command` with the options that name them.
    """
    restarts = config.restarts if config.train.hours is None else 0  # by the clock, no time is left for another attempt
    seeded = replace(config, train=replace(config.train, seed=seed_now(run, config.train.seed, restarts)))
    data = read_data(seeded, splits, command)
    given, (config, seeded) = config, (each.with_length(len(data.rows), data.task.own) for each in (config, seeded))
    if config.train.epochs not in (given.train.epochs, EPOCHS):
        rows, epochs = len(data.rows), config.train.epochs
        data.notes.append(f"{rows} rows are few, so there are {epochs:g} epochs (--epochs, train.epochs)")
    data = replace(data, head=with_settings_of_family(data.head, data.task, seeded, source))
    loaded = start_model(source, data.head, seeded)
    if numbers := KINDS[data.head.kind].numbers(data.rows, data.head):
        data.notes.append(start_at_numbers(loaded, numbers))
    limits, ceilings = _limits(seeded, data, loaded), _ceilings(data, loaded)
    weights = class_weights(data.rows, data.head, config.data.class_weights, config.data.balanced)
    encoded = _encode(data, loaded, limits)
    if data.head.language_model:
        predicted = loaded.model.encoder.config.direction
        encoded = replace(encoded, examples=replace(encoded.examples, predicted=predicted))
    counts: dict[str, Any] = {
        "rows": len(data.rows),
        "labels": len(data.head.labels),
    }
    counts |= _unknowns(encoded, loaded) | ceilings
    stored = stores_states(data.head)
    steps = seeded.train.num_steps(len(data.rows) if stored else encoded.examples.num_rows)
    teacher = find_teacher(config, data, loaded.tokenizer, limits, device)
    facts = {**_facts(source, data), **({} if teacher is None else {"teacher": teacher.facts})}
    checkpoint, finished = open_run(run, config, facts, resume, {"start_task": start_task(loaded)})
    if finished:
        return {**counts, **final_scores(run)}
    if checkpoint is not None and distributed.is_rank_zero():
        loaded = replace(loaded, model=load_folder(checkpoint[0]).model)
    network = _trainable(loaded, seeded, weights, device)
    network.pooled_windows = limits.pooled
    if teacher is not None:
        encoded, network.soft_targets = teacher.teach(data, encoded), teacher.soft_targets
        teacher = None  # its memory is free for training
    notes = Notes(
        config.task,
        asdict(data.columns),
        limits.max_length,
        limits=KINDS[data.head.kind].limits_to_save(data.rows, limits),
    )
    predictor = Predictor(Loaded(run, network, loaded.tokenizer, notes), device)
    predictor.encode = encode_once  # the dev rows are the same at every evaluation, and in the next run
    dev = DevScores(predictor, data)
    examples = _examples(encoded, predictor, data, run)
    if checkpoint is None:
        measure_states(network, examples, device)
    scores = _train(seeded, network, dev, examples, steps, run, device, checkpoint)
    reason = _collapse(data, network, dev, run)
    if reason and starts_again(run, seeded.train.seed, scores["steps"], restarts, reason):
        return None
    if "best_step" in scores or data.task.no_answer:  # another model, or a threshold chosen since
        dev.predictions.clear()
    write_predictions(dev, splits, run)
    _finish(seeded, network, dev, run, source)
    return {**counts, **scores}


def _limits(config: FinetuneConfig, data: RunData, loaded: Loaded) -> Limits:
    """The maximum lengths of inputs and answers; a note on what they leave out."""
    encoder = loaded.model.encoder.config
    max_length = config.data.max_length or min(data.task.max_length, encoder.max_positions)
    check_length(max_length, encoder)
    limits = Limits(max_length, config.data.stride, config.data.max_query, config.data.max_answer)
    limits = replace(limits, windows=_windows(config, data), pooled=config.data.pooled)
    if note := KINDS[data.head.kind].limits_note(limits, loaded.tokenizer.frame):
        data.notes.append(note)
    return limits


def _windows(config: FinetuneConfig, data: RunData) -> int:
    """The most windows of a text; a task whose texts are never read in pooled windows is refused."""
    if config.data.windows and not KINDS[data.head.kind].reads_windows:
        raise UserError(
            f"data.windows {config.data.windows} pools the labels or numbers of a text's windows, and {data.task.name} "
            "has none; leave it out: words are tagged in the context that fits, and answers are found in windows"
        )
    if config.data.windows and data.head.both_orders:
        raise UserError(f"data.windows {config.data.windows} and both_orders cannot be combined; leave one of them out")
    return config.data.windows


def _encode(data: RunData, loaded: Loaded, limits: Limits) -> Encoded:
    """Encode the training rows; print what their labels are, and the notes on them."""
    say(data.overview())
    encoded = encode_once(data.rows, loaded.tokenizer, limits, data.head, labelled=True)
    loaded.model.encoder.check_ids(largest_id(encoded.examples.tokens), largest_id(encoded.examples.segments))
    notes = list(data.notes)
    if encoded.shortened:
        count = f"{encoded.shortened} of {len(data.rows)}"
        notes.append(f"{count} texts did not fit whole into {_room(limits)}; {_more_room(data, limits)}")
    for note in filter(None, notes):
        say(f"note: {note}")
    return encoded


def _room(limits: Limits) -> str:
    windows = f"{limits.windows} windows of " if limits.windows else ""
    return f"{windows}{limits.max_length} tokens"


def _more_room(data: RunData, limits: Limits) -> str:
    """What reads more of long texts."""
    if not KINDS[data.head.kind].reads_windows or data.head.both_orders:
        return "see data.max_length"
    return "raise data.windows" if limits.windows else "see data.max_length, or read them in windows (--windows 8)"


def _unknowns(encoded: Encoded, loaded: Loaded) -> dict[str, float]:
    """The percentage of unknown tokens in the training rows; a warning is printed if there are many.

    Nothing if the encoder reads the characters of words: it knows them all.
    """
    unknowns = Unknowns(loaded.tokenizer)
    unknowns.add(encoded.examples.tokens)
    if warning := unknowns.warning("the training rows"):
        say(f"warning: {warning}")
    return {} if loaded.tokenizer.spells else {"unknown_percent": round(100 * unknowns.share, 2)}


def _ceilings(data: RunData, loaded: Loaded) -> dict[str, float]:
    """Note how far the tokens of the vocabulary limit the dev scores; the figures of the first dev file."""
    found: dict[str, float] = {}
    for name, rows in (data.dev_rows or {"": data.rows}).items():
        note, figures = KINDS[data.head.kind].ceiling(rows, loaded.tokenizer, data.head, data.task)
        if note:
            data.notes.append(f"{name}: {note}" if name else note)
        found = found or figures
    return found


def _facts(source: Path, data: RunData) -> dict[str, Any]:
    """The facts that must be the same when a run is resumed."""
    return {
        "start": str(source),
        "labels": list(data.head.labels),
        "rows": len(data.rows),
        "rows_hash": rows_hash(data.rows),
        "dev_rows_hash": rows_hash(row for part in data.dev_rows.values() for row in part),
    }


def _trainable(
    loaded: Loaded, config: FinetuneConfig, class_weights: list[float] | None, device: torch.device
) -> TaskModel:
    """The model on its device, with the frozen layers, gradient checkpointing and class weights of a run."""
    network = loaded.model
    assert isinstance(network, TaskModel)
    network.to(device)
    freeze(network, config.frozen_layers)
    for encoder in network.encoders:
        encoder.gradient_checkpointing = config.train.gradient_checkpointing
    network.class_weights = class_weights
    return network


def _examples(encoded: Encoded, predictor: Predictor, data: RunData, run: Path) -> Examples | FrozenExamples:
    """The training examples: encoded rows or, for a frozen encoder, its hidden states."""
    if not stores_states(data.head):
        return replace(encoded.examples, names_words=data.head.features is not None)
    return frozen_examples(predictor, data.rows, data.head, predictor.max_length, run / STATES)


def _train(
    config: FinetuneConfig,
    network: TaskModel,
    dev: DevScores,
    examples: Examples | FrozenExamples,
    steps: int | None,
    run: Path,
    device: torch.device,
    checkpoint: tuple[Path, TrainerState] | None,
) -> dict[str, Any]:
    """Train the network and return the scores of the model that was kept."""
    data, predictor = dev.data, dev.predictor

    def batches(step: int, share: float) -> list[Batch]:
        rank, ranks = distributed.rank(), distributed.world_size()
        together = max(data.head.sequences, predictor.limits.windows)
        return micro_batches(examples, step, config.train, predictor.max_length, rank, ranks, together)

    def load(folder: Path) -> dict[str, torch.Tensor]:
        best = load_folder(folder)
        predictor.notes = best.notes  # a threshold belongs to the model that it was chosen for
        return best.model.state_dict()

    return fit(
        network,
        batches,
        replace(config.train, workers=config.train.workers or 0),  # slicing arrays is faster than sending them
        steps,
        run,
        save=lambda folder, tensors: _save(predictor, network, folder, tensors),
        load=load,
        evaluate=dev.evaluate if data.dev_rows else None,
        goal=KINDS[data.head.kind].goal(data.task, data.head),
        resume=checkpoint,
        capturable=_capturable(network, device, autocast_dtype(config.train.precision, device)),
        title=f"fine-tuning {config.task}",
    )


def _capturable(network: TaskModel, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether CUDA graphs can capture a step: that of a model with attention on features synchronises with the host."""
    fused = choose_for_run(network.encoder.config, device, dtype).fused
    on_states = network.head_config.features is not None and stores_states(network.head_config)
    return fused and (network.head_config.features is None or on_states)


def _save(predictor: Predictor, network: TaskModel, folder: Path, tensors: Any) -> None:
    save_folder(folder, network, predictor.tokenizer, predictor.notes, tensors)


def _collapse(data: RunData, network: TaskModel, dev: DevScores, run: Path) -> str:
    """The reason why the run has collapsed; empty if it has not, or if its loss is not that of the labels alone."""
    if network.soft_targets is not None:
        return ""
    constant_loss = KINDS[data.head.kind].constant_loss(data.rows, data.head, network.class_weights)
    reason: str = distributed.on_rank_zero(
        lambda: collapse(runlog.last_task_loss(run), constant_loss, dev.constant.get("", ""))
    )
    return reason


def _finish(config: FinetuneConfig, network: TaskModel, dev: DevScores, run: Path, source: Path) -> None:
    """Write the finished model with its card, and remove the hidden states of a frozen encoder."""

    def save(folder: Path, tensors: Any) -> None:
        _save(dev.predictor, network, folder, tensors)
        rows, train = f"{len(dev.data.rows):,} labelled rows", to_dict(config)["train"]
        write_card(folder, data=rows, settings=train, scores=final_scores(run), base_model=known_name(source))

    finish_run(run, network, save)
    if distributed.is_rank_zero():
        shutil.rmtree(run / STATES, ignore_errors=True)
