"""GLUE's averages as people publish them: each task alone, or the small ones started from a model of MNLI.

Scores are from 0 to 100, as `finetune` and `evaluate` give them. A task that is absent
is named, and there is no average without it. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

# What the server averages of a task, and what the paper's table 1 shows of it. WNLI is in neither average, as in the
# paper: its training and dev rows mislead on purpose.
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
PAPER: dict[str, tuple[str, ...]] = {**LEADERBOARD, "mrpc": ("f1",), "stsb": ("spearman",), "qqp": ("f1",)}
PRE_TRAINED = ("", "pretrain")  # what a start is that was trained for no task
SMALL = ("mrpc", "stsb", "rte")  # often started from MNLI's model


@dataclass(frozen=True)
class GlueScore:
    """The dev scores of a task's model, by the task that its start was trained for."""

    task: str
    scores: Mapping[str, float]
    start: str = ""


def task_score(task: str, scores: Mapping[str, float]) -> float | None:
    """One figure for a task, as the server computes it; None where a part of it was not measured."""
    parts = [scores.get(name) for name in LEADERBOARD[task]]
    return mean(part for part in parts if part is not None) if None not in parts else None


def averages(found: Sequence[GlueScore]) -> dict[str, Any]:
    """Both protocols, `alone` and `from_mnli` (see `average`), and in `left_out` the runs that are in neither."""
    alone = {each.task: each.scores for each in found if each.start in PRE_TRAINED}
    started = {each.task: each.scores for each in found if each.start == "mnli" and each.task in SMALL}
    large = {task: scores for task, scores in alone.items() if task not in SMALL}
    used = {*((task, start) for task in alone for start in PRE_TRAINED), *((task, "mnli") for task in started)}
    left_out = [f"{each.task} from {each.start}" for each in found if (each.task, each.start) not in used]
    return {"alone": average(alone), "from_mnli": average({**large, **started}), "left_out": left_out}


def average(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The tasks' figures, their mean as the server's (`average`) and the paper's way, and which are absent.

    The paper's table shows one metric a task and counts both parts of MNLI as columns of their own.
    """
    tasks = {task: task_score(task, scores[task]) for task in LEADERBOARD if task in scores}
    absent = [task for task in LEADERBOARD if tasks.get(task) is None]
    values = {task: value for task, value in tasks.items() if value is not None}
    columns = [scores[task][name] for task in values for name in PAPER[task]]
    return {
        "tasks": values,
        "average": None if absent else mean(values.values()),
        "paper_average": None if absent else mean(columns),
        "absent": absent,
    }
