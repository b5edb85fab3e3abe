"""Fine-tuning runs in groups: one task, one configuration, several seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

from bertsmith.pages.report.runs import DEV, Run, flatten, inside, keys, labels_of_paths, lower_is_better
from bertsmith.tasks.comparison import Comparison
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.tasks.published import PAPER, PaperScore, shortfall
from bertsmith.tasks.task import TASKS
from bertsmith.training.runlog import is_score
from bertsmith.training.settings import MAY_CHANGE

IGNORED = MAY_CHANGE | {"train.seed"}  # settings that do not separate groups


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds; `system` names the starting model, `data` the rows."""

    task: str
    data: str
    system: str
    settings: dict[str, str]
    runs: tuple[Run, ...]

    def values(self, key: str) -> list[float]:
        """Return the last dev score of every run that has one."""
        scores = [run.last(DEV + key) for run in self.runs]
        return [score for score in scores if score is not None]

    def mean(self, key: str) -> float | None:
        values = self.values(key)
        return mean(values) if values else None

    @cached_property
    def goal(self) -> str:
        """The score that groups of a task are compared by."""
        known = TASKS[self.task].metrics if self.task in TASKS else ()
        measured = keys(self.runs, dev=True)
        return next((key for key in known if key in measured), measured[0] if measured else "")

    @cached_property
    def best_run(self) -> Run:
        """The run with the best score."""
        sign = -1.0 if lower_is_better(self.goal) else 1.0
        return max(self.runs, key=lambda run: sign * (run.last(DEV + self.goal) or 0.0))

    @cached_property
    def judged(self) -> tuple[dict[str, object], list[Comparison]] | None:
        """The dev rows with the predictions of the best run."""
        return read_dev_predictions(self.best_run.folder)

    @cached_property
    def remarks(self) -> list[str]:
        """The reasons why the scores cannot be compared with others."""
        rows = self.runs[0].fact("rows")
        dev = Counter(str(line["file"]) for line in self.judged[1]) if self.judged else {}
        found = shortfall(self.task, rows if isinstance(rows, int) else None, dict(dev))
        is_partial = any(run.setting("data", "partial") for run in self.runs)
        return found or (["trained on a part of its data set"] if is_partial else [])


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return the fine-tuning runs in groups, in the order of the tasks."""
    tuned = [run for run in runs if run.is_finetuning]
    systems, names = _systems(tuned), _data_names(tuned)
    found: dict[str, list[Run]] = {}
    for run in tuned:
        data = [run.fact("rows"), names[run.label]]
        found.setdefault(json.dumps([systems[run.label], _settings(run), data], sort_keys=True), []).append(run)
    order = {name: number for number, name in enumerate([*PAPER, *TASKS])}
    groups = [
        Group(rs[0].name, names[rs[0].label], systems[rs[0].label], _settings(rs[0]), tuple(rs))
        for rs in found.values()
    ]
    return sorted(groups, key=lambda group: order.get(group.task, len(order)))


def _settings(run: Run) -> dict[str, str]:
    return {name: text for name, text in flatten(run.config) if name not in IGNORED}


def _data_names(runs: Sequence[Run]) -> dict[str, str]:
    """Return the task of each run, with its labels where runs of the same task have different labels."""
    labels = {run.label: tuple(map(str, run.fact("labels") or ())) for run in runs}
    names = {}
    for run in runs:
        own = labels[run.label]
        several = {labels[other.label] for other in runs if other.name == run.name} != {own}
        shown = f"{', '.join(own[:3])}{f', … ({len(own)})' if len(own) > 3 else ''}" if own else "no labels"
        names[run.label] = f"{run.name}: {shown}" if several else run.name
    return names


def _systems(runs: Sequence[Run]) -> dict[str, str]:
    """Return a short name of the model that each run started from."""
    starts = {run.label: str(run.fact("start") or "") for run in runs}
    paths = {start: model_path(start) for start in starts.values()}
    names = dict(zip(paths, labels_of_paths(list(paths.values())), strict=True))
    return {
        run.label: f"{names[starts[run.label]]}{', random weights' if run.setting('random_start') else ''}" or "a model"
        for run in runs
    }


def model_path(start: str) -> Path:
    """Return the path that names a model: without the `model` folder of a run; for the hub's cache, the hub name."""
    path = Path(start)
    for part in path.parts:
        if part.startswith("models--"):
            return Path(part.removeprefix("models--").replace("--", "/"))
    return path.parent if path.name == "model" else path


def scores_of(groups: Sequence[Group]) -> list[PaperScore]:
    """Return the scores of a task to show: those of the paper, or all, with the task's own metrics first."""
    task, measured = groups[0].task, keys([run for group in groups for run in group.runs], dev=True)
    if task in PAPER:
        return [score for score in PAPER[task] if score.key in measured]
    judged_by = [key for key in (TASKS[task].metrics if task in TASKS else ()) if key in measured]
    others = [key for key in measured if key not in judged_by and is_score(key)]
    return [PaperScore(key, inside(key)) for key in [*judged_by, *others] or measured[:1]]


def text_of_mean(values: Sequence[float]) -> tuple[str, str]:
    """Return the mean of scores, and their deviation and number, as text."""
    spread = f"± {stdev(values):.1f}, {len(values)} runs" if len(values) > 1 else ""
    return f"{mean(values):.1f}", spread
