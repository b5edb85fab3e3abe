"""The families beside BERT on one GPU: the speed of their steps, and what equal minutes of pre-training give.

    python -m benchmarks.families speed [FAMILY …] [--size base|large] [--no-peer]
    python -m benchmarks.families tokenizers --data DATA
    python -m benchmarks.families corpora --data DATA --work WORK
    python -m benchmarks.families quality FAMILY … --data DATA --work WORK [--minutes 4 | --tokens 240] [--seeds 3]
                                                   [--teacher FAMILY] [--tasks conll2003 …]
    python -m benchmarks.families cpu [FAMILY …] [--threads 2]
    python -m benchmarks.families merge FILE …
    python -m benchmarks.families show
    python -m benchmarks.families page

`DATA/text` (or `DATA/*/text`) holds text files, `tokenizers` puts `DATA/tokenizers` beside it, and the folders of GLUE
and `conll2003` (train.txt, valid.txt) may be anywhere up to three levels down. `quality` takes one family after the
other through pre-training and fine-tuning, so one call for each family fits into ten minutes; DistilBERT comes last,
because its teacher is the best of the others and must be in the same WORK. With `--tokens`, in millions, a run and its
schedule end after that many tokens instead of some minutes, and its results have a place of their own. Fine-tunings run
side by side, faster after `nvidia-cuda-mps-control -d`. Runs in WORK that are finished are not run again, so a call
with other `--tasks` adds their scores, and one with `--seeds 0` pre-trains alone. Every call adds to the results of
earlier ones; `--results` writes them into another folder, from which `merge` brings them back, and `page` puts the
tables into docs/families.md. `cpu` measures predictions, on a machine that does nothing else. `--smoke` tries a command
out in seconds on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import family_cpu, family_pages, family_quality, family_speed
from benchmarks.arguments import parsed, shared_parser
from benchmarks.corpora import KINDS, VOCABULARY, corpus_folder, train_tokenizers
from benchmarks.family_table import FAMILIES
from benchmarks.record import earlier, keep, merge_files

NAME = "families"
Results = dict[str, Any]


def speed(arguments: argparse.Namespace) -> None:
    """Measure every family's steps; BERT's come first, because the others are compared with them."""
    size = "smoke" if arguments.smoke else arguments.size
    asked = arguments.names or list(family_speed.MEASURED)
    bert: Results = {}
    failed = []
    for name in dict.fromkeys(["bert", *asked]):
        try:
            found = family_speed.measure_family(name, size, peer=name in asked and not arguments.no_peer)
        except Exception:  # the others are worth having
            if name == "bert":
                raise
            traceback.print_exc()
            failed.append(name)
            continue
        bert = bert or found
        if name in asked:
            found = family_speed.beside_bert(found, bert)
            print(name, json.dumps(found), flush=True)
            keep(NAME, arguments.results, "speed", f"{name}, {size}", found)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def tokenizers(arguments: argparse.Namespace) -> None:
    train_tokenizers(arguments.data, arguments.names or list(KINDS), arguments.vocabulary)


def corpora(arguments: argparse.Namespace) -> None:
    for kind in arguments.names or KINDS:
        began = time.monotonic()
        print(corpus_folder(arguments.data, arguments.work, kind), f"{time.monotonic() - began:.0f} s")


def quality(arguments: argparse.Namespace) -> None:
    """Pre-train and fine-tune families, one after the other."""
    part = family_quality.section(arguments)
    for name in arguments.names:
        began = time.monotonic()
        for found in family_quality.measure_quality(name, arguments, earlier(NAME, arguments.results).get(part, {})):
            found["seconds_in_all"] = round(time.monotonic() - began)
            keep(NAME, arguments.results, part, name, found)
        print(name, json.dumps(found), flush=True)


def cpu(arguments: argparse.Namespace) -> None:
    """Measure the predictions of families beside each other on a CPU."""
    for key, found in family_cpu.measure_cpu(
        arguments.names or list(FAMILIES), arguments.threads, arguments.smoke
    ).items():
        print(key, json.dumps(found), flush=True)
        keep(NAME, arguments.results, "cpu", key, found)


def show(arguments: argparse.Namespace) -> None:
    family_pages.show(earlier(NAME, arguments.results))


def page(arguments: argparse.Namespace) -> None:
    """Write the tables into docs/families.md."""
    family_pages.write_page(earlier(NAME, arguments.results))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "speed": speed,
    "tokenizers": tokenizers,
    "corpora": corpora,
    "quality": quality,
    "cpu": cpu,
    "merge": partial(merge_files, NAME),
    "show": show,
    "page": page,
}


def main(given: list[str] | None = None) -> None:
    parser = shared_parser(
        NAME, __doc__, COMMANDS, names="families, kinds of tokenizers or files; all without",
        data="the folder with text, tokenizers and GLUE", minutes=(4.0, "quality: of pre-training"),
        seeds=(3, "quality: of fine-tuning; 0: no fine-tuning"), jobs=(14, "quality: fine-tunings at a time"),
        tasks=family_quality.TASKS,
    )  # fmt: skip
    parser.add_argument("--tokens", type=float, help="quality: millions of tokens of pre-training, instead of minutes")
    parser.add_argument("--threads", type=int, default=2, help="cpu: of PyTorch")
    parser.add_argument("--size", choices=("base", "large"), default="base", help="speed: the shape")
    parser.add_argument("--no-peer", action="store_true", help="speed: without transformers")
    parser.add_argument(
        "--teacher", choices=FAMILIES, help="quality distilbert: the teacher instead of the best family"
    )
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokenizers: entries")
    parser.add_argument("--set", action="append", default=[], help="quality: a change of the pre-training settings")
    with_data = ("tokenizers", "corpora", "quality")
    arguments = parsed(parser, given, with_data=with_data, measuring=COMMANDS)
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
