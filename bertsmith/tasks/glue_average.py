"""GLUE's averages as they are published: every task alone, or the small tasks started from a model of MNLI.

Scores are from 0 to 100, as `finetune` and `evaluate` give them. There is no average if a task is missing. Imports
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

# The metrics that GLUE's server averages for each task. WNLI is in neither average, as in the paper: its dev rows have
# the sentences of its training rows with the opposite label.
LEADERBOARD: dict[str, tuple[str, ...]] = {
    "cola": ("matthews",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("accuracy", "mismatched_accuracy"),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
}
# The columns of the paper's table 1, which has one metric for each task and counts both parts of MNLI.
PAPER_COLUMNS = (
    ("mnli", "accuracy"), ("mnli", "mismatched_accuracy"), ("qqp", "f1"), ("qnli", "accuracy"), ("sst2", "accuracy"),
    ("cola", "matthews"), ("stsb", "spearman"), ("mrpc", "f1"), ("rte", "accuracy"),
)  # fmt: skip
PRE_TRAINED = ("", "pretrain")  # the start task of a model that was not fine-tuned before
SMALL = ("mrpc", "stsb", "rte")  # tasks that are often started from a model of MNLI


@dataclass(frozen=True)
class GlueScore:
    """The dev scores of a task's model, and the task that its starting model was trained for."""

    task: str
    scores: Mapping[str, float]
    start: str = ""


def task_score(task: str, scores: Mapping[str, float]) -> float | None:
    """The score of a task as GLUE's server computes it; None if one of its metrics is missing."""
    parts = [scores.get(name) for name in LEADERBOARD[task]]
    return mean(part for part in parts if part is not None) if None not in parts else None


def paper_average(score: Callable[[str, str], float | None]) -> float | None:
    """The average of the paper's table 1 over `score(task, metric)`; None if one of them is missing."""
    values = [score(task, metric) for task, metric in PAPER_COLUMNS]
    return mean(value for value in values if value is not None) if None not in values else None


def averages(found: Sequence[GlueScore]) -> dict[str, Any]:
    """Both protocols, `alone` and `from_mnli` (see `average`), and in `left_out` the runs that are in neither."""
    alone = {each.task: each.scores for each in found if each.start in PRE_TRAINED}
    started = {each.task: each.scores for each in found if each.start == "mnli" and each.task in SMALL}
    large = {task: scores for task, scores in alone.items() if task not in SMALL}
    used = {*((task, start) for task in alone for start in PRE_TRAINED), *((task, "mnli") for task in started)}
    left_out = [f"{each.task} from {each.start}" for each in found if (each.task, each.start) not in used]
    return {"alone": average(alone), "from_mnli": average({**large, **started}), "left_out": left_out}


def average(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The score of every task, their average as the server's (`average`) and the paper's, and the missing tasks."""
    tasks = {task: task_score(task, scores[task]) for task in LEADERBOARD if task in scores}
    absent = [task for task in LEADERBOARD if tasks.get(task) is None]
    values = {task: value for task, value in tasks.items() if value is not None}
    return {
        "tasks": values,
        "average": None if absent else mean(values.values()),
        "paper_average": None if absent else paper_average(lambda task, metric: scores[task][metric]),
        "absent": absent,
    }
