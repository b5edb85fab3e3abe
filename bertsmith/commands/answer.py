"""Commands that use what was trained: answers, scores, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bertsmith.commands.options import Device, Json, Model, show


def fill(
    model: Model,
    text: Annotated[str, typer.Argument(help="A text with [MASK] in it")],
    top: Annotated[int, typer.Option("--top", help="How many words to show")] = 5,
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Show the likeliest words for each [MASK] of a text.

    \b
    Example: bertsmith fill run "The [MASK] of a list is its number of items."
    """
    from bertsmith.predict import fill as function

    masks = function(model, text, top=top, device=device)
    if as_json:
        show({"text": text, "masks": masks}, as_json)
        return
    for number, candidates in enumerate(masks, 1):
        table = Table("word", "probability", title=f"mask {number}" if len(masks) > 1 else None)
        for candidate in candidates:
            table.add_row(candidate["token"], f"{candidate['probability']:.4f}")
        Console().print(table)


def evaluate(
    model: Model,
    data: Annotated[Path, typer.Option("--data", help="Labelled rows")],
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Score a fine-tuned model on labelled rows.

    \b
    Example: bertsmith evaluate run2 --data dev.csv
    """
    from bertsmith.predict import evaluate as function

    show(function(model, data, device=device), as_json)


def predict(
    model: Model,
    data: Annotated[Path, typer.Argument(metavar="INPUT", help="Rows to answer: .csv, .tsv, .jsonl or .parquet")],
    out: Annotated[Path, typer.Option("--out", help="The file to write, one JSON object a row")],
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Answer every row of a file, in order: label, score and scores.

    \b
    Example: bertsmith predict run2 input.csv --out out.jsonl
    """
    from bertsmith.predict import predict as function

    show({"predictions": str(out), "rows": function(model, data, out, device=device)}, as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; several are compared")],
    out: Annotated[Path, typer.Option("--out", help="The page to write")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    r"""Write one page about a run or the comparison of several: curves, settings, data, samples.

    \b
    Example: bertsmith report run --out report.html
    """
    from bertsmith.report.page_of_runs import report as function

    show(function(runs, out), as_json)
