"""`benchmark`: one fixed protocol of fine-tuning, so that the scores of encoders can be compared.

One set of hyper-parameters serves all tasks and all models; nothing is chosen on dev; the score of a task is the median
over the seeds, with every run counted, also one that stays at a constant. No task starts from another one's model.
`OUT/runs/MODEL/TASK/seed-1` is a run, which keeps its scores but not its weights; finished runs are reused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bertsmith.config import override, read_json, to_dict, write_json
from bertsmith.errors import Interrupted, UserError, nearest_or_all
from bertsmith.finetuning.protocols import figures_of
from bertsmith.finetuning.scored import SCORES, scored
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.finetuning.task_data import Data, find_data, remarks
from bertsmith.folders import locked, new_file
from bertsmith.formats.hub import find_model
from bertsmith.formats.saved_config import config_in, read_config
from bertsmith.training import runlog
from bertsmith.training.run import MODEL, facts_of, final_scores, same_settings
from bertsmith.training.settings import TrainConfig, pick_device
from bertsmith.training.side_by_side import side_by_side

Values = dict[str, Any]
FILE, MEAN = "benchmark.json", "GLUE-5"
UNFINISHED = "the command was stopped before all of its runs were done"
# The protocol. Runs that collapse are not repeated with another seed: the median has to stand for them.
TRAIN = TrainConfig(epochs=5, batch_size=32, learning_rate=5e-5, warmup=0.1, workers=0)
DROPOUT = 0.1
SEEDS = 5
MOST_JOBS = 14
RUN_GB = 3.0  # GPU memory of a fine-tuning run beside the weights, their gradients and the state of the optimizer


@dataclass(frozen=True)
class Column:
    """A score of the table: a task and its metric; `counts` tells whether it is a part of the mean."""

    task: str
    name: str
    metric: str
    counts: bool = True


COLUMNS = (
    Column("cola", "CoLA", "matthews"),
    Column("sst2", "SST-2", "accuracy"),
    Column("mrpc", "MRPC", "f1"),
    Column("stsb", "STS-B", "spearman"),
    Column("rte", "RTE", "accuracy"),
    Column("conll2003", "CoNLL-2003", "f1", counts=False),
    Column("squad1", "SQuAD 1.1", "f1", counts=False),
)
LONGEST = ("squad1", "sst2", "conll2003", "cola", "stsb", "mrpc", "rte")  # the task with the longest runs first
# Scores on dev that others report for the same five tasks, to be shown below the table.
PUBLISHED: dict[str, tuple[float, ...]] = {
    "BERT-Base, as it is commonly fine-tuned": (56.5, 92.3, 88.9, 88.5, 65.7),
    "cramming: a day on one A6000": (53.3, 92.0, 88.9, 87.4, 58.5),
}


@dataclass(frozen=True)
class Entry:
    """A model of the table: its name there, the folder of its weights, and that of its run if it has one."""

    name: str
    model: Path
    run: Path | None
    weights: str  # a checksum of the weights, by which scores of other weights are told apart


def benchmark(
    models: Sequence[str | Path],
    data: str | Path,
    out: str | Path,
    *,
    tasks: Sequence[str] = (),
    seeds: int = SEEDS,
    jobs: int | None = None,
    device: str | None = None,
    settings: Sequence[str] = (),
) -> Values:
    """Fine-tune every model on every task with several seeds; return the table, which `OUT/benchmark.json` holds too.

    `data` is the folder that holds the folders of the tasks; a task without data is reported as absent. `tasks` are
    those to run, by default all. `jobs` runs execute at a time: by default as many as a GPU has memory for, and one
    without a GPU. `settings` change the protocol, and the table then says so. A command that is stopped leaves a table
    of the tasks that are done, unless there is a whole one already.
    """
    for option, value in (("--seeds", seeds), ("--jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise UserError(f"{option} must be at least 1, not {value}")
    out, entries = Path(out), find_entries(models)
    columns, found, absent = _find_columns(tasks, Path(data))
    if not columns:
        raise UserError(f"--data {data}: " + "; ".join(f"{name}: {why}" for name, why in absent.items()))
    configs = {column.task: protocol(column.task, found[column.task], settings) for column in columns}
    calls = [
        (replace(configs[column.task], train=replace(configs[column.task].train, seed=seed)), entry, column,
         found[column.task], _run_folder(out, entry, column, seed), device)
        for column, entry, seed in product(columns, entries, range(1, seeds + 1))
    ]  # fmt: skip
    calls.sort(key=lambda call: LONGEST.index(call[0].task))
    with locked(out):
        try:
            _run_all([call for call in calls if not _is_known(call[0], call[1], call[4])], jobs, entries, device)
        except Interrupted as stop:
            stop.advice = "The same command resumes it"
            left = {call[2].name: UNFINISHED for call in calls if not _is_known(call[0], call[1], call[4])}
            finished = [column for column in columns if column.name not in left]
            if finished and not _has_whole_table(out):
                _write_table(out, _table(out, entries, finished, seeds, {**absent, **left}, configs, settings))
                stop.advice += f"; {out / FILE} has the tasks that are done"
            raise
        result = _table(out, entries, columns, seeds, absent, configs, settings)
        _write_table(out, result)
        return result


def _has_whole_table(out: Path) -> bool:
    """Return whether there is a table, and not of a command that was stopped."""
    return (out / FILE).exists() and UNFINISHED not in read_json(out / FILE)["absent"].values()


def _write_table(out: Path, table: Values) -> None:
    with new_file(out / FILE) as file:
        write_json(file, table)


def find_entries(models: Sequence[str | Path]) -> list[Entry]:
    """Return the models with short names of their own: the last part of each path that differs from the others."""
    folders = [find_model(model) for model in models]
    names = [_short_name(model, 1) for model in models]
    parts = 1
    while len({*names}) < len(names):
        if parts > 32:
            twice = next(str(model) for i, model in enumerate(models) if names[i] in names[:i])
            raise UserError(f"{twice} is named twice; leave one of them out")
        parts += 1
        names = [_short_name(model, parts) for model in models]
    runs = [folder.parent if folder.name == MODEL and facts_of(folder.parent) else None for folder in folders]
    return [Entry(*each, _checksum(each[1])) for each in zip(names, folders, runs, strict=True)]


def _short_name(model: str | Path, parts: int) -> str:
    path = Path(model).absolute() if Path(model).exists() else Path(model)
    kept = [part for part in path.parts if part != path.anchor]
    kept = kept[:-1] if kept[-1] == MODEL and len(kept) > 1 else kept
    return re.sub(r"[^\w.-]+", "-", "-".join(kept[-parts:])) or "model"


def _checksum(model: Path) -> str:
    """Return a checksum of a model's weights; files of several gigabytes take some seconds."""
    total = hashlib.sha256()
    for path in sorted([*model.glob("*.safetensors"), *model.glob("pytorch_model*.bin")]):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def _find_columns(tasks: Sequence[str], folder: Path) -> tuple[list[Column], dict[str, Data], dict[str, str]]:
    """Return the columns that can be run, their data, and the reasons why others cannot."""
    known = {column.task: column for column in COLUMNS}
    for name in tasks:
        if name not in known:
            raise UserError(f"--task {name!r} is not a task of the benchmark{nearest_or_all(name, known)}")
    data: dict[str, Data] = {}
    absent: dict[str, str] = {}
    for column in (column for column in COLUMNS if not tasks or column.task in tasks):
        found = find_data(folder, column.task)
        if isinstance(found, str):
            absent[column.name] = found
        else:
            data[column.task] = found
    return [column for column in COLUMNS if column.task in data], data, absent


def protocol(task: str, data: Data, settings: Sequence[str] = ()) -> FinetuneConfig:
    """Return the protocol of a task with some settings changed."""
    config = FinetuneConfig(task, train=TRAIN, restarts=0, dropout=DROPOUT)
    config = replace(config, data=replace(config.data, partial=data.is_subset))
    changed = override(config, settings)
    if changed.task != task or changed.train.seed != TRAIN.seed:
        raise UserError("--set cannot change the task or the seed: --task and --seeds say which are run")
    return changed


def _run_folder(out: Path, entry: Entry, column: Column, seed: int) -> Path:
    return out / "runs" / entry.name / column.task / f"seed-{seed}"


def _is_known(config: FinetuneConfig, entry: Entry, run: Path) -> bool:
    """Return whether a run has scores; those of other settings or weights are refused."""
    if not (run / SCORES).exists():
        return False
    done = read_json(run / SCORES)
    same_settings(done["config"], to_dict(config), run / SCORES, option="")
    if done["weights"] != entry.weights:
        raise UserError(f"{run} was fine-tuned from other weights than those of {entry.model}; give another --out")
    return True


def _run_one(config: FinetuneConfig, entry: Entry, column: Column, data: Data, run: Path, device: str | None) -> None:
    def judge(run: Path) -> Values:
        return {"scores": final_scores(run), "remarks": remarks(run, column.task, data)}

    facts = {"weights": entry.weights}
    scored(config, entry.model, data.splits(column.task), run, device=device, facts=facts, judge=judge)


def _run_all(calls: Sequence[tuple[Any, ...]], jobs: int | None, entries: Sequence[Entry], device: str | None) -> None:
    several = default_jobs(entries, device) if jobs is None else jobs
    if several > 1 and calls:
        side_by_side(several, f"fine-tuning {len(calls)} runs", _run_one, calls, device=device)
        return
    for call in calls:
        _run_one(*call)


def default_jobs(entries: Sequence[Entry], device: str | None) -> int:
    """Return how many runs a GPU has memory for, at most 14; one without a GPU."""
    chosen = pick_device(device)
    if chosen.type != "cuda":
        return 1
    weights = max(sum(path.stat().st_size for path in entry.model.glob("*.safetensors")) for entry in entries)
    free, _ = torch.cuda.mem_get_info(chosen)
    return max(1, min(MOST_JOBS, int(free / (4 * weights + RUN_GB * 1e9))))


def _table(
    out: Path, entries: Sequence[Entry], columns: Sequence[Column], seeds: int, absent: Mapping[str, str],
    configs: Mapping[str, FinetuneConfig], settings: Sequence[str],
) -> Values:  # fmt: skip
    partial: dict[str, list[str]] = {}
    rows = [_row(out, entry, columns, seeds, partial) for entry in entries]
    first = to_dict(next(iter(configs.values())))
    protocol = {name: first["train"][name] for name in ("epochs", "steps", "batch_size", "learning_rate", "warmup")}
    return {
        "seeds": seeds,
        "protocol": {**protocol, "dropout": first["dropout"]},
        "settings": list(settings),
        "columns": [column.name for column in columns],
        "metrics": {column.name: column.metric for column in columns},
        "rows": rows,
        "absent": dict(absent),
        "partial": partial,
    }


def _row(out: Path, entry: Entry, columns: Sequence[Column], seeds: int, partial: dict[str, list[str]]) -> Values:
    scores: dict[str, Values] = {}
    for column in columns:
        done = [read_json(_run_folder(out, entry, column, seed) / SCORES) for seed in range(1, seeds + 1)]
        values = [score_of(each, column.metric) for each in done]
        scores[column.name] = {**figures_of(values), "values": values}
        if failed := sum("failed" in each for each in done):
            scores[column.name]["failed"] = failed
        if words := next((each["remarks"] for each in done if each["remarks"]), None):
            partial.setdefault(column.name, words)
    counted = [column.name for column in COLUMNS if column.counts]
    result: Values = {"name": entry.name, "model": str(entry.model), **_encoder_facts(entry), "scores": scores}
    if all(name in scores for name in counted):
        result["mean"] = mean(scores[name]["median"] for name in counted)
    return result


def score_of(done: Mapping[str, Any], metric: str) -> float:
    """Return the score of a run; one that has diverged has learnt nothing, which counts as 0."""
    return float(runlog.rescaled(done["scores"], done.get("scale")).get(metric, 0.0))


def _encoder_facts(entry: Entry) -> Values:
    """Return the shape of a model and, if it is the end of a pre-training run, what that run has seen and learnt."""
    config = config_in(read_config(entry.model), entry.model)
    found: Values = {"layers": config.num_layers, "width": config.hidden_size}
    records = [] if entry.run is None else list(_seen(entry.run))
    if entry.run is not None and records:
        held_out = {name: value for name, value in final_scores(entry.run).items() if name.endswith("_loss")}
        found |= {"minutes": records[-1]["seconds"] / 60, "tokens": records[-1]["tokens"], "held_out": held_out}
    return found


def _seen(run: Path) -> Iterator[Values]:
    return (record for record in runlog.read(run) if "tokens" in record and "seconds" in record)
