"""What becomes of an encoder's weights in a long run with Muon, and of its fine-tuning, by weight decay; on a CPU.

    python -m benchmarks.weight_growth run NAME … --data DATA --work WORK [--steps 9000] [--threads 1]
    python -m benchmarks.weight_growth tune NAME … --data DATA --work WORK [--rates 1e-4 1e-3] [--tasks stsb cola]
    python -m benchmarks.weight_growth page

A run is named by its form and its weight decay, `modern-0.01` say; four minutes on one H200 have 13,800 steps. The
forms are those that were trained there, small enough for a CPU: 3 × 128, 24 sequences of 48 tokens a step. DATA/text
holds text files, and the folders of the tasks are anywhere up to three levels down. `run` pre-trains, and measures the
weights and the attention (`benchmarks/weights.py`); `tune` fine-tunes at several rates, SST-2 on a part of its rows.
Every call adds to the results of earlier ones, and `page` puts the table into docs/experiments.md.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.corpora import corpus_folder, text_files, train_tokenizers
from benchmarks.family_pages import NAMES, Rows, put_tables
from benchmarks.family_quality import run_facts
from benchmarks.family_table import quality_config
from benchmarks.record import RESULTS, earlier, keep
from benchmarks.speedrun import LARGE, METRICS, part_of
from benchmarks.tuning import scores_in, task_data, tune
from benchmarks.weights import MATRICES
from bertsmith.config import override
from bertsmith.finetuning.settings import FinetuneConfig, FinetuneData
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.training.run import MODEL, is_finished
from bertsmith.training.settings import TrainConfig

NAME, PAGE = "weight_growth", Path(__file__).parents[1] / "docs" / "experiments.md"
VOCABULARY, ROWS, EPOCHS, EVERY = 4_000, 5_000, 3.0, 0.05
SMALL = (
    "model.num_layers=3", "model.hidden_size=128", "model.num_heads=2", "model.max_positions=48",
    "model.init_std=0.049", "data.max_length=48", "train.batch_size=24", "train.micro_batch_size=null",
    "train.workers=0", f"train.evaluate_every={EVERY}",
)  # fmt: skip
# The starting configuration of each form and what else it changes; both mask 15 % here, so that losses compare.
FORMS: dict[str, tuple[Callable[[], PretrainConfig], tuple[str, ...]]] = {
    "modern": (lambda: quality_config("modern", 4, False, []), ("model.intermediate_size=320",)),
    "prenorm": (lambda: recipe("roberta-prenorm"), ("model.intermediate_size=512", "train.warmup=0.1")),
}
Results = dict[str, Any]


def config_of(name: str, steps: int) -> PretrainConfig:
    """The configuration of a run: `modern-0.01` is the form `modern` with a weight decay of 0.01."""
    form, _, decay = name.rpartition("-")
    if form not in FORMS:
        raise SystemExit(f"{name!r}: write FORM-DECAY, the form one of {', '.join(FORMS)}")
    start, changes = FORMS[form]
    config = replace(start(), recipe=name)
    config = replace(config, train=replace(config.train, hours=None, steps=steps))
    return override(config, [*SMALL, *changes, "data.masking.rate=0.15", f"train.weight_decay={decay}"])


def key_of(name: str, steps: int) -> str:
    return f"{name}, {steps:,} steps"


def run_folder(name: str, arguments: argparse.Namespace) -> Path:
    return arguments.work / NAME / f"{name}-{arguments.steps}"


def run(arguments: argparse.Namespace) -> None:
    """Pre-train, unless that is done, and measure the weights and the attention."""
    train_tokenizers(arguments.data, ["wordpiece"], VOCABULARY)
    corpus = corpus_folder(arguments.data, arguments.work, "wordpiece")
    for name in arguments.names:
        folder = run_folder(name, arguments)
        if not is_finished(folder):
            shutil.rmtree(folder, ignore_errors=True)
            pretrain(config_of(name, arguments.steps), corpus, folder, device="cpu")
        found = run_facts(folder, corpus, text_files(arguments.data))
        keep(NAME, arguments.results, "pretraining", key_of(name, arguments.steps), found)


def tuning_config(task: str, rate: float, seed: int) -> FinetuneConfig:
    train = TrainConfig(epochs=EPOCHS, batch_size=32, learning_rate=rate, warmup=0.1, seed=seed, workers=0)
    return FinetuneConfig(task, FinetuneData(max_length=48), train, restarts=0, dropout=0.1)


def fine_tune(arguments: argparse.Namespace) -> None:
    """Fine-tune finished runs at several rates, and keep the scores."""
    data = {task: task_data(arguments.data, task) for task in arguments.tasks}
    data |= {task: part_of(data[task], task, ROWS, arguments.work) for task in data if task in LARGE}
    splits = {task: data[task].splits(task) for task in data}
    for name in arguments.names:
        run = run_folder(name, arguments)
        found: Results = {}
        for task, rate in ((task, rate) for task in arguments.tasks for rate in arguments.rates):
            folder = run / "tuned" / task / f"{rate:g}"
            for seed in range(1, arguments.seeds + 1):
                tune(tuning_config(task, rate, seed), run / MODEL, splits[task], folder / str(seed), "cpu")
            found.setdefault(task, {})[f"{rate:g}"] = scores_in(folder, METRICS[task])
            keep(NAME, arguments.results, "tuning", key_of(name, arguments.steps), dict(found))


def table(results: Results) -> Rows:
    """A line for each run: loss, weights, attention, and the scores of each task at each rate."""
    tuning = results.get("tuning", {})
    tasks = {task: list(rates) for found in tuning.values() for task, rates in found.items() if task in METRICS}
    rows = [["run", "loss", "weights, as a multiple of the start", "largest attention weight",
             *(f"{NAMES.get(task, task)} at {', '.join(rates)}" for task, rates in tasks.items())]]  # fmt: skip
    for key, found in results.get("pretraining", {}).items():
        weights = found["weights"]
        scale = [max(weights[name]) / weights["init_std"] for name in MATRICES]
        scores = [
            [tuning.get(key, {}).get(task, {}).get(rate, {}).get("mean") for rate in tasks[task]] for task in tasks
        ]
        rows.append([key, f"{found['held_out']['mlm_loss']:.2f}", f"{max(scale):.1f}",
                     ", ".join(f"{value:.2f}" for value in weights["largest_attention_weight"]),
                     *(", ".join("–" if s is None else f"{s:.1f}" for s in each) for each in scores)])  # fmt: skip
    return rows


def page(arguments: argparse.Namespace) -> None:
    put_tables(PAGE, {"weight growth": table(earlier(NAME, arguments.results))})


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"run": run, "tune": fine_tune, "page": page}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("names", nargs="*", help="FORM-DECAY, such as modern-0.01")
    parser.add_argument("--data", type=Path, help="the folder with text and the tasks")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / NAME, help="folder for runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--steps", type=int, default=9_000, help="of pre-training")
    parser.add_argument("--threads", type=int, default=1, help="of this process")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3], help="of fine-tuning")
    parser.add_argument("--tasks", nargs="+", choices=METRICS, default=["stsb", "sst2", "mrpc"])
    parser.add_argument("--seeds", type=int, default=1, help="of fine-tuning")
    arguments = parser.parse_args(given)
    if arguments.command != "page" and (arguments.data is None or not arguments.names):
        parser.error("--data and the names of runs are needed")
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # sharp attention has weights of 1e-40, with which a step takes six times as long
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
