"""The command that scores encoders by one protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.commands.options import UNNAMED, Device, Json, Set


def benchmark(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL…", help=f"Pre-training runs, model folders or hub names; {UNNAMED}"),
    ] = None,
    *,
    data: Annotated[
        Path, typer.Option("--data", help="The folder that holds the folders of the tasks: CoLA, SST-2, MRPC, …")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="The folder for the scores; finished runs in it are reused")
    ] = Path("benchmark"),
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK", help="Run only this task, several for several; default: all"),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="The number of runs for each score")] = 5,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="This many runs at the same time; default: as many as the GPU has memory for"),
    ] = None,
    settings: Set = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Score encoders on GLUE-5, CoNLL-2003 and SQuAD by one protocol; a command that was stopped resumes.

    GLUE-5 is the mean of CoLA, SST-2, MRPC, STS-B and RTE. The settings are the same for all tasks and models, and the
    score of a task is the median over the seeds on dev.

    \b
    Example: bertsmith benchmark run --data tasks
    Several models beside each other: bertsmith benchmark run other-run google-bert/bert-base-uncased --data tasks
    One task, quickly: bertsmith benchmark run --data tasks --task rte --seeds 1 --out tried
    """
    from bertsmith.finetuning.benchmark import benchmark as function
    from bertsmith.formats.hub import usual_model
    from bertsmith.pages.benchmark import header, lines, remarks, write_benchmark

    models = models or [usual_model()]
    result = function(
        models, data, out, tasks=tasks or (), seeds=seeds, jobs=jobs, device=device, settings=settings or ()
    )
    page = out / "benchmark.html"
    write_benchmark(page, result)
    if as_json:
        print(json.dumps({**result, "page": str(page)}, ensure_ascii=False))
        return
    console, rows = Console(), [header(result), *lines(result)]
    table = _table(rows)
    needed = console.measure(table, options=console.options.update(width=10_000)).minimum
    if needed > console.width:  # words would be broken: a model is a column then
        table = _table(list(zip(*rows, strict=True)))
    console.print(table)
    for text in [*remarks(result), f"Page: {page}"]:
        console.print(text, markup=False, soft_wrap=True, highlight=False)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal; the first row is its header."""
    table = Table()
    for name in rows[0]:
        table.add_column(Text(name))
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
