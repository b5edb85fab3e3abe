"""Fine-tuning in several ways, all runs side by side; of each run only its scores are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.finetuning import run
from bertsmith.finetuning.benchmark import LONGEST, score_of
from bertsmith.finetuning.model import start_model
from bertsmith.finetuning.protocols import figures_of
from bertsmith.finetuning.scored import SCORES, scored
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.finetuning.task_data import Data, find_data
from bertsmith.formats.hf import Loaded
from bertsmith.model.config import HeadKind
from bertsmith.model.heads import TaskModel
from bertsmith.model.pooling import Pooler, pool
from bertsmith.model.soft_targets import divergence
from bertsmith.tasks.reading import Splits
from bertsmith.training.side_by_side import side_by_side

POOLER = "head.pooler.dense.weight"
Results = dict[str, Any]


@dataclass(frozen=True)
class Variation:
    """What the package has no setting for, because the models would not be those of `transformers`.

    A text is classified from the state of a `token`: first, last, mean or max, or the encoder's own if it is empty.
    Without `dense` there is no layer between that state and the output layer; with `identity` it starts as the
    identity. Without `at_mean` a regression's output layer starts at 0. With a weight of `agreement` every batch is
    read twice, with other dropout, and the loss of both passes has the divergence of their predictions added to it
    (R-Drop: Wu et al. 2021).
    """

    token: str = ""
    dense: bool = True
    identity: bool = False
    at_mean: bool = True
    agreement: float = 0.0


@dataclass(frozen=True)
class Way:
    """A way of fine-tuning a model: the configuration of each task, and what varies. `key` names its results."""

    key: str
    model: Path
    configs: Mapping[str, FinetuneConfig]
    variation: Variation = field(default_factory=Variation)


@contextmanager
def varied(variation: Variation) -> Iterator[None]:
    """Fine-tune with a variation; what is fine-tuned is not saved."""
    once = TaskModel.forward

    def other(self: TaskModel, batch: Batch) -> Tensor:
        layout, rows = batch.layout, {"first": batch.layout.firsts, "last": batch.layout.lasts}
        if variation.token in rows:
            return torch.cat([encoder(batch, rows=rows[variation.token]) for encoder in self.encoders], -1)
        states = [pool(encoder(batch).float(), layout, variation.token) for encoder in self.encoders]  # type: ignore[arg-type]
        return torch.cat([layout.valid(state) for state in states], -1)

    def direct(self: Pooler, states: Tensor) -> Tensor:
        return states + 0.0 * self.dense(states)  # the layer has a gradient, of zeros, as the optimiser expects

    def as_identity(*given: Any) -> Loaded:
        loaded = start_model(*given)
        if POOLER in loaded.missing:
            torch.nn.init.eye_(loaded.model.get_parameter(POOLER))
        return loaded

    def twice(self: TaskModel, batch: Batch) -> dict[str, Tensor]:
        if not self.training:
            return once(self, batch)
        first, second = (self.logits(batch) for _ in range(2))
        labels = (self.loss(first, batch) + self.loss(second, batch)) / 2
        return {"task": labels + variation.agreement * disagreement(first, second, self.head_config.kind)}

    replaced: list[tuple[Any, str, Callable[..., Any], bool]] = [
        (TaskModel, "_pooled", other, bool(variation.token)),
        (TaskModel, "forward", twice, bool(variation.agreement)),
        (Pooler, "forward", direct, not variation.dense),
        (run, "start_model", as_identity, variation.identity),
        (run, "start_at_numbers", lambda *given: "", not variation.at_mean),
    ]
    with ExitStack() as stack:
        for owner, name, function, wanted in replaced:
            if wanted:
                stack.enter_context(patch.object(owner, name, function))
        yield


def disagreement(first: Tensor, second: Tensor, kind: HeadKind) -> Tensor:
    """How far the logits of a batch of texts are apart in two passes, summed over the texts."""
    if kind == "regression":
        return F.mse_loss(first, second, reduction="sum")
    assert kind == "single", f"{kind}: the agreement of two passes is measured on tasks with one label a text"
    return (divergence(first, second, 1.0) + divergence(second, first, 1.0)).sum() / 2


def task_data(folder: Path, task: str) -> Data:
    """The data of a task inside a folder; an error if there is none."""
    found = find_data(folder, task)
    if isinstance(found, str):
        raise UserError(found)
    return found


def tune(config: FinetuneConfig, model: Path, data: Path | Splits, folder: Path, device: str | None) -> None:
    """One fine-tuning run, which leaves its scores and no weights."""
    if not (folder / SCORES).exists():
        scored(config, model, data, folder, device=device)


def tune_varied(variation: Variation, *given: Any) -> None:
    """One fine-tuning run that differs from the package's."""
    with varied(variation):
        tune(*given)


def run_all(
    jobs: int, title: str, function: Callable[..., None], calls: Sequence[tuple[Any, ...]], device: str | None
) -> None:
    """Call a function with each of some arguments, several at a time in processes, or one after the other here."""
    if jobs > 1:
        side_by_side(jobs, title, function, calls, device=device)
        return
    for call in calls:
        function(*call)


def tune_all(
    title: str, ways: Sequence[Way], data: Mapping[str, Splits], metrics: Mapping[str, str], folder: Path, *,
    seeds: int, jobs: int, device: str | None,
) -> dict[str, Results]:  # fmt: skip
    """Fine-tune in all ways, on all tasks and with all seeds at once; the scores of each way by its key and the task.

    `data` and `metrics` are those of the tasks. Runs in `folder` that are finished are not run again, and the scores of
    tasks that another call has fine-tuned are among those of a way.
    """
    calls = [
        (way.variation, replace(config, train=replace(config.train, seed=seed)), way.model, data[task],
         place_of(way, folder) / task / str(seed), device)
        for way in ways for task, config in way.configs.items() for seed in range(1, seeds + 1)
    ]  # fmt: skip
    calls.sort(key=lambda call: LONGEST.index(call[1].task))
    run_all(jobs, title, tune_varied, calls, device)
    return {way.key: scores_of(way, metrics, folder, seeds) for way in ways}


def place_of(way: Way, folder: Path) -> Path:
    """The folder of a way's runs."""
    return folder / way.key.replace(" ", "-").replace("/", "-")


def scores_of(way: Way, metrics: Mapping[str, str], folder: Path, seeds: int) -> Results:
    """The scores of a way by the task, without those of its tasks whose seeds are not all done."""
    place = place_of(way, folder)
    found = {task: scores_in(place / task, metrics[task]) for task in _tasks_in(place)}
    return whole(found, way.configs, seeds)


def whole(scores: Results, tasks: Collection[str], seeds: int) -> Results:
    """Scores by the task without those of some tasks that have fewer runs than seeds: a call was stopped there."""
    return {task: each for task, each in scores.items() if task not in tasks or len(each["values"]) >= seeds}


def _tasks_in(folder: Path) -> list[str]:
    """The tasks of a way that have scores."""
    return sorted({path.parent.parent.name for path in folder.glob(f"*/*/{SCORES}")})


def runs_in(folder: Path) -> list[Results]:
    """What the runs of a task have left, in the order of their seeds."""
    files = sorted(folder.glob(f"*/{SCORES}"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def scores_in(folder: Path, metric: str) -> Results:
    """The values of a metric over the seeds, with their figures; a run that has diverged counts as 0, as `failed`."""
    found = runs_in(folder)
    values = [round(score_of(each, metric), 2) for each in found]
    return {"metric": metric, "values": values, **figures(values), "failed": sum("failed" in each for each in found)}


def figures(values: list[float]) -> Results:
    found = figures_of(values)
    return {n: found[n] if found[n] is None else round(found[n], 2) for n in ("mean", "deviation", "median")}
