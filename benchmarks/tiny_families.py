"""The `-tiny` recipe of every family on a CPU, as the docs try them out: time, and what the models have learnt.

    python -m benchmarks.tiny_families [FAMILY …]

The text and the labelled rows are those of `bertsmith demo --text-only`. `frequent` is the share of the most frequent
token of the text, which a model that has learnt nothing else predicts. For ELECTRA, `detection` says how well the
discriminator tells replaced tokens from original ones: the area under the ROC curve (50 is chance) and the recall.
`classifier` is the accuracy on the dev rows after fine-tuning, `untrained` that of the same encoder after one step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quickstart import TUNING, bertsmith
from benchmarks.record import record
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

KINDS = {"roberta": "bytes", "albert": "unigram", "electra": "wordpiece", "distilbert": "wordpiece"}
TEACHER = "teacher"  # a run of `quickstart`


def frequent(shards: Path) -> float:
    """The share of the most frequent token, in per cent."""
    corpus = Corpus.open(shards)
    tokens = np.concatenate([corpus.document(number)[0] for number in range(corpus.manifest.documents)])
    return float(100 * np.bincount(tokens).max() / len(tokens))


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


def classifier(folder: str, run: str) -> float:
    """Fine-tune a run on the rows of the demo and return the accuracy on its dev rows."""
    rows, out = ("--data", "sample/train.csv", "--dev", "sample/dev.csv"), f"{run}-classifier"
    bertsmith(folder, "finetune", "classify", "--model", run, *rows, "--out", out, *TUNING)
    return round(float(bertsmith(folder, "evaluate", out, "--data", "sample/dev.csv")["accuracy"]), 1)


def measure(folder: str, family: str) -> dict[str, Any]:
    """Train a family's recipe, and fine-tune what it gives."""
    shards, run, options = f"shards-{KINDS[family]}", family, list[str]()
    if family == "distilbert":
        options = ["--teacher", TEACHER]
    began = time.perf_counter()
    scores = bertsmith(folder, "pretrain", f"{family}-tiny", "--data", shards, "--out", run, *options)
    seconds = time.perf_counter() - began
    bertsmith(
        folder, "pretrain", f"{family}-tiny", "--data", shards, "--out", f"{run}-0", *options, "--set", "train.steps=1"
    )
    names = ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "detection_accuracy", "detection_recall")
    results = {name: round(scores[name], 2) for name in names if name in scores}
    if family == "electra":
        results["detection_ranked"] = round(ranked(Path(folder, run), Path(folder, shards)), 1)
    results["frequent"] = round(frequent(Path(folder, shards)), 1)
    tuned = {"classifier": classifier(folder, run), "untrained": classifier(folder, f"{run}-0")}
    return {**results, **tuned, "seconds": round(seconds)}


def main() -> None:
    families = sys.argv[1:] or list(KINDS)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        bertsmith(folder, "demo", "--out", "sample", "--text-only")
        for kind in dict.fromkeys(KINDS[family] for family in families):
            tokenizer, size = f"tok-{kind}", ("--vocab-size", "4000")
            bertsmith(folder, "tokenizer", "train", "sample/text.txt", "--kind", kind, *size, "--out", tokenizer)
            bertsmith(folder, "corpus", "build", "sample/text.txt", "--tokenizer", tokenizer, "--out", f"shards-{kind}")
        if "distilbert" in families:
            scores = bertsmith(folder, "pretrain", "quickstart", "--data", "shards-wordpiece", "--out", TEACHER)
            results[TEACHER] = {"mlm_accuracy": round(scores["mlm_accuracy"], 2)}
        results |= {family: measure(folder, family) for family in families}
    print(json.dumps(results, indent=2))
    print(record("tiny_families", results))


if __name__ == "__main__":
    main()
