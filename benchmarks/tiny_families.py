"""The `-tiny` recipe of every family on a CPU, as the docs try them out: time, and what the models have learnt.

    python -m benchmarks.tiny_families [FAMILY …]

The text and the labelled rows are those of `bertsmith demo --text-only`. `frequent` is the share of the most frequent
token of the text, which a model that has learnt nothing else predicts, and `entropy` that of single tokens in nats,
the loss of such a model. For ELECTRA, `detection` says how well the discriminator tells replaced tokens from original
ones: the area under the ROC curve (50 is chance) and the recall. `classifier` is the accuracy on the dev rows after
fine-tuning, `untrained` that of the same encoder after one step, `constant` that of the most frequent label. Families
that are not named keep their results.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quickstart import TUNING, bertsmith
from benchmarks.record import RESULTS, keep
from bertsmith import config as configs
from bertsmith.corpus.shards import Corpus
from bertsmith.model.heads import sample
from bertsmith.objectives.replaced_token import ReplacedToken, corrupt
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import split_documents
from bertsmith.pretraining.models import saved_model
from bertsmith.pretraining.phases import make_loader
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.text.tokenizer import Tokenizer

KINDS = {
    "roberta": "bytes",
    "albert": "unigram",
    "electra": "wordpiece",
    "distilbert": "wordpiece",
    "deberta": "bytes",
    "modern": "bytes",
    "elmo": "words",
    "gpt": "bpe",
}
TEACHER = "teacher"  # a run of `quickstart`
SCORES = ("loss", "accuracy", "perplexity")
FEATURES = ("--features", "mix-all", "--set", "features.hidden_size=128", "--epochs", "15", "--batch-size", "16")
ROWS = ("--data", "sample/train.csv", "--dev", "sample/dev.csv")


def single_tokens(shards: Path) -> dict[str, float]:
    """The share of the most frequent token in per cent, and the entropy of single tokens in nats."""
    corpus = Corpus.open(shards)
    tokens = np.concatenate([corpus.document(number)[0] for number in range(corpus.manifest.documents)])
    shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
    entropy = -(shares * np.log(shares)).sum()
    return {"frequent": round(float(100 * shares.max()), 1), "entropy": round(float(entropy), 2)}


def constant(rows: Path) -> float:
    """The share of the most frequent label in per cent."""
    with rows.open(encoding="utf-8", newline="") as lines:
        labels = Counter(row["label"] for row in csv.DictReader(lines))
    return round(100 * max(labels.values()) / labels.total(), 1)


@torch.inference_mode()
def ranked(run: Path, shards: Path) -> float:
    """How often the discriminator gives a replaced token the higher score of two, in per cent (the area under ROC)."""
    corpus, tokenizer = Corpus.open(shards), Tokenizer.load(shards)
    objective, config = saved_model(configs.load(PretrainConfig, run / "config.json"), run / "model", corpus)
    assert isinstance(objective, ReplacedToken)
    objective.eval()
    _, documents = split_documents(corpus.manifest.documents, config.data.held_out)
    loader = make_loader(config, corpus, documents, tokenizer, config.data.max_length)
    torch.manual_seed(0)
    scores, labels = [], []
    for indices in held_out.batches(loader):
        batch = loader.batch(np.zeros_like(indices), indices)
        drawn = sample(objective.token_logits(batch), batch.labels["targets"], objective.sampling)
        corrupted = corrupt(batch, drawn)
        found = objective.discriminator.logits(corrupted.batch)["detection"]
        scores.append(found[corrupted.valid].numpy())
        labels.append(corrupted.replaced[corrupted.valid].numpy())
    ordered = np.concatenate(labels)[np.argsort(np.concatenate(scores), kind="stable")]
    ranks, replaced = np.flatnonzero(ordered) + 1, int(ordered.sum())
    above = ranks.sum() - replaced * (replaced + 1) / 2
    return float(100 * above / (replaced * (len(ordered) - replaced)))


def classifier(folder: str, family: str, run: str) -> float:
    """Fine-tune a run on the rows of the demo, or train on ELMo's features, and return the accuracy on its dev rows."""
    out, options = f"{run}-classifier", FEATURES if family == "elmo" else TUNING
    bertsmith(folder, "finetune", "classify", "--model", run, *ROWS, "--out", out, *options)
    return round(float(bertsmith(folder, "evaluate", out, "--data", "sample/dev.csv")["accuracy"]), 1)


def measure(folder: str, family: str) -> dict[str, Any]:
    """Train a family's recipe, and fine-tune what it gives."""
    shards, options = f"shards-{KINDS[family]}", ["--teacher", TEACHER] if family == "distilbert" else []
    command = ("pretrain", f"{family}-tiny", "--data", shards, *options)
    began = time.perf_counter()
    scores = bertsmith(folder, *command, "--out", family)
    seconds = time.perf_counter() - began
    bertsmith(folder, *command, "--out", f"{family}-0", "--set", "train.steps=1")
    results = {name: round(score, 2) for name, score in scores.items() if name.endswith(SCORES)}
    if family == "electra":
        results["detection_ranked"] = round(ranked(Path(folder, family), Path(folder, shards)), 1)
    results |= single_tokens(Path(folder, shards))
    tuned = {"classifier": classifier(folder, family, family), "untrained": classifier(folder, family, f"{family}-0")}
    return {**results, **tuned, "constant": constant(Path(folder, "sample/dev.csv")), "seconds": round(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(KINDS)}; none: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    families = arguments.families or list(KINDS)
    if unknown := sorted(set(families) - set(KINDS)):
        parser.error(f"{unknown[0]!r} is not one of: {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as folder:
        bertsmith(folder, "demo", "--out", "sample", "--text-only")
        for kind in dict.fromkeys(KINDS[family] for family in families):
            tokenizer, size = f"tok-{kind}", ("--vocab-size", "4000")
            bertsmith(folder, "tokenizer", "train", "sample/text.txt", "--kind", kind, *size, "--out", tokenizer)
            bertsmith(folder, "corpus", "build", "sample/text.txt", "--tokenizer", tokenizer, "--out", f"shards-{kind}")
        if "distilbert" in families:
            bertsmith(folder, "pretrain", "quickstart", "--data", "shards-wordpiece", "--out", TEACHER)
        for family in families:
            keep("tiny_families", arguments.results, "families", family, measure(folder, family))


if __name__ == "__main__":
    main()
