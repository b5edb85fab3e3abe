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
that needs kiwipiepy. `pretrain` trains the encoder of the recipe `roberta-prenorm` for the same minutes with each
vocabulary; `finetune` takes it through KorQuAD (dev cut in two by article: one half to train on, one to score) and
NSMC. Each call of the two fits into ten minutes on an H200. Runs in WORK that are finished are not run again. Every
call adds to the results of earlier ones; `--results` writes them into another folder, from which `merge` brings them
back. `--smoke` tries a command out on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import korean_text, korean_vocabularies
from benchmarks.arguments import parsed, shared_parser
from benchmarks.family_pages import print_tables
from benchmarks.korean_vocabularies import NAMES
from benchmarks.record import earlier, keep, merge_files

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


def show(arguments: argparse.Namespace) -> None:
    """Print a line for each vocabulary."""
    results = earlier(NAME, arguments.results)
    rows = [["vocabulary", "on borders", "best EM", "morphemes", "tokens a word", "KorQuAD EM", "F1", "NSMC"]]
    for name in NAMES:
        facts, tasks = results.get("ceilings", {}).get(name, {}), results.get("tasks", {}).get(name, {})
        limits = [facts.get(key, "–") for key in ("on_borders", "exact_match", "morpheme_borders", "tokens_per_word")]
        scores = [("korquad", "exact_match"), ("korquad", "f1"), ("nsmc", "accuracy")]
        cells = (_cell(tasks.get(task, {}).get(metric)) for task, metric in scores)
        rows.append([name, *map(str, limits), *cells])
    print_tables({"vocabularies": rows}, width=120)


def _cell(found: Results | None) -> str:
    return f"{found['mean']} ± {found['deviation']}" if found else "–"


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "unknown": unknown,
    "tokenizers": tokenizers,
    "ceilings": ceilings,
    "pretrain": pretrain,
    "finetune": finetune,
    "merge": partial(merge_files, NAME),
    "show": show,
}


def main(given: list[str] | None = None) -> None:
    parser = shared_parser(
        NAME, __doc__, COMMANDS, names="vocabularies, or files",
        data="the folder with the text, KorQuAD, NSMC and tokenizers", minutes=(6.0, "pretrain: the time"),
        seeds=(5, "finetune: of each task"), jobs=(5, "finetune: at a time"), tasks=korean_vocabularies.TASKS,
    )  # fmt: skip
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokenizers: entries")
    parser.add_argument("--set", action="append", default=[], help="pretrain: a change of the settings")
    with_names = ("tokenizers", "ceilings", "pretrain", "finetune")
    arguments = parsed(parser, given, with_data=with_names, measuring=set(COMMANDS) - {"tokenizers"})
    if arguments.command in with_names:
        if wrong := [name for name in arguments.names if name not in NAMES]:
            parser.error(f"{wrong[0]!r} is not one of {', '.join(NAMES)}")
        if arguments.command in ("pretrain", "finetune") and not arguments.names:
            parser.error(f"name a vocabulary: {', '.join(NAMES)}")
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
