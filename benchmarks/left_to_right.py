"""What decides left to right against both ways: short pre-training runs that differ in one thing, then five tasks.

    python -m benchmarks.left_to_right plan
    python -m benchmarks.left_to_right run EXPERIMENT … --data DATA --work WORK [--minutes M] [--seeds 3] [--jobs 14]
    python -m benchmarks.left_to_right tune EXPERIMENT --tunings long mean [--at 0.5] --data DATA --work WORK
    python -m benchmarks.left_to_right merge FILE …
    python -m benchmarks.left_to_right show
    python -m benchmarks.left_to_right page

The data is that of `benchmarks.families` (text, a WordPiece tokenizer in DATA/tokenizers, GLUE), with SQuAD and
SQuADShifts. `run` pre-trains an encoder and fine-tunes it in all ways of its experiment; `tune` fine-tunes one that is
in the same WORK, finished or after a share of its run (`--at`), in other ways. Every call adds to the results of
earlier ones; `--results` writes them into another folder, from which `merge` brings them back, and `page` puts the
table into docs/paper.md. `--smoke` tries a command out in seconds on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arguments import parsed, shared_parser
from benchmarks.corpora import corpus_folder, text_files
from benchmarks.family_pages import Rows, mean_cell, print_tables, put_tables
from benchmarks.family_quality import masked_words, run_facts
from benchmarks.left_to_right_table import EXPERIMENTS, TASKS, TUNINGS, Experiment, pretraining_config, tuning_config
from benchmarks.record import earlier, keep, merge_files
from benchmarks.tuning import Variation, Way, task_data, tune_all
from bertsmith.pretraining.run import pretrain
from bertsmith.tasks.task import find_task
from bertsmith.training import runlog
from bertsmith.training.checkpoint import OPTIMIZER, STATE, checkpoints
from bertsmith.training.run import MODEL, is_finished
from bertsmith.training.speed import release_memory

NAME, PAGE = "left_to_right", Path(__file__).parent.parent / "docs" / "paper.md"
FINETUNING_MINUTES = 0.9  # of one way of fine-tuning with three seeds on an H200, as a plan assumes
Results = dict[str, Any]


def pretrained(name: str, arguments: argparse.Namespace) -> Path:
    """Pre-train an encoder unless that is done, and keep what it has learnt; the folder of the run.

    A run that was killed begins again: its minutes are to be whole ones.
    """
    run, corpus = arguments.work / NAME / name, corpus_folder(arguments.data, arguments.work, "wordpiece")
    if not is_finished(run):
        shutil.rmtree(run, ignore_errors=True)
        pretrain(pretraining_config(name, arguments.minutes, arguments.smoke), corpus, run, device=arguments.device)
        for left in run.glob(f"checkpoints/*/{OPTIMIZER}"):
            left.unlink()
    found = run_facts(run, corpus, text_files(arguments.data))
    found |= {"asks": EXPERIMENTS[name].asks, "curve": curve(run)}
    found["checkpoints"] = [checkpoint_facts(path, name, corpus, arguments) for path in saved(run)]
    keep(NAME, arguments.results, "pretraining", name, found)
    release_memory()
    return run


def curve(run: Path) -> list[list[float]]:
    """The training: the step, the tokens and the loss of every record."""
    return [[r["step"], r["tokens"], round(r["loss"], 4)] for r in runlog.read(run) if "loss" in r]


def saved(run: Path) -> list[Path]:
    """The models of a run: its checkpoints, of which the last one is the finished model."""
    return [*checkpoints(run)[:-1], run / MODEL]


def checkpoint_facts(model: Path, name: str, corpus: Path, arguments: argparse.Namespace) -> Results:
    """What a run had learnt at a checkpoint: the masked-word loss is measured in one way, whatever was masked."""
    run = arguments.work / NAME / name
    state = json.loads(((checkpoints(run)[-1] if model.name == MODEL else model) / STATE).read_text(encoding="utf-8"))
    found = {key: state[key] for key in ("step", "tokens", "seconds")}
    held_out = runlog.last_scores(run, None if model.name == MODEL else state["step"])
    found["held_out"] = {key: round(value, 4) for key, value in held_out.items() if key.endswith("_loss")}
    words = None if EXPERIMENTS[name].recipe.endswith("left-to-right") else masked_words(model, corpus, arguments)
    return {**found, "masked_words": words}


def model_at(run: Path, share: float) -> Path:
    """The model after a share of a run."""
    found = saved(run)
    total = json.loads((checkpoints(run)[-1] / STATE).read_text(encoding="utf-8"))
    for path in found[:-1]:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if max(state[key] / total[key] for key in ("seconds", "step")) >= share:
            return path
    return found[-1]


def finetuned(name: str, run: Path, share: float, tunings: list[str], arguments: argparse.Namespace) -> None:
    """Fine-tune a model on every task and seed in some ways, all of them together; keep the scores of each way."""
    model, ways = run / MODEL if share == 1.0 else model_at(run, share), {}
    for way in tunings:
        tuning = TUNINGS[way]
        tasks = [task for task in arguments.tasks if not (tuning.only_texts and task == "squad1")]
        configs = {task: tuning_config(tuning, task, 1, arguments.smoke) for task in tasks}
        key = f"{name} {way}" + (f" at {share:g}" if share < 1.0 else "")
        ways[way] = Way(key, model, configs, Variation(tuning.pooled))
    data = {task: task_data(arguments.data, task).splits(task) for task in arguments.tasks}
    found = tune_all(
        f"fine-tuning {name}", list(ways.values()), data,
        {task: find_task(task).metrics[0] for task in TASKS}, arguments.work / NAME / "tuned",
        seeds=arguments.seeds, jobs=arguments.jobs, device=arguments.device,
    )  # fmt: skip
    for way, described in ways.items():
        facts = {"experiment": name, "way": way, "share": share, "tasks": found[described.key]}
        keep(NAME, arguments.results, "tuning", described.key, facts)


def run(arguments: argparse.Namespace) -> None:
    """Pre-train and fine-tune experiments, one after the other."""
    for name in arguments.names:
        began, experiment = time.monotonic(), EXPERIMENTS[name]
        folder = pretrained(name, arguments)
        finetuned(name, folder, 1.0, list(arguments.tunings or experiment.tunings), arguments)
        for share in experiment.at:
            finetuned(name, folder, share, ["usual"], arguments)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def tune_again(arguments: argparse.Namespace) -> None:
    """Fine-tune encoders that are in WORK in other ways."""
    for name in arguments.names:
        folder = arguments.work / NAME / name
        if not is_finished(folder):
            raise SystemExit(f"{folder} holds no finished run: `run {name}` makes one")
        finetuned(name, folder, arguments.at, list(arguments.tunings or EXPERIMENTS[name].tunings), arguments)


def minutes_of(experiment: Experiment) -> float:
    """The estimated minutes of an experiment on an H200."""
    wide = {"": 1.0, "12x768": 2.0, "4x256": 0.7}[experiment.size]
    return experiment.minutes + 0.3 + wide * FINETUNING_MINUTES * (len(experiment.tunings) + len(experiment.at))


def plan(arguments: argparse.Namespace) -> None:
    """Print the experiments in their order, with the minutes of each."""
    rows = [[name, experiment.asks, f"{minutes_of(experiment):.1f}"] for name, experiment in EXPERIMENTS.items()]
    total = ["", "in all", f"{sum(map(minutes_of, EXPERIMENTS.values())):.0f}"]
    print_tables({"plan": [["experiment", "asks", "minutes"], *rows, total]}, width=120)


def rows_of(results: Results) -> Rows:
    """A line for each way of fine-tuning a model, under the names of the columns."""
    found = [["encoder", "fine-tuning", "million tokens", "loss", *TASKS.values()]]
    runs, order = results.get("pretraining", {}), list(EXPERIMENTS)
    for tuned in sorted(results.get("tuning", {}).values(), key=lambda each: order.index(each["experiment"])):
        facts = runs.get(tuned["experiment"], {}).get("checkpoints", [])
        total = facts[-1]["seconds"] if facts else 1.0
        point = next((f for f in facts if f["seconds"] / total >= tuned["share"] - 0.01), None)
        seen = ["–", "–"] if point is None else [f"{point['tokens'] / 1e6:,.0f}", f"{loss_of(point):.2f}"]
        name = tuned["experiment"] + (f", {tuned['share']:.0%} of the run" if tuned["share"] < 1 else "")
        found.append(
            [name, TUNINGS[tuned["way"]].what, *seen, *(mean_cell(tuned["tasks"].get(task)) for task in TASKS)]
        )
    return found


def loss_of(point: Results) -> float:
    """The held-out loss: of masked words measured in one way, or of the next word."""
    return point["masked_words"]["loss"] if point["masked_words"] else point["held_out"]["lm_loss"]


def tables(arguments: argparse.Namespace) -> dict[str, Rows]:
    return {"left to right": rows_of(earlier(NAME, arguments.results))}


def show(arguments: argparse.Namespace) -> None:
    print_tables(tables(arguments), width=170)


def page(arguments: argparse.Namespace) -> None:
    """Write the table into docs/paper.md."""
    put_tables(PAGE, tables(arguments))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "plan": plan, "run": run, "tune": tune_again, "merge": partial(merge_files, NAME), "show": show, "page": page,
}  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = shared_parser(
        NAME, __doc__, COMMANDS, names="experiments, or files to merge",
        data="the folder with text, the tokenizer, GLUE, SQuAD and SQuADShifts",
        minutes=(None, "of pre-training; default: the experiment's"), seeds=(3, "of fine-tuning"),
        jobs=(14, "fine-tunings at a time"), tasks=TASKS,
    )  # fmt: skip
    parser.add_argument("--tunings", nargs="+", choices=TUNINGS, help="ways of fine-tuning; default: the experiment's")
    parser.add_argument("--at", type=float, default=1.0, help="tune: the model after this share of the run")
    training = ("run", "tune")
    arguments = parsed(parser, given, with_data=training, measuring=training)
    if arguments.command in training:
        if unknown := [name for name in arguments.names if name not in EXPERIMENTS]:
            parser.error(f"unknown experiment {unknown[0]!r}; one of: {', '.join(EXPERIMENTS)}")
        if not arguments.names:
            parser.error("experiments are needed")
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
