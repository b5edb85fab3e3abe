"""The experiments of the speedrun: short pre-training runs that differ in one thing, then GLUE-5 by a fixed protocol.

    python -m benchmarks.speedrun plan [EXPERIMENT …] [--minutes 2] [--seeds 3]
    python -m benchmarks.speedrun tokenizers [NAME …] --data DATA
    python -m benchmarks.speedrun corpora NAME … --data DATA --work WORK
    python -m benchmarks.speedrun run EXPERIMENT … --data DATA --work WORK [--minutes 2] [--seeds 3] [--set key=value]
    python -m benchmarks.speedrun tune EXPERIMENT VARIANT … --data DATA --work WORK [--minutes 2] [--tasks cola rte]
    python -m benchmarks.speedrun merge FILE …
    python -m benchmarks.speedrun show
    python -m benchmarks.speedrun page

The data is that of `benchmarks.families`: text, tokenizers in DATA/tokenizers, GLUE. `run` pre-trains one experiment
after the other for the same minutes, and then fine-tunes all of them side by side by the protocol of `bertsmith
benchmark`; with `--seeds 0` it compares losses alone. `tune` fine-tunes the encoder of a `run` with the same minutes
and WORK, or a model folder, in other ways. Of SST-2 a fixed part of the training rows is used (`--rows`). Every call
adds to the results of earlier ones; `--results` writes them into another folder, from which `merge` brings them back,
and `page` puts the tables into docs/experiments.md. Runs in WORK that are finished are not run again. `--smoke` tries a
command out in seconds on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks import speedrun_pages
from benchmarks.arguments import parsed, shared_parser
from benchmarks.corpora import corpus_folder, text_files
from benchmarks.family_quality import masked_words, run_facts
from benchmarks.record import earlier, keep, merge_files
from benchmarks.speedrun_table import CORPORA, EXPERIMENTS, ROWS, VOCABULARIES, pretraining_config
from benchmarks.speedrun_variants import VARIANTS
from benchmarks.tuning import Way, scores_of, task_data, tune_all
from bertsmith.config import override
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.finetuning.benchmark import COLUMNS, protocol
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.finetuning.task_data import Data
from bertsmith.pretraining.run import pretrain
from bertsmith.training.checkpoint import OPTIMIZER
from bertsmith.training.run import MODEL, is_finished
from bertsmith.training.speed import release_memory

NAME = "speedrun"
GLUE5 = [column.task for column in COLUMNS if column.counts]
METRICS = {column.task: column.metric for column in COLUMNS}
LARGE = ("sst2",)  # tasks of which a part is used
SEGMENTS = "token_type_embeddings.weight"  # the end of the name of the table of segments
Results = dict[str, Any]


def key_of(name: str, arguments: argparse.Namespace) -> str:
    """The name of a run in the results and in WORK: runs of other minutes or settings are other ones."""
    return " ".join([name, f"{arguments.minutes:g} min", *arguments.set])


def run_folder(key: str, arguments: argparse.Namespace) -> Path:
    return arguments.work / NAME / key.replace(" ", "-")


def pretrained(name: str, arguments: argparse.Namespace) -> str:
    """Pre-train an experiment unless that is done, and keep what it has learnt; the key of the run.

    A run that was killed begins again, so that its minutes are whole ones; `--resume` is for more minutes than a
    machine can be held for at a time.
    """
    key, experiment = key_of(name, arguments), EXPERIMENTS[name]
    config = pretraining_config(name, arguments.minutes, arguments.set, arguments.smoke)
    corpus = corpus_folder(arguments.data, arguments.work, experiment.corpus, CORPORA[experiment.corpus])
    files, run, seconds = text_files(arguments.data, CORPORA[experiment.corpus].files), run_folder(key, arguments), None
    if not is_finished(run):
        if not arguments.resume:
            shutil.rmtree(run, ignore_errors=True)
        began = time.monotonic()
        pretrain(config, corpus, run, device=arguments.device, resume=arguments.resume)
        seconds = round(time.monotonic() - began, 1)
        for left in run.glob(f"checkpoints/*/{OPTIMIZER}"):
            left.unlink()
    found = {
        "experiment": name,
        "minutes": arguments.minutes,
        "changed": arguments.set,
        "corpus_name": experiment.corpus,
    }
    found |= run_facts(run, corpus, files)
    found["masked_words"] = masked_words(run / MODEL, corpus, arguments, files)
    before = earlier(NAME, arguments.results).get("pretraining", {}).get(key, {})
    found["seconds_in_all"] = seconds or before.get("seconds_in_all")  # with the start, compilation and saving
    keep(NAME, arguments.results, "pretraining", key, found)
    release_memory()
    return key


def data_of_tasks(arguments: argparse.Namespace) -> dict[str, Data]:
    """The data of the tasks; of large ones a part of the training rows."""
    found = {}
    for task in arguments.tasks:
        data = task_data(arguments.data, task)
        found[task] = part_of(data, task, arguments.rows, arguments.work) if task in LARGE and arguments.rows else data
    return found


def part_of(data: Data, task: str, rows: int, work: Path) -> Data:
    """A fixed part of a task's training rows, evenly spread over its file; all of them if there are no more."""
    (file,) = data.splits(task).train
    assert isinstance(file, Path)
    header, *lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if len(lines) <= rows:
        return data
    chosen = [lines[number * len(lines) // rows] for number in range(rows)]
    path = work / NAME / "tasks" / f"{task}-{rows}{file.suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join([header, *chosen]), encoding="utf-8")
    return replace(data, train=path, dev=file.parent, is_subset=True)


def one_segment(model: Path, out: Path) -> Path:
    """A copy of a model whose segments all have the vector of the first."""
    if not out.exists():
        shutil.copytree(model, out)
        tensors = load_file(out / "model.safetensors")
        for name in (name for name in tensors if name.endswith(SEGMENTS)):  # none where there is no such table
            tensors[name] = tensors[name][:1].expand_as(tensors[name]).contiguous()
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def ways_of(
    key: str, model: Path, variants: list[str], data: dict[str, Data], arguments: argparse.Namespace
) -> dict[tuple[str, str], Way]:
    """The ways of fine-tuning a model, by the key of its run and the names of the variants."""
    found = {}
    rows = "" if arguments.rows == ROWS else f", {arguments.rows or 'all'} rows"
    for name in variants:
        variant = VARIANTS[name]
        tasks = [task for task in data if not variant.tasks or task in variant.tasks]
        configs = {task: tuning_config(task, data[task], variant.settings, arguments.smoke) for task in tasks}
        copied = one_segment(model, model.parent / f"{MODEL}-one-segment") if variant.one_segment else model
        found[key, name] = Way(f"{key}: {name}{rows}", copied, configs, variant.variation)
    return found


def tuning_config(task: str, data: Data, settings: tuple[str, ...], smoke: bool) -> FinetuneConfig:
    """The protocol with the settings of a variant; to try it out, two steps on short sequences."""
    config = protocol(task, data, settings)
    return override(config, ["train.steps=2", "data.max_length=32", "data.max_query=8"]) if smoke else config


def finetuned(ways: dict[tuple[str, str], Way], data: dict[str, Data], arguments: argparse.Namespace) -> None:
    """Fine-tune in all ways at once, and keep the scores of each; `ways` has them by run and variant.

    A call that is stopped keeps those of the tasks of which all seeds are done.
    """
    began, folder = time.monotonic(), arguments.work / NAME / "tuned"
    facts: Results = {"seeds": arguments.seeds, "rows": arguments.rows}
    try:
        tune_all(
            f"fine-tuning {len(ways)} times", list(ways.values()), {task: data[task].splits(task) for task in data},
            METRICS, folder, seeds=arguments.seeds, jobs=arguments.jobs, device=arguments.device,
        )  # fmt: skip
        runs = sum(len(way.configs) * arguments.seeds for way in ways.values())
        facts |= {"seconds_of_all": round(time.monotonic() - began), "runs_of_all": runs}
    finally:
        for (key, variant), way in ways.items():
            tasks = scores_of(way, METRICS, folder, arguments.seeds)
            found: Results = {"run": key, "variant": variant, "tasks": tasks, **facts}
            if tasks.keys() >= set(GLUE5):
                found["glue5"] = round(mean(tasks[task]["median"] for task in GLUE5), 2)
            if tasks:
                keep(NAME, arguments.results, "tuning", way.key, found)


def run(arguments: argparse.Namespace) -> None:
    """Pre-train experiments one after the other, then fine-tune all of them together."""
    began = time.monotonic()
    data = data_of_tasks(arguments) if arguments.seeds else {}  # missing data is reported before anything is trained
    ways: dict[tuple[str, str], Way] = {}
    for key in [pretrained(name, arguments) for name in arguments.names]:
        ways |= ways_of(key, run_folder(key, arguments) / MODEL, ["protocol"], data, arguments)
    if arguments.seeds:
        finetuned(ways, data, arguments)
    print(f"{', '.join(arguments.names)}: {time.monotonic() - began:.0f} s", flush=True)


def tune(arguments: argparse.Namespace) -> None:
    """Fine-tune one encoder in several ways."""
    name, *variants = arguments.names
    key, model = key_of(name, arguments), run_folder(key_of(name, arguments), arguments) / MODEL
    if name not in EXPERIMENTS:
        key, model = Path(name).name, Path(name) / MODEL if (Path(name) / MODEL).exists() else Path(name)
    if not (model / "config.json").exists():
        raise SystemExit(f"{model} is missing: `run {name} --minutes {arguments.minutes:g}` makes it")
    data = data_of_tasks(arguments)
    finetuned(ways_of(key, model, variants, data, arguments), data, arguments)


def tokenizers(arguments: argparse.Namespace) -> None:
    """Train the tokenizers that `benchmarks.families tokenizers` does not."""
    for name in arguments.names or VOCABULARIES:
        wanted, out = VOCABULARIES[name], arguments.data / "tokenizers" / name
        if not out.exists():
            text = text_files(arguments.data)
            train_tokenizer(text, out, vocab_size=wanted.entries, kind=wanted.kind, cased=wanted.cased)  # type: ignore[arg-type]
        print(out)


def corpora(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        began = time.monotonic()
        print(corpus_folder(arguments.data, arguments.work, name, CORPORA[name]), f"{time.monotonic() - began:.0f} s")


def plan(arguments: argparse.Namespace) -> None:
    names = arguments.names or list(EXPERIMENTS)
    speedrun_pages.show_plan(names, arguments.minutes, arguments.seeds, earlier(NAME, arguments.results))


def show(arguments: argparse.Namespace) -> None:
    speedrun_pages.show(earlier(NAME, arguments.results))


def page(arguments: argparse.Namespace) -> None:
    speedrun_pages.write_page(earlier(NAME, arguments.results))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "plan": plan, "tokenizers": tokenizers, "corpora": corpora, "run": run, "tune": tune, "show": show, "page": page,
    "merge": partial(merge_files, NAME),
}  # fmt: skip
NAMED: dict[str, Collection[str]] = {
    "plan": EXPERIMENTS, "run": EXPERIMENTS, "tune": VARIANTS, "corpora": CORPORA, "tokenizers": VOCABULARIES,
}  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = shared_parser(
        NAME, __doc__, COMMANDS, names="experiments; an experiment and variants; tokenizers; corpora; files",
        data="the folder with text, tokenizers and GLUE", minutes=(2.0, "of pre-training"),
        seeds=(3, "of fine-tuning; 0: no fine-tuning"), jobs=(15, "fine-tunings at a time"), tasks=METRICS,
    )  # fmt: skip
    parser.set_defaults(tasks=GLUE5)
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows of SST-2; 0: all")
    parser.add_argument("--set", action="append", default=[], help="run: a further change of the settings")
    parser.add_argument("--resume", action="store_true", help="run: go on with a run that was stopped by SIGTERM")
    with_data = ("run", "tune", "corpora", "tokenizers")
    arguments = parsed(parser, given, with_data=with_data, measuring=COMMANDS)
    known = NAMED.get(arguments.command, {})
    for name in arguments.names[arguments.command == "tune" :] if known else ():  # the first one may be a folder
        if name not in known:
            parser.error(f"{name!r} is not one of: {', '.join(known)}")
    if len(arguments.names) < {"run": 1, "tune": 2, "corpora": 1, "merge": 1}.get(arguments.command, 0):
        parser.error("names are needed: experiments, an experiment and variants, corpora or files")
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
