"""Commands that use what was trained: answers, scores, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bertsmith.commands.options import (
    Device,
    Json,
    Keep,
    MaxLength,
    Model,
    Pooling,
    Rows,
    TextColumn,
    names,
    show,
)


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
    from bertsmith.answers import fill as function

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
    from bertsmith.answers import evaluate as function

    show(function(model, data, device=device), as_json)


def predict(
    model: Model,
    data: Rows,
    out: Annotated[str, typer.Option("--out", help="A .jsonl, .csv or .parquet file; - writes JSON lines here")],
    keep: Keep = "",
    text: TextColumn = "",
    pair: Annotated[str, typer.Option("--pair", help="The column of the second text, as --text")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a file that was not finished")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Answer every row of a file, in order: label, score and scores.

    \b
    Example: bertsmith predict run2 input.csv --out out.jsonl
    Columns of the input beside the answers: --keep id,text
    Out of a pipe: cat texts.txt | bertsmith predict run2 - --out - > answers.jsonl
    """
    from bertsmith.answers import predict as function

    rows = function(model, data, out, keep=names(keep), text=text, pair=pair, resume=resume, device=device)
    if out != "-":
        show({"predictions": out, "rows": rows}, as_json)


def embed(
    model: Model,
    data: Rows,
    out: Annotated[Path, typer.Option("--out", help="A .npy, .parquet or .jsonl file")],
    pooling: Pooling = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Vectors of length 1; default: as --pooling")
    ] = None,
    layer: Annotated[int, typer.Option("--layer", help="0 is the embeddings, 1 the first layer, -1 the last")] = -1,
    max_length: MaxLength = None,
    keep: Keep = "",
    text: TextColumn = "",
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Write a vector for every text of a file, in order.

    \b
    Example: bertsmith embed run texts.txt --out vectors.npy --pooling mean --normalize
    """
    from bertsmith.embed import embed as function

    found = function(
        model, data, out, pooling=pooling, normalize=normalize, layer=layer, max_length=max_length,
        keep=names(keep), text=text or "text", device=device,
    )  # fmt: skip
    show(found, as_json)


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
