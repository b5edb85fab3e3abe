"""The README's path from text to a classifier on a CPU: how long it takes, and what the models have learnt.

    python -m benchmarks.quickstart

`pretraining` has the share of masked words that the encoder guesses in held-out text, `classifier` the accuracy on the
dev rows for several seeds of fine-tuning, `seconds` the time of all commands of the README's path together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.record import record

SEEDS = (42, 43, 44)
TUNING = ("--lr", "5e-4", "--epochs", "15", "--batch-size", "16")


def bertsmith(folder: str, *arguments: str) -> dict[str, Any]:
    """Run a command in a folder and return the JSON object that it prints."""
    command = [sys.executable, "-m", "bertsmith", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def classifier(folder: str, seed: int) -> float:
    """Fine-tune on the rows of the demo and return the accuracy on its dev rows."""
    rows = ("--data", "sample/train.csv", "--dev", "sample/dev.csv")
    out = f"classifier-{seed}"
    bertsmith(folder, "finetune", "classify", "--model", "run", *rows, "--out", out, *TUNING, "--seed", str(seed))
    return float(bertsmith(folder, "evaluate", out, "--data", "sample/dev.csv")["accuracy"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        bertsmith(folder, "demo", "--out", "sample", "--text-only")
        bertsmith(folder, "tokenizer", "train", "sample/text.txt", "--out", "tok", "--vocab-size", "4000")
        bertsmith(folder, "corpus", "build", "sample/text.txt", "--tokenizer", "tok", "--out", "shards")
        scores = bertsmith(folder, "pretrain", "quickstart", "--data", "shards", "--out", "run")
        accuracies = {SEEDS[0]: classifier(folder, SEEDS[0])}
        seconds = time.perf_counter() - began
        accuracies |= {seed: classifier(folder, seed) for seed in SEEDS[1:]}
    results = {
        "pretraining": {name: round(scores[name], 2) for name in ("mlm_loss", "mlm_accuracy")},
        "classifier": {str(seed): round(accuracy, 1) for seed, accuracy in accuracies.items()},
        "seconds": round(seconds),
    }
    print(json.dumps(results, indent=2))
    print(record("quickstart", results))


if __name__ == "__main__":
    main()
