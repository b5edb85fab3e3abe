"""The command that runs the paper's tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from bertsmith.commands.options import Device, Json

GivenModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME=MODEL",
        help="Use this model instead of pre-training; the scale is then paper by default",
    ),
]


def reproduce(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE…", help="table1 to table8, figure5, or all")],
    out: Annotated[Path, typer.Option("--out", help="The work folder; finished runs in it are reused")] = Path("paper"),
    scale: Annotated[
        str | None,
        typer.Option("--scale", help="The size and budget of the runs: tiny (default), small, hour, base or paper"),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row", metavar="ROW", help="Run only this row, by its name or recipe; show what is there of others"
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", help="The minutes of every pre-training run; default: the scale's budget"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="The folder that holds the folders of the tasks: MNLI, SST-2, squad, conll2003, …"),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus",
            metavar="[RECIPE=]FOLDER",
            help="A corpus folder, or one for a recipe or family; default at scale tiny: the text of the demo",
        ),
    ] = None,
    models: GivenModels = None,
    seeds: Annotated[
        int, typer.Option("--seeds", help="The number of fine-tuning runs for each score; the paper has 5")
    ] = 1,
    pretraining_seeds: Annotated[
        list[int] | None,
        typer.Option(
            "--pretraining-seed", metavar="SEED", help="A seed of pre-training, several for several runs; default: 1"
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="This many runs at the same time on the device")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs with their estimated time")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Run nothing: show the scores that are there, also those of other machines")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every pre-training run")
    ] = None,
    tune: Annotated[
        list[str] | None, typer.Option("--tune", metavar="KEY=VALUE", help="Change a setting of every fine-tuning run")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Reproduce tables of the BERT paper and show its scores beside ours; a command that was stopped resumes.

    \b
    Example: bertsmith reproduce table5 --data tasks --out paper
    Of released models: bertsmith reproduce table1 table7 --data tasks --model bert-base=google-bert/bert-base-cased
    What it would take: bertsmith reproduce all --scale base --data tasks --corpus shards --seeds 5 --dry-run
    One of its rows: bertsmith reproduce table5 --scale hour --row bert-base-no-nsp --data tasks --corpus shards
    """
    from bertsmith.paper.reproduce import reproduce as function

    results = function(
        tables, out, scale=scale, data=data, corpus=corpus, seeds=seeds, device=device, jobs=jobs, minutes=minutes,
        rows=rows or (), pretraining_seeds=pretraining_seeds or (1,), dry_run=dry_run, show=show,
        pretraining=settings or (), finetuning=tune or (), models=models or (),
    )  # fmt: skip
    if as_json:
        print(json.dumps(results if len(results) > 1 else results[0], ensure_ascii=False))
        return
    for result in results:
        (_show_plan if dry_run else _show_table)(result)
    if dry_run and len(results) > 1:
        _show_sum(results)


def _show_table(result: dict[str, Any]) -> None:
    from bertsmith.paper.pages import findings, header, lines, remarks

    for number, part in enumerate(_parts([header(result), *lines(result)], Console().width)):
        table = Table(*part[0], title=None if number else f"{result['table']}: {result['title']}")
        for line in part[1:]:
            table.add_row(*line)
        Console().print(table)
    for text in [*findings(result), *remarks(result), f"Page: {result['page']}"]:
        Console().print(text, markup=False, soft_wrap=True, highlight=False)


def _parts(lines: list[list[str]], width: int) -> list[list[list[str]]]:
    """Split wide lines into parts that fit the terminal; the first two columns are repeated in each part."""
    wide = [max(map(cell_len, column)) + 3 for column in zip(*lines, strict=True)]  # with two spaces and a border
    parts = [[0, 1]]
    for column in range(2, len(wide)):
        if len(parts[-1]) > 2 and sum(wide[c] for c in (*parts[-1], column)) >= width:
            parts.append([0, 1])
        parts[-1].append(column)
    return [[[line[c] for c in columns] for line in lines] for columns in parts]


def _show_plan(result: dict[str, Any]) -> None:
    """Print the runs of a table, those that differ only in their seeds and rates in one line."""
    table = Table("run", "times", "operations", "time", title=f"{result['table']}: {result['title']}")
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault(run["run"].split("/rate-")[0], []).append(run)
    for name, runs in groups.items():
        operations, hours = (sum(run[key] for run in runs) for key in ("flops", "hours"))
        time = "done" if all(run["done"] for run in runs) else _time(hours)
        table.add_row(name, str(len(runs)), f"{operations:.1e}" if operations else "by the clock", time)
    table.add_section()
    table.add_row(f"{result['gigabytes']:.1f} GB of models", str(len(result["runs"])), "", _time(result["hours"]))
    Console().print(table)
    notes = [f"Missing: {name}: {why}." for name, why in result["absent"].items()]
    for text in [*notes, f"Time: {result['note']}."]:
        Console().print(text, markup=False, soft_wrap=True, highlight=False)


def _show_sum(results: list[dict[str, Any]]) -> None:
    """Print the time of several tables together, which share runs."""
    runs = {run["run"]: run for result in results for run in result["runs"]}
    hours, space = (sum(run.get(key, 0.0) for run in runs.values()) for key in ("hours", "gigabytes"))
    print(f"In all: {len(runs)} runs, {_time(hours)}, {space:.1f} GB of models.")


def _time(hours: float) -> str:
    return f"{hours:.3g} h" if hours >= 1 else f"{60 * hours:.1f} min"
