"""The paper's tables at scale `hour`, row by row: run rows, keep their scores, and put the tables into docs/paper.md.

    python -m benchmarks.paper_hour tokenizers --data DATA
    python -m benchmarks.paper_hour run RECIPE … --data DATA --work WORK [--pretraining-seed 2] [--tables table5]
    python -m benchmarks.paper_hour merge FILE …
    python -m benchmarks.paper_hour unpack FOLDER
    python -m benchmarks.paper_hour page --data DATA

`DATA/text` (or `DATA/*/text`) holds text files, `tokenizers` puts `DATA/tokenizers` beside it, and the folders of the
tasks are anywhere up to three levels down. `run` calls `bertsmith reproduce` for the rows of these recipes, and adds
the scores of all finished runs in WORK to the results of earlier calls, also where a run has failed. `--results` writes
them into another folder, from which `merge` brings them back. `unpack` writes them as the files that
`bertsmith reproduce --show --out FOLDER` reads, and `page` makes the tables of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.corpora import VOCABULARY, corpus_folder, train_tokenizers
from benchmarks.family_pages import Rows, put_tables
from benchmarks.record import RESULTS, TAKEN, earlier, keep, merge_files
from bertsmith.config import read_json, write_json
from bertsmith.finetuning.scored import SCORES
from bertsmith.formats.families.table import family_of
from bertsmith.paper.pages import ABSENT, cell_text, findings
from bertsmith.paper.reproduce import reproduce
from bertsmith.recipes import recipe
from bertsmith.text.tokenizer import Kind

NAME, SCALE, PAGE = "paper_hour", "hour", Path(__file__).parents[1] / "docs" / "paper.md"
VOCABULARIES: dict[Kind, int] = {"wordpiece": VOCABULARY, "bpe": VOCABULARY, "words": 200_000}  # and their sizes
SEEDS = 5  # of fine-tuning
TABLES = ("table5", "figure5")  # that the page has
Results = dict[str, Any]


def kind_of(name: str) -> str:
    """The kind of vocabulary of a recipe."""
    return family_of(recipe(name).model).vocabulary or "wordpiece"


def tokenizers(arguments: argparse.Namespace) -> None:
    """Train the tokenizers of the three systems."""
    for kind, size in VOCABULARIES.items():
        train_tokenizers(arguments.data, [kind], size)


def run(arguments: argparse.Namespace) -> None:
    """Run the rows of some recipes, and keep the scores of all runs that are finished."""
    corpora = {kind: corpus_folder(arguments.data, arguments.work, kind) for kind in map(kind_of, arguments.names)}
    given = [f"{name}={corpora[kind_of(name)]}" for name in arguments.names]
    try:
        reproduce(
            arguments.tables, arguments.work / "paper", scale=SCALE, data=arguments.data, corpus=given,
            minutes=arguments.minutes, rows=arguments.names, pretraining_seeds=[arguments.pretraining_seed],
            seeds=arguments.seeds, jobs=arguments.jobs, device=arguments.device, pretraining=arguments.set,
            finetuning=arguments.tune,
        )  # fmt: skip
    finally:
        pack(arguments.work / "paper" / SCALE, arguments.results)


def pack(folder: Path, results: Path) -> None:
    """Add the scores of all finished runs in a folder to the results; fine-tunings that differ in their seeds together.

    What is in the results already stays as it was taken.
    """

    def add(part: str, key: str, found: Results) -> None:
        known = earlier(NAME, results).get(part, {}).get(key, {})
        if found != {name: value for name, value in known.items() if name != TAKEN}:
            keep(NAME, results, part, key, found)

    for path in sorted(folder.glob(f"pretrained/*/{SCORES}")):
        add("pretraining", path.parent.name, read_json(path))
    for group in sorted({path.parent.parent for path in folder.glob(f"tuned/*/*/*/*/{SCORES}")}):
        seeds = {path.parent.name.removeprefix("seed-"): read_json(path) for path in sorted(group.glob(f"*/{SCORES}"))}
        for found in seeds.values():
            config = found.pop("config")
            config["train"].pop("seed")
        settings = hashlib.sha1(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        add("settings", settings, {"config": config})
        add("tuning", str(group.relative_to(folder / "tuned")), {"settings": settings, "seeds": seeds})


def unpack(results: Results, folder: Path) -> None:
    """Write results as the files of the runs that they are from."""
    for name, found in results.get("pretraining", {}).items():
        _write(folder / SCALE / "pretrained" / name, {key: value for key, value in found.items() if key != TAKEN})
    for key, found in results.get("tuning", {}).items():
        config = results["settings"][found["settings"]]["config"]
        for seed, scores in found["seeds"].items():
            seeded = {**config, "train": {**config["train"], "seed": int(seed)}}
            _write(folder / SCALE / "tuned" / key / f"seed-{seed}", {"config": seeded, **scores})


def _write(folder: Path, scores: Results) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SCORES, scores)


def seeds_of(results: Results) -> list[int]:
    """The seeds of pre-training that there are runs of."""
    return sorted({found["config"]["train"]["seed"] for found in results.get("pretraining", {}).values()})


def shown(results: Results, data: Path, minutes: float | None) -> list[Results]:
    """The tables of the scores that are there."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(results, Path(folder))
        return reproduce(
            TABLES, folder, scale=SCALE, data=data, minutes=minutes, seeds=SEEDS, pretraining_seeds=seeds_of(results),
            show=True,
        )  # fmt: skip


def rows_of(table: Results) -> Rows:
    """The rows of a table that were run, and the columns that have scores."""
    ran = [row for row in table["rows"] if row["ours"]]
    columns = [name for name in table["columns"] if any(name in row["ours"] for row in ran)]
    return [
        ["row", *columns, "pre-training runs", "million tokens"],
        *([row["name"], *(cell_text(row["ours"].get(name)) for name in columns), *_seen(row)] for row in ran),
    ]


def _seen(row: Results) -> list[str]:
    """How many pre-training runs a row has scores of, and the tokens of one."""
    return [str(row["runs"]), f"{row['tokens'] / 1e6:.0f}" if "tokens" in row else ABSENT]


def learnt(tables: Sequence[Results]) -> Rows:
    """What each pre-training run has seen and learnt."""
    rows = [["run", "million tokens", "tokens/s", "held-out loss"]]
    found = {name: run for table in tables for name, run in table["pretraining"].items()}
    for name, run in found.items():
        losses = [f"{value:.3f} ({key})" for key, value in run["scores"].items() if key.endswith("_loss")]
        speed = f"{run['tokens_per_second']:,}" if run["tokens_per_second"] else ABSENT
        rows.append([name, f"{run['tokens'] / 1e6:.0f}", speed, ", ".join(losses)])
    return rows


def page(arguments: argparse.Namespace) -> None:
    """Put the tables into the page, each with what it says about the paper's findings."""
    tables = shown(earlier(NAME, arguments.results), arguments.data, arguments.minutes)
    found = {f"hour {table['table']}": rows_of(table) for table in tables}
    judged = [[table["table"], text] for table in tables for text in findings(table)]
    put_tables(arguments.page, {**found, "hour runs": learnt(tables), "hour findings": [["", "finding"], *judged]})


def main(given: list[str] | None = None) -> None:
    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "tokenizers": tokenizers, "run": run, "page": page,
        "merge": partial(merge_files, NAME),
        "unpack": lambda arguments: unpack(earlier(NAME, arguments.results), Path(arguments.names[0])),
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", help="run: recipes; merge: files of results; unpack: the folder to write")
    parser.add_argument("--data", type=Path, help="folder of the text and the tasks")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / NAME, help="folder for runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="page: the file that the tables are put into")
    parser.add_argument("--tables", nargs="+", default=["table5"], help="run: the tables whose columns are run")
    parser.add_argument("--minutes", type=float, help="minutes of every pre-training run; default: those of the scale")
    parser.add_argument("--pretraining-seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="run: fine-tunings for each score")
    parser.add_argument("--jobs", type=int, default=20, help="run: fine-tunings at the same time")
    parser.add_argument("--device")
    parser.add_argument("--set", action="append", default=[], help="run: a setting of every pre-training")
    parser.add_argument("--tune", action="append", default=[], help="run: a setting of every fine-tuning")
    arguments = parser.parse_args(given)
    if arguments.command in ("tokenizers", "run", "page") and arguments.data is None:
        parser.error("--data is needed")
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
