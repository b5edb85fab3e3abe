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
import torch
import torch.nn.functional as F

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
        loss = runlog.last_loss(out, "task_loss")
    return {"accuracy": round(float(scores["accuracy"]), 1), "loss": round(loss, 2)}


def linear(run: Path, sample: Path) -> float:
    """The accuracy on the dev rows of logistic regression on the mean states of a text."""
    embedders = [bertsmith.Embedder.load(run, "cpu", pooling="mean", normalize=False, layer=n) for n in (0, 1, 2)]
    inputs, labels = {}, {}
    for name in ("train", "dev"):
        with (sample / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        texts = [row["text"] for row in rows]
        inputs[name] = torch.from_numpy(np.concatenate([np.array(each(texts)) for each in embedders], 1)).double()
        labels[name] = [row["label"] for row in rows]
    names = sorted(set(labels["train"]))
    targets = {name: torch.tensor([names.index(label) for label in found]) for name, found in labels.items()}
    mean, deviation = inputs["train"].mean(0), inputs["train"].std(0)
    x, dev = ((inputs[name] - mean) / deviation for name in ("train", "dev"))
    accuracies = []
    for penalty in PENALTIES:
        weight = _fitted(x, targets["train"], len(names), penalty)
        right = (F.pad(dev, (0, 1), value=1.0) @ weight).argmax(-1) == targets["dev"]
        accuracies.append(100 * right.double().mean().item())
    return round(max(accuracies), 1)


def _fitted(x: torch.Tensor, targets: torch.Tensor, classes: int, penalty: float) -> torch.Tensor:
    """The weights of logistic regression, whose last row is the bias."""
    x = F.pad(x, (0, 1), value=1.0)
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimizer.zero_grad()
        total = F.cross_entropy(x @ weight, targets, reduction="sum") + penalty / 2 * weight[:-1].square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)
    return weight.detach()


def main() -> None:
    run, sample = (Path(argument) for argument in sys.argv[1:])
    results: dict[str, Any] = {"linear": linear(run, sample)}
    for name, standardise in (("standardised", True), ("as_they_are", False)):
        results[name] = {str(seed): trained(run, sample, standardise, seed) for seed in SEEDS}
    print(json.dumps(results, indent=2))
    print(record("elmo_features", results))


if __name__ == "__main__":
    main()
