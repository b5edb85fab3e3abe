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


def reproduce(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE…", help="table1 to table8, figure5, or all")],
    out: Annotated[Path, typer.Option("--out", help="The work folder; runs that are there already are used")] = Path(
        "paper"
    ),
    scale: Annotated[
        str | None, typer.Option("--scale", help="tiny (default), small, base or paper: size and budget")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder with the tasks' folders: MNLI, SST-2, squad, conll2003, …")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", help="A corpus folder; at scale tiny the demo's text by default")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME=MODEL", help="Take this model and pre-train none; scale paper by default"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Fine-tuning runs for each figure; the paper has 5")] = 1,
    jobs: Annotated[int, typer.Option("--jobs", help="So many runs side by side on the device")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs with their estimated time")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every pre-training")
    ] = None,
    tune: Annotated[
        list[str] | None, typer.Option("--tune", metavar="KEY=VALUE", help="Change a setting of every fine-tuning")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Run tables of the BERT paper and show its rows beside ours; a stopped command goes on where it was.

    \b
    Example: bertsmith reproduce table5 --data tasks --out paper
    Of released models: bertsmith reproduce table1 table7 --data tasks --model bert-base=google-bert/bert-base-cased
    What it would take: bertsmith reproduce all --scale base --data tasks --corpus shards --seeds 5 --dry-run
    """
    from bertsmith.paper.reproduce import reproduce as function

    results = function(
        tables, out, scale=scale, data=data, corpus=corpus, seeds=seeds, device=device, jobs=jobs,
        dry_run=dry_run, pretraining=settings or (), finetuning=tune or (), models=models or (),
    )  # fmt: skip
    if as_json:
        print(json.dumps(results if len(results) > 1 else results[0], ensure_ascii=False))
        return
    for result in results:
        (_show_plan if dry_run else _show_table)(result)


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
    """Lines of many columns in parts as wide as the terminal, none of whose words is cut: the first two are in each."""
    wide = [max(map(cell_len, column)) + 3 for column in zip(*lines, strict=True)]  # with two spaces and a border
    parts = [[0, 1]]
    for column in range(2, len(wide)):
        if len(parts[-1]) > 2 and sum(wide[c] for c in (*parts[-1], column)) >= width:
            parts.append([0, 1])
        parts[-1].append(column)
    return [[[line[c] for c in columns] for line in lines] for columns in parts]


def _show_plan(result: dict[str, Any]) -> None:
    table = Table("run", "operations", "hours", title=f"{result['table']}: {result['title']}")
    for run in result["runs"]:
        table.add_row(run["run"], f"{run['flops']:.1e}", "done" if run["done"] else f"{run['hours']:.3g}")
    table.add_section()
    table.add_row(f"{len(result['runs'])} runs", "", f"{result['hours']:.3g}")
    Console().print(table)
    said = [f"Absent: {name}: {why}." for name, why in result["absent"].items()]
    for text in [*said, f"Hours: {result['note']}."]:
        Console().print(text, markup=False, soft_wrap=True, highlight=False)
