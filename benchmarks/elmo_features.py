"""The task model on ELMo's frozen states, standardised and as they are, beside a linear model on the same states.

    python -m benchmarks.elmo_features RUN SAMPLE

RUN is a run of `elmo-tiny` and SAMPLE the folder of `bertsmith demo --text-only`. The results are the accuracy on the
dev rows by seed and the last training loss; `linear` is logistic regression on the standardised mean states of a text,
of all layers concatenated, at the best of several strengths of regularisation.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import bertsmith
from benchmarks.record import record
from bertsmith.config import override
from bertsmith.recipes import feature_based
from bertsmith.training import runlog

SEEDS = (42, 43)
SETTINGS = ["features.hidden_size=64", "features.num_layers=1", "train.epochs=10", "train.batch_size=16"]
SETTINGS += ["data.max_length=64", "restarts=0", "train.evaluate_every=0"]
PENALTIES = (0.1, 1.0, 10.0, 100.0)


def trained(run: Path, sample: Path, standardise: bool, seed: int) -> dict[str, float]:
    """Train a model on the states, and return its accuracy on the dev rows and its last loss."""
    changes = [f"features.standardise={json.dumps(standardise)}", f"train.seed={seed}"]
    config = override(feature_based("classify", "mix-all"), [*SETTINGS, *changes])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tuned")
        scores = bertsmith.finetune(config, run, sample / "train.csv", out, dev=sample / "dev.csv", device="cpu")
        loss = runlog.last_task_loss(out)
    return {"accuracy": round(float(scores["accuracy"]), 1), "loss": round(loss, 2)}


def linear(run: Path, sample: Path) -> float:
    """The accuracy on the dev rows of logistic regression on the mean states of a text."""
    embedders = [bertsmith.Embedder.load(run, "cpu", pooling="mean", normalize=False, layer=n) for n in (0, 1, 2)]
    inputs, labels = {}, {}
    for name in ("train", "dev"):
        with (sample / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        texts = [row["text"] for row in rows]
        inputs[name] = np.concatenate([np.array(each(texts)) for each in embedders], 1)
        labels[name] = [row["label"] for row in rows]
    models = [make_pipeline(StandardScaler(), LogisticRegression(C=1 / each, max_iter=1000)) for each in PENALTIES]
    accuracies = [model.fit(inputs["train"], labels["train"]).score(inputs["dev"], labels["dev"]) for model in models]
    return round(100 * max(accuracies), 1)


def main() -> None:
    run, sample = (Path(argument) for argument in sys.argv[1:])
    results: dict[str, Any] = {"linear": linear(run, sample)}
    for name, standardise in (("standardised", True), ("as_they_are", False)):
        results[name] = {str(seed): trained(run, sample, standardise, seed) for seed in SEEDS}
    print(json.dumps(results, indent=2))
    print(record("elmo_features", results))


if __name__ == "__main__":
    main()
