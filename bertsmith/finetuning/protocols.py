"""Protocols: fine-tuning with several seeds and a grid search over settings, and the summary of their scores.

`OUT/seed-1`, … are runs; with a grid, `OUT/SETTING/seed-1`, …. `OUT/summary.json` has the scores and their mean,
standard deviation, median and best; `OUT/model` is a copy of the best run's model, so that OUT can be used as a model.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from bertsmith.config import override, read_json, to_dict
from bertsmith.errors import Diverged, UserError, suggestion
from bertsmith.finetuning.data import read_data
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.folders import new_folder, refuse_existing
from bertsmith.formats.hub import usual_model
from bertsmith.progress import say
from bertsmith.rows.records import Source, Table
from bertsmith.tasks.description import Task
from bertsmith.tasks.glue_average import LEADERBOARD, PRE_TRAINED, GlueScore, averages
from bertsmith.tasks.reading import Splits, find_splits
from bertsmith.tasks.task import find_task
from bertsmith.training import distributed, runlog
from bertsmith.training.run import (
    CONFIG,
    MODEL,
    facts_of,
    final_scores,
    is_finished,
    read_checked,
    same_settings,
    write_checked,
)
from bertsmith.training.settings import pick_device
from bertsmith.training.side_by_side import side_by_side

PROTOCOL, SUMMARY = "protocol.json", "summary.json"
Grid = dict[str, Sequence[Any]]
# Appendix A.3 of the paper: the values that work well across all tasks.
GENERAL: Grid = {
    "train.batch_size": (16, 32),
    "train.learning_rate": (5e-5, 3e-5, 2e-5),
    "train.epochs": (2, 3, 4),
}
# Section 4.1: one batch size and number of epochs for all of GLUE; the learning rate is chosen on dev.
GLUE: Grid = {"train.batch_size": (32,), "train.learning_rate": (5e-5, 4e-5, 3e-5, 2e-5), "train.epochs": (3,)}
# Sections 4.2 to 4.4: the settings with which the paper fine-tuned these tasks.
SINGLE: dict[str, Grid] = {
    "squad1": {"train.batch_size": (32,), "train.learning_rate": (5e-5,), "train.epochs": (3,)},
    "squad2": {"train.batch_size": (48,), "train.learning_rate": (5e-5,), "train.epochs": (2,)},
    "swag": {"train.batch_size": (16,), "train.learning_rate": (2e-5,), "train.epochs": (3,)},
}


def find_grid(text: str | None, task: str) -> Grid:
    """A grid by its name (`paper`, `glue`), or as `key=value,value key=value,value`."""
    if not text:
        return {}
    if text == "paper":
        return SINGLE.get(task, GENERAL)
    if text == "glue":
        return GLUE
    grid: Grid = {}
    for part in text.split():
        key, equals, values = part.partition("=")
        if not equals or not all(values.split(",")):
            near = suggestion(part, ("paper", "glue"))
            raise UserError(
                f"--grid {part!r}: write paper, glue, or settings with their values, for example "
                f'"train.learning_rate=2e-5,3e-5 train.batch_size=16,32"{near}'
            )
        if key in grid:
            raise UserError(f"--grid names {key} twice; give all its values at once: {key}=A,B")
        grid[key] = tuple(dict.fromkeys(values.split(",")))
    if "train.seed" in grid:
        raise UserError("--grid train.seed: seeds are counted by --seeds, and settings are compared over them")
    return grid


def settings_of(grid: Grid) -> list[dict[str, Any]]:
    """Every setting of a grid; without one, a single setting that changes nothing."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def name_of(setting: dict[str, Any]) -> str:
    """The name of a setting in folders and summaries."""
    return ",".join(f"{key.split('.')[-1]}={value}" for key, value in setting.items())


def finetune_many(
    config: FinetuneConfig,
    model: str | Path | None,
    data: Any,
    out: str | Path,
    *,
    seeds: int = 1,
    grid: str | None = None,
    dev: Any = None,
    device: str | None = None,
    resume: bool = False,
    jobs: int = 1,
) -> dict[str, Any]:
    """Fine-tune with every setting of a grid and `seeds` seeds each, `jobs` runs at a time; return the summary.

    `model`, `data` and `dev` are those of `finetune`: None is the usual model, and rows may be in memory.
    The setting with the best mean on dev is chosen, and of its runs the best one, whose model becomes `out/model`. With
    `resume`, finished runs are skipped; more seeds may be added to a finished protocol.
    """
    out, task, model = Path(out), find_task(config.task), usual_model() if model is None else model
    for option, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value < 1:
            raise UserError(f"{option} must be at least 1, not {value}")
    settings = settings_of(find_grid(grid, config.task))
    configs = _configs(config, settings)
    splits = find_splits(task, data, dev)
    if not splits.dev and not config.data.dev_share:
        raise UserError("--seeds and --grid compare scores on dev rows, and there are none; give them with --dev")
    command = f"bertsmith finetune {config.task} --model {model} --data {data} --out {out}"
    if not splits.dev and not read_data(config, splits, command).dev_rows:  # before any run, which would be in vain
        raise UserError(
            "--seeds and --grid compare scores on dev rows, and there are too few rows to hold some out; give --dev"
        )
    facts: dict[str, Any] = {"start": str(model), "data": _describe(data, splits.train), "grid": grid or ""}
    facts |= {"dev": _describe(dev, splits.dev.get("", ())), "config": to_dict(config)}
    folders = [out / name_of(setting) if setting else out for setting in settings]
    runs = [
        (folder / f"seed-{seed}", override(changed, [f"train.seed={seed}"]))
        for folder, changed in zip(folders, configs, strict=True)
        for seed in range(config.train.seed, config.train.seed + seeds)
    ]
    with distributed.process_group(pick_device(device)), distributed.locked(out):
        if jobs > 1 and distributed.world_size() > 1:
            raise UserError(f"--jobs {jobs}: processes that torchrun started make one run together; leave --jobs out")
        distributed.on_rank_zero(lambda: _open(out, facts, resume))
        missing = [
            (f"run {number} of {len(runs)}", out, run, chosen, model, splits, device, resume)
            for number, (run, chosen) in enumerate(runs, 1)
            if not (resume and _is_done(run))
        ]
        failed = _run_all(out, missing, jobs, device)
        summary: dict[str, Any] = distributed.on_rank_zero(lambda: _finish(out, task, settings, folders, failed))
        return summary


def _configs(config: FinetuneConfig, settings: Sequence[dict[str, Any]]) -> list[FinetuneConfig]:
    """The configuration of every setting of a grid; settings that are the same or have no effect are refused."""
    configs = [override(config, [f"{k}={v}" for k, v in setting.items()], "--grid") for setting in settings]
    if (alike := next((i for i, c in enumerate(configs) if c in configs[:i]), None)) is not None:
        raise UserError(f"--grid: {name_of(settings[alike])} is a setting that it has already, written otherwise")
    if "train.epochs" in settings[0] and (config.train.steps or config.train.hours):
        raise UserError("--grid changes train.epochs, and train.steps or train.hours ends the run; leave that out")
    return configs


def _run_all(out: Path, calls: Sequence[tuple[Any, ...]], jobs: int, device: str | None) -> list[dict[str, str]]:
    """Run the fine-tunings, `jobs` at a time; return the folder and the error of those that have diverged."""
    try:
        if jobs > 1:
            errors = side_by_side(jobs, f"fine-tuning {len(calls)} runs", _finetune_one, calls, device=device)
        else:
            errors = [_finetune_one(*call) for call in calls]
    except UserError:
        if distributed.is_rank_zero() and [path.name for path in out.iterdir()] == [PROTOCOL]:  # no run has started
            shutil.rmtree(out)
        raise
    failed = [error for error in errors if error]
    for error in failed if jobs > 1 else ():  # the output of worker processes was not shown
        say(f"warning: {error['folder']} failed: {error['why']}")
    return failed


def _finetune_one(
    which: str, out: Path, run: Path, config: FinetuneConfig, model: str | Path, splits: Splits,
    device: str | None, resume: bool,
) -> dict[str, str] | None:  # fmt: skip
    """Run one fine-tuning; return its folder and error if it has diverged, which does not end the other runs."""
    name = str(run.relative_to(out))
    say(f"{which}: {name}")
    try:
        finetune(config, model, splits, run, device=device, resume=resume)
    except Diverged as error:
        say(f"warning: {name} failed: {error}")
        return {"folder": name, "why": str(error)}
    return None


def _describe(data: Any, sources: Sequence[Source]) -> str:
    """The rows of a protocol in `protocol.json`: their path or, for rows in memory, their number and hash."""
    tables = [source.records for source in sources if isinstance(source, Table)]
    if not tables:
        return str(data or "")
    digest = hashlib.sha256(repr(tables).encode(errors="surrogatepass")).hexdigest()
    return f"{sum(map(len, tables))} rows in memory, sha256 {digest[:16]}"


def _is_done(run: Path) -> bool:
    return bool(distributed.on_rank_zero(lambda: is_finished(run)))


def _open(out: Path, facts: dict[str, Any], resume: bool) -> None:
    """Start a protocol, or resume one with the same settings."""
    if resume and (out / PROTOCOL).exists():
        same_settings(read_checked(out / PROTOCOL), facts, out / PROTOCOL)
        return
    refuse_existing(out, hint="add --resume to go on with it, or choose another --out")
    write_checked(out / PROTOCOL, facts)


def _runs_in(folder: Path, out: Path) -> list[dict[str, Any]]:
    """The finished runs of a setting, including those of an earlier call with more seeds."""
    numbers = (path.name.removeprefix("seed-") for path in folder.glob("seed-*") if is_finished(path))
    return [_run(folder / f"seed-{seed}", seed, out) for seed in sorted(int(n) for n in numbers if n.isdecimal())]


def _run(folder: Path, seed: int, out: Path) -> dict[str, Any]:
    collapsed, scores = facts_of(folder).get("collapsed", []), final_scores(folder)
    if not scores:
        raise UserError(
            f"{folder / runlog.FILE} has no scores of a finished run; remove {folder}, and --resume runs it again"
        )
    values = {"seed": seed, "folder": str(folder.relative_to(out)), "scores": scores}
    return {**values, **({"collapsed": collapsed} if collapsed else {})}


def _finish(
    out: Path, task: Task, settings: Sequence[dict[str, Any]], folders: Sequence[Path], failed: list[dict[str, str]]
) -> dict[str, Any]:
    """Choose the best run, copy its model and write the summary."""
    rows = [{"setting": s, "runs": _runs_in(folder, out)} for s, folder in zip(settings, folders, strict=True)]
    if not any(row["runs"] for row in rows):
        raise UserError(f"no run has reached its end; {failed[-1]['folder']}: {failed[-1]['why']}")
    summary = {**summarise(task, rows), **({"failed": failed} if failed else {})}
    best = summary["best"]["folder"]
    before = read_checked(out / SUMMARY)["best"]["folder"] if (out / SUMMARY).exists() else None
    if best != before or not (out / MODEL).exists():
        (out / SUMMARY).unlink(missing_ok=True)  # after a kill from here on, --resume copies the model again
        shutil.rmtree(out / MODEL, ignore_errors=True)
        with new_folder(out / MODEL) as folder:
            shutil.copytree(out / best / MODEL, folder, dirs_exist_ok=True)
    write_checked(out / SUMMARY, summary)
    return summary


def summarise(task: Task, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean, deviation, median and best of each setting over its seeds, and the best run on dev."""
    known = next(row["runs"][0]["scores"] for row in rows if row["runs"])
    metric = next((name for name in task.metrics if name in known), min(known))
    settings = []
    for row in rows:
        values = [run["scores"][metric] for run in row["runs"]]
        settings.append({"name": name_of(row["setting"]), **figures_of(values), **row})
    chosen = max((s for s in settings if s["runs"]), key=lambda setting: setting["mean"])
    best = max(chosen["runs"], key=lambda run: run["scores"][metric])
    choice = {"setting": chosen["name"], "seed": best["seed"], "folder": best["folder"], metric: best["scores"][metric]}
    return {
        "task": task.name,
        "metric": metric,
        "scale": runlog.SCALE,
        "chosen_on": "dev",
        "best": {**choice, "of_runs": sum(len(setting["runs"]) for setting in settings)},
        "settings": settings,
    }


def figures_of(values: Sequence[float]) -> dict[str, Any]:
    """The number of seeds, their mean, sample standard deviation, median and best; None if they are not defined."""
    if not values:
        return {"seeds": 0, "mean": None, "deviation": None, "median": None, "best": None}
    deviation = stdev(values) if len(values) > 1 else None
    figures = {"mean": mean(values), "deviation": deviation, "median": median(values), "best": max(values)}
    return {"seeds": len(values), **figures}


def noise(first: Mapping[str, Any], second: Mapping[str, Any]) -> float | None:
    """Two standard errors of the difference of two means; None if one of them is from a single run."""
    if first["deviation"] is None or second["deviation"] is None:
        return None
    return 2 * sqrt(first["deviation"] ** 2 / first["seeds"] + second["deviation"] ** 2 / second["seeds"])


def glue(folders: Sequence[str | Path]) -> dict[str, Any]:
    """GLUE's table and both averages of finished runs; `folders` are runs, or folders of runs.

    The score of a protocol is the mean over the seeds of its best setting.
    """
    found: dict[tuple[str, str], GlueScore] = {}
    places: dict[tuple[str, str], Path] = {}
    seeds: dict[str, int] = {}
    for run in (run for folder in folders for run in _runs_under(Path(folder))):
        score, count = _glue_score(run)
        kind = score.task, "" if score.start in PRE_TRAINED else score.start
        if kind in found:
            raise UserError(f"{places[kind]} and {run} are both {score.task}; name one of them")
        found[kind], places[kind], seeds[str(run)] = score, run, count
    if not found:
        raise UserError(f"no finished run of a GLUE task in {', '.join(map(str, folders))}")
    return {**averages(list(found.values())), "seeds": seeds}


def _runs_under(folder: Path) -> list[Path]:
    """The finished runs and protocols of GLUE tasks in a folder, or the folder itself."""
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    return [path for path in places if is_finished(path) and _task_of(path) in LEADERBOARD]


def _task_of(run: Path) -> str:
    if (run / SUMMARY).exists():
        return str(read_checked(run / SUMMARY)["task"])
    return str(read_json(run / CONFIG).get("task", "")) if (run / CONFIG).exists() else ""


def _glue_score(run: Path) -> tuple[GlueScore, int]:
    """The scores of a run, or the means of a protocol's best setting, and their number of seeds."""
    runs = [run]
    if (run / SUMMARY).exists():
        summary = read_checked(run / SUMMARY)
        chosen = next(s for s in summary["settings"] if s["name"] == summary["best"]["setting"])
        runs = [run / entry["folder"] for entry in chosen["runs"]]
    scores = [final_scores(each) for each in runs]
    means = {name: mean(each[name] for each in scores) for name in scores[0]}
    return GlueScore(_task_of(run), means, str(facts_of(runs[0]).get("start_task", ""))), len(runs)
