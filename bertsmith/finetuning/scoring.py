"""Dev scores of the model in training, and the predictions that a finished run writes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from bertsmith.errors import Diverged, NotFinite
from bertsmith.finetuning.data import RunData
from bertsmith.inference.predictor import Predictor
from bertsmith.progress import say
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Prediction
from bertsmith.tasks.dev_predictions import write_dev_predictions
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.prediction_files import write_predictions as write_official
from bertsmith.tasks.reading import Splits, read_task
from bertsmith.training import distributed


@dataclass
class DevScores:
    """The evaluation of a model on the dev rows of a run; keeps the predictions of the last evaluation.

    `constant` describes the prediction that all rows of a dev file have in common, if there is one.
    """

    predictor: Predictor
    data: RunData
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)
    constant: dict[str, str] = field(default_factory=dict)

    def evaluate(self) -> dict[str, float]:
        """Score every dev file; limits such as the threshold for no answer are tuned on it first (section 4.3)."""
        scores: dict[str, float] = {}
        predictor, head = self.predictor, self.predictor.head
        kind, predictor.shortened = KINDS[head.kind], 0
        for prefix, rows in self.data.dev_rows.items():
            predictions = predict(predictor, rows)
            self.constant[prefix], self.predictions[prefix] = kind.constant(rows, predictions, head), predictions
            if tuned := kind.tune(self.data.task, rows, predictions):
                predictor.notes = replace(predictor.notes, limits={**predictor.notes.limits, **tuned})
            found = kind.score(predictor.task, rows, predictions, head, predictor.limits)
            scores |= {f"{prefix}_{name}" if prefix else name: value for name, value in found.items()}
        return scores


def predict(predictor: Predictor, rows: list[Row]) -> list[Prediction]:
    """The predictions of the model in training; logits that are not finite mean that the run has diverged."""
    try:
        return list(predictor.predict_rows(rows))
    except NotFinite:
        raise Diverged(
            "the model's scores of dev or test rows are not finite numbers: training has diverged. Lower "
            "train.learning_rate or raise train.warmup"
        ) from None


def write_predictions(scores: DevScores, splits: Splits, run: Path) -> None:
    """Write the dev predictions for reports and, in `predictions`, the files of GLUE's server and SQuAD's scripts."""
    predictor, task, dev_rows = scores.predictor, scores.data.task, scores.data.dev_rows
    if not scores.predictions:
        predictor.shortened = 0  # it counted the dev rows of an evaluation until here
    dev = {name: scores.predictions.get(name) or predict(predictor, rows) for name, rows in dev_rows.items()}
    if dev and distributed.is_rank_zero():
        write_dev_predictions(run, task, predictor.head, dev_rows, dev)
    for name, paths in splits.official(task).items():
        is_dev = KINDS[task.head].official_split == "dev"
        rows = dev_rows[name] if is_dev else list(read_task(task, paths, scores.data.columns, labelled=False))
        predictions = dev[name] if is_dev else predict(predictor, rows)
        if distributed.is_rank_zero():
            write_official(task, run / "predictions", name, rows, predictions)
    if predictor.shortened:
        say(f"note: {predictor.shortened} dev and test texts did not fit whole into {predictor.max_length} tokens")
