"""Commands that use what was trained: answers, scores, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bertsmith.commands.options import (
    Combine,
    Device,
    Engine,
    Force,
    Json,
    Keep,
    MaxLength,
    Model,
    Models,
    Pooling,
    Precision,
    Rows,
    TextColumn,
    Threads,
    show,
    show_answer,
    show_scores,
)
from bertsmith.errors import UserError
from bertsmith.rows.columns import listed
from bertsmith.text.safe import safe_argument


def fill(
    model: Model,
    text: Annotated[str, typer.Argument(help="A text with [MASK] in it", callback=safe_argument)],
    top: Annotated[int, typer.Option("--top", help="How many words to show")] = 5,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Show the likeliest words for each [MASK] of a text.

    \b
    Example: bertsmith fill run "The [MASK] of a list is its number of items."
    """
    from bertsmith.inference.files import fill as function

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
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…|PREDICTIONS",
            help="A fine-tuned model, several that answer together or, with --task, a file of predictions",
        ),
    ],
    data: Annotated[Path, typer.Option("--data", help="Labelled rows")],
    task: Annotated[
        str | None, typer.Option("--task", help="Score a file of predictions in the official form of this task")
    ] = None,
    null_odds: Annotated[
        Path | None, typer.Option("--null-odds", help="squad2: the file with the odds that there is no answer")
    ] = None,
    combine: Combine = None,
    engine: Engine = None,
    threads: Threads = None,
    precision: Precision = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Score a fine-tuned model on labelled rows, or a file of predictions as the official script does.

    \b
    Example: bertsmith evaluate run2 --data dev.csv
    Several seeds as an ensemble: bertsmith evaluate runs/seed-* --data dev.csv
    Predictions: bertsmith evaluate predictions.json --task squad1 --data dev-v1.1.json
    """
    from bertsmith.inference.files import evaluate as function
    from bertsmith.tasks.prediction_files import score_file

    if task is not None:
        if len(models) > 1:
            raise UserError(f"--task scores one file of predictions, not {len(models)}")
        show_scores(score_file(models[0], task, data, null_odds=null_odds), as_json)
        return
    options = {"engine": engine, "threads": threads, "precision": precision, "combine": combine}
    show_scores(function(models, data, device=device, **options), as_json)  # type: ignore[arg-type]


def predict(
    models: Models,
    data: Rows,
    out: Annotated[
        str, typer.Option("--out", help="A .jsonl, .csv or .parquet file, - for JSON lines here; a folder for a folder")
    ] = "",
    keep: Keep = "",
    text: TextColumn = "",
    pair: Annotated[str, typer.Option("--pair", help="The column of the second text; of one text, that text")] = "",
    n_best: Annotated[
        int | None, typer.Option("--n-best", help="How many labels or answers to give with their scores")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a file that was not finished")] = False,
    force: Force = False,
    combine: Combine = None,
    engine: Engine = None,
    threads: Threads = None,
    precision: Precision = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer every row of a file, in order, or one text: label, score and scores.

    \b
    Example: bertsmith predict run2 input.csv --out out.jsonl
    One text: bertsmith predict run2 "I was charged twice"
    One question: bertsmith predict squad "Who wrote it?" --pair "It was written by Ada."
    Columns of the input beside the answers: --keep id,text
    What GLUE's server or SQuAD's script takes: bertsmith predict rte glue/RTE --out submission
    Several models as one: bertsmith predict runs/seed-1 runs/seed-2 input.csv --out out.jsonl
    Out of a pipe: cat texts.txt | bertsmith predict run2 - --out - > answers.jsonl
    """
    from bertsmith.inference.files import predict as function
    from bertsmith.inference.files import predict_text
    from bertsmith.rows.given import looks_like_text

    options: dict[str, Any] = {"engine": engine, "threads": threads, "precision": precision, "combine": combine}
    options |= {"device": device, "n_best": n_best}
    if looks_like_text(data):
        if out or keep or text or resume or force:
            raise UserError("--out, --keep, --text, --resume and --force are for files; one text is answered here")
        show_answer(predict_text(models, data, pair, **options), as_json)
        return
    if data != "-" and "://" not in data and not Path(data).exists():
        raise UserError(f"no such file: {data}; a text of several words is answered without a file")
    if not out:
        raise UserError(f"--out is missing: where to write the answers to {data}, as .jsonl, .csv or .parquet; or -")
    given: dict[str, Any] = {"keep": listed(keep), "text": text, "pair": pair, "resume": resume, "force": force}
    rows = function(models, data, out, **given, **options)
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
    force: Force = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a vector for every text of a file, in order.

    \b
    Example: bertsmith embed run texts.txt --out vectors.npy --pooling mean --normalize
    """
    from bertsmith.inference.embedder import embed as function

    found = function(
        model, data, out, pooling=pooling, normalize=normalize, layer=layer, max_length=max_length,
        keep=listed(keep), text=text or "text", force=force, device=device,
    )  # fmt: skip
    show(found, as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs, or folders of runs; several are compared")],
    out: Annotated[Path, typer.Option("--out", help="The page to write")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write one page about a run or the comparison of several: curves, settings, samples; of tasks, mistakes too.

    \b
    Example: bertsmith report run --out report.html
    Tasks beside the paper's figures: bertsmith report runs-of-tasks --out board.html
    """
    from bertsmith.pages.report.page_of_runs import report as function

    show(function(runs, out), as_json)
