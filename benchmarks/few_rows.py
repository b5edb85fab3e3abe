"""What a few hundred labelled rows give: fine-tuning on the first of a data set's rows, scored on its whole dev set.

    python -m benchmarks.few_rows run usual --data DATA --tasks stsb --rows 400 --seeds 3 --jobs 2
    python -m benchmarks.few_rows merge FILE …
    python -m benchmarks.few_rows page

The model is the default one, or that of `--model`. The ways to fine-tune it are those of WAYS; rates and lengths are
those that `bertsmith finetune` has on rows of the user's own. Every call adds to the results of earlier ones, and
`page` puts the table into docs/experiments.md. `--smoke` tries `run` out with two steps.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.arguments import parsed, shared_parser
from benchmarks.family_pages import NAMES, Rows, mean_cell, print_tables, put_tables
from benchmarks.record import earlier, keep, merge_files, read_results
from benchmarks.tuning import Variation, Way, task_data, tune_all
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hub import DEFAULT, find_model
from bertsmith.rows.columns import Columns
from bertsmith.tasks.reading import Splits, find_splits, training_rows
from bertsmith.tasks.task import find_task

NAME, PAGE = "few_rows", Path(__file__).parent.parent / "docs" / "experiments.md"
TASKS = tuple(NAMES)
SEED = 1  # of the order from which the first rows are taken
WAYS = {  # what the table says of a way, and how it fine-tunes
    "usual": ("as `bertsmith finetune` does", Variation()),
    "from-zero": ("a regression starts at 0", Variation(at_mean=False)),
    "pooler-as-identity": ("the pooler starts as the identity", Variation(identity=True)),
    "direct": ("without the pooler", Variation(dense=False)),
    "mean-direct": ("the mean of all states, without the pooler", Variation("mean", dense=False)),
}


def first_rows(folder: Path, task: str, count: int) -> Splits:
    """So many rows of a task, in an order of our own, and its dev set; all ways are given the same rows."""
    found, spec = task_data(folder, task).splits(task), find_task(task)
    rows, _ = training_rows(spec, found.train, Columns())
    random.Random(SEED).shuffle(rows)
    names = {role: spec.names[role][0] for role in ("text", "pair", "label") if role in spec.names}
    records = [{name: getattr(row, role) for role, name in names.items()} for row in rows[:count]]
    return replace(find_splits(spec, records), dev=found.dev)


def run(arguments: argparse.Namespace) -> None:
    """Fine-tune in all ways that are named, on all tasks, all of them together."""
    model, ways = find_model(arguments.model or DEFAULT), []
    for name in arguments.names or list(WAYS):
        configs = {}
        for task in arguments.tasks:
            config = FinetuneConfig(task)
            train = replace(config.train, learning_rate=arguments.rate or config.train.learning_rate)
            train = replace(train, steps=2 if arguments.smoke else None)
            configs[task] = replace(config, train=train).with_length(arguments.rows, own=True)
        ways.append(Way(f"{name} {arguments.rows} {train.learning_rate:g}", model, configs, WAYS[name][1]))
    data = {task: first_rows(arguments.data, task, arguments.rows) for task in arguments.tasks}
    found = tune_all(
        "fine-tuning on few rows", ways, data, {task: find_task(task).metrics[0] for task in TASKS},
        arguments.work / NAME, seeds=arguments.seeds, jobs=arguments.jobs, device=arguments.device,
    )  # fmt: skip
    for way in ways:
        name, rows, rate = way.key.split()
        before = earlier(NAME, arguments.results).get("ways", {}).get(way.key, {}).get("tasks", {})
        facts = {"way": name, "rows": int(rows), "rate": float(rate), "tasks": {**before, **found[way.key]}}
        keep(NAME, arguments.results, "ways", way.key, facts)


def tables() -> dict[str, Rows]:
    """A line for each way, number of rows and rate."""
    rows = [["rows", "rate", "fine-tuned", *(NAMES[task] for task in TASKS)]]
    found = read_results(NAME).get("ways", {}).values()
    for each in sorted(found, key=lambda each: (each["rows"], each["rate"], list(WAYS).index(each["way"]))):
        scores = [mean_cell(each["tasks"].get(task)) for task in TASKS]
        rows.append([f"{each['rows']:,}", f"{each['rate']:g}", WAYS[each["way"]][0], *scores])
    return {"few rows": rows}


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "run": run, "merge": partial(merge_files, NAME),
    "show": lambda _: print_tables(tables(), width=120), "page": lambda _: put_tables(PAGE, tables()),
}  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = shared_parser(
        NAME, __doc__, COMMANDS, names="ways, or files to merge", data="the folder with GLUE",
        minutes=None, seeds=(3, "of fine-tuning"), jobs=(14, "fine-tunings at a time"), tasks=TASKS,
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=400, help="training rows")
    parser.add_argument("--rate", type=float, help="learning rate; default: that of `bertsmith finetune`")
    parser.add_argument("--model", help="the model that is fine-tuned; default: the default model")
    arguments = parsed(parser, given, with_data=("run",), measuring=("run",))
    if arguments.command == "run" and (unknown := [name for name in arguments.names if name not in WAYS]):
        parser.error(f"unknown way {unknown[0]!r}; one of: {', '.join(WAYS)}")
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
