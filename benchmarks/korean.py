"""Korean vocabularies: the answers that they can express, what equal minutes of pre-training give, unknown words.

    python -m benchmarks.korean unknown wikipedia-ko.txt ratings_test.txt KorQuAD_v1.0_dev.json
    python -m benchmarks.korean tokenizers [NAME …] --data DATA [--vocabulary 32000]
    python -m benchmarks.korean ceilings [NAME …] --data DATA
    python -m benchmarks.korean pretrain NAME --data DATA --work WORK [--minutes 6]
    python -m benchmarks.korean finetune NAME --data DATA --work WORK [--seeds 5] [--jobs 5]
    python -m benchmarks.korean merge FILE …
    python -m benchmarks.korean show

A NAME is a kind of vocabulary, with `-kiwi` if its entries end at morphemes: wordpiece, wordpiece-kiwi, unigram, …
DATA holds the text (`text/*.txt` or `.txt.xz`), `KorQuAD_v1.0_dev.json` and NSMC's `ratings_train.txt` and
`ratings_test.txt` (up to three levels down); `tokenizers` puts `DATA/tokenizers` beside them, and is the only command
that needs kiwipiepy. `pretrain` trains the encoder of the recipe `speedrun` for the same minutes with each vocabulary;
`finetune` takes it through KorQuAD (dev cut in two by article: one half to train on, one to score) and NSMC. Each call
of the two fits into ten minutes on an H200. Runs in WORK that are finished are not run again. Every call adds to the
results of earlier ones; `--results` writes them into another folder, from which `merge` brings them back. `--smoke`
tries a command out on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import korean_text, korean_vocabularies
from benchmarks.korean_vocabularies import NAMES
from benchmarks.record import RESULTS, earlier, keep, merge_files

NAME = "korean"
Results = dict[str, Any]


def unknown(arguments: argparse.Namespace) -> None:
    """Measure unknown words and answers with small vocabularies."""
    for key, found in korean_text.measure(*map(Path, arguments.names)).items():
        keep(NAME, arguments.results, "text", key, found)


def tokenizers(arguments: argparse.Namespace) -> None:
    for name, seconds in korean_vocabularies.train_all(arguments):
        print(name, f"{seconds:.0f} s", flush=True)


def ceilings(arguments: argparse.Namespace) -> None:
    """Measure the ceiling of KorQuAD's answers, and how many borders of morphemes are borders of tokens."""
    for name in arguments.names or NAMES:
        keep(NAME, arguments.results, "ceilings", name, korean_vocabularies.ceiling(name, arguments.data))


def pretrain(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        keep(NAME, arguments.results, "pretraining", name, korean_vocabularies.pretrained(name, arguments))


def finetune(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        began = time.monotonic()
        found = korean_vocabularies.finetuned(name, arguments)
        keep(NAME, arguments.results, "tasks", name, {**found, "seconds": round(time.monotonic() - began)})
        print(name, json.dumps(found), flush=True)


def merge(arguments: argparse.Namespace) -> None:
    print(merge_files(NAME, arguments.names))


def show(arguments: argparse.Namespace) -> None:
    """Print a line for each vocabulary."""
    results = earlier(NAME, arguments.results)
    table = Table("vocabulary", "on borders", "best EM", "morphemes", "tokens a word", "KorQuAD EM", "F1", "NSMC")
    for name in NAMES:
        facts, tasks = results.get("ceilings", {}).get(name, {}), results.get("tasks", {}).get(name, {})
        limits = [facts.get(key, "–") for key in ("on_borders", "exact_match", "morpheme_borders", "tokens_per_word")]
        scores = [("korquad", "exact_match"), ("korquad", "f1"), ("nsmc", "accuracy")]
        table.add_row(name, *map(str, limits), *(_cell(tasks.get(task, {}).get(metric)) for task, metric in scores))
    Console(width=120).print(table)


def _cell(found: Results | None) -> str:
    return f"{found['mean']} ± {found['deviation']}" if found else "–"


COMMANDS = {
    "unknown": unknown,
    "tokenizers": tokenizers,
    "ceilings": ceilings,
    "pretrain": pretrain,
    "finetune": finetune,
    "merge": merge,
    "show": show,
}


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("names", nargs="*", help="vocabularies, or files")
    parser.add_argument("--data", type=Path, help="the folder with the text, KorQuAD, NSMC and tokenizers")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / NAME, help="folder for runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokenizers: entries")
    parser.add_argument("--minutes", type=float, default=6.0, help="pretrain: the time")
    parser.add_argument("--seeds", type=int, default=5, help="finetune: of each task")
    parser.add_argument("--jobs", type=int, default=5, help="finetune: at a time")
    parser.add_argument("--tasks", nargs="+", choices=korean_vocabularies.TASKS, default=[*korean_vocabularies.TASKS])
    parser.add_argument("--set", action="append", default=[], help="pretrain: a change of the settings")
    parser.add_argument("--device")
    parser.add_argument("--smoke", action="store_true", help="try the command out with tiny shapes")
    arguments = parser.parse_args(given)
    if arguments.smoke and arguments.results == RESULTS and arguments.command != "tokenizers":
        parser.error("--smoke needs --results FOLDER: what it measures means nothing")
    if arguments.command in ("tokenizers", "ceilings", "pretrain", "finetune"):
        if arguments.data is None:
            parser.error("--data is needed")
        if wrong := [name for name in arguments.names if name not in NAMES]:
            parser.error(f"{wrong[0]!r} is not one of {', '.join(NAMES)}")
        if arguments.command in ("pretrain", "finetune") and not arguments.names:
            parser.error(f"name a vocabulary: {', '.join(NAMES)}")
    return arguments


def main(given: list[str] | None = None) -> None:
    arguments = parse(given)
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
