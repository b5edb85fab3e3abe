"""Commands that run a trained model: predictions, scores, masked words, sentence vectors, hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    Out,
    Pooling,
    Precision,
    Rows,
    RowsLast,
    TextColumn,
    Threads,
    model_and,
)
from bertsmith.commands.show import show, show_prediction, show_scores
from bertsmith.errors import UserError
from bertsmith.rows.columns import split_names
from bertsmith.text.safe import safe_argument

if TYPE_CHECKING:
    from bertsmith.serve.remote import Remote

PredictOut = Annotated[
    str,
    typer.Option(
        "--out", help="A .jsonl, .csv or .parquet file, - for JSON lines on standard output; a folder for a data set"
    ),
]
PairColumn = Annotated[
    str, typer.Option("--pair", help="The column of the second text; for a single text, the second text itself")
]
NBest = Annotated[int | None, typer.Option("--n-best", help="The number of labels or answers to list with scores")]
ResumeFile = Annotated[bool, typer.Option("--resume", help="Continue an output that was not finished")]


def fill(
    model: Model = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="A text with [MASK] in it", callback=safe_argument)
    ] = None,
    top: Annotated[int, typer.Option("--top", help="The number of words to show for each mask")] = 5,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Show the likeliest words for each [MASK] of a text.

    \b
    Example: bertsmith fill "Paris is the [MASK] of France."
    By a model of your own: bertsmith fill run "The [MASK] of a list is its number of items."
    """
    from bertsmith.inference.files import fill as function

    model, text = model_and(model, text, "TEXT")
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
            help="A fine-tuned model, several as an ensemble or, with --task, a file of predictions",
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data", help="Labelled rows in any format that finetune reads; of a data set's folder, its dev file"
        ),
    ],
    task: Annotated[
        str | None, typer.Option("--task", help="Score a file of predictions in the official format of this task")
    ] = None,
    text: TextColumn = "",
    pair: Annotated[
        str, typer.Option("--pair", help="The column of the second text, if it is not the one of the training data")
    ] = "",
    label: Annotated[
        str, typer.Option("--label", help="The column of the label, if it is not the one of the training data")
    ] = "",
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
    Columns with other names than in training: bertsmith evaluate run2 --data other.csv --text body --label topic
    Several seeds as an ensemble: bertsmith evaluate runs/seed-* --data dev.csv
    Predictions: bertsmith evaluate predictions.json --task squad1 --data dev-v1.1.json
    """
    from bertsmith.inference.files import evaluate as function
    from bertsmith.tasks.prediction_files import score_file

    if task is not None:
        if text or pair or label:
            raise UserError("--text, --pair and --label are for a model; --task scores a file of predictions")
        if len(models) > 1:
            raise UserError(f"--task scores one file of predictions, not {len(models)}")
        show_scores(score_file(models[0], task, data, null_odds=null_odds), as_json)
        return
    options = {"engine": engine, "threads": threads, "precision": precision, "combine": combine}
    columns = {"text": text, "pair": pair, "label": label}
    show_scores(function(models, data, device=device, **columns, **options), as_json)  # type: ignore[arg-type]


def predict(
    models: Models,
    data: Rows,
    out: PredictOut = "",
    keep: Keep = "",
    text: TextColumn = "",
    pair: PairColumn = "",
    n_best: NBest = None,
    resume: ResumeFile = False,
    force: Force = False,
    url: Annotated[
        str, typer.Option("--url", help="Ask a server (bertsmith serve) instead; MODEL is then the name of its model")
    ] = "",
    combine: Combine = None,
    engine: Engine = None,
    threads: Threads = None,
    precision: Precision = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Predict every row of a file, in order, or one text: label, score and scores.

    \b
    Example: bertsmith predict run2 input.csv --out out.jsonl
    One text: bertsmith predict run2 "I was charged twice"
    One question: bertsmith predict squad "Who wrote it?" --pair "It was written by Ada."
    Columns of the input beside the predictions: --keep id,text
    What GLUE's server or SQuAD's script takes: bertsmith predict rte glue/RTE --out submission
    Several models as an ensemble: bertsmith predict runs/seed-1 runs/seed-2 input.csv --out out.jsonl
    From a pipe: cat texts.txt | bertsmith predict run2 - --out - > predictions.jsonl
    By a server: bertsmith predict run2 input.csv --out out.jsonl --url http://localhost:8000
    """
    from bertsmith.inference.files import predict as function
    from bertsmith.inference.files import predict_text, trimmed
    from bertsmith.tasks.inputs import looks_like_text

    options: dict[str, Any] = {"engine": engine, "threads": threads, "precision": precision, "combine": combine}
    options |= {"device": device}
    if url and (len(models) > 1 or any(value is not None for value in options.values())):
        raise UserError("--url asks one model of a server; --engine, --threads, --precision, --device are the server's")
    options |= {"n_best": n_best}
    if several := next((model for model in models[1:] if looks_like_text(model)), ""):
        raise UserError(f"{several!r} is a second text, and predict takes one; write several to a file, a line each")
    if not data.strip():
        raise UserError(f"INPUT is {data!r}, which is neither a text nor a file; give one of them")
    if looks_like_text(data):
        if out or keep or text or resume or force:
            raise UserError("--out, --keep, --text, --resume and --force are for files, not for a single text")
        asked = _remote(url, models[0]).client.predict([(data, pair) if pair else data])[0] if url else None
        show_prediction(trimmed(asked, n_best) if asked else predict_text(models, data, pair, **options), as_json)
        return
    if data != "-" and "://" not in data and not Path(data).exists():
        raise UserError(f"no such file: {data}; a single text needs several words to be recognised as one")
    if not out:
        raise UserError(f"--out is missing: name a .jsonl, .csv or .parquet file for the predictions of {data}, or -")
    given: dict[str, Any] = {"keep": split_names(keep), "text": text, "pair": pair, "resume": resume, "force": force}
    rows = function(_remote(url, models[0]) if url else models, data, out, **given, **options)
    if out != "-":
        show({"predictions": out, "rows": rows}, as_json)


def _remote(url: str, model: str) -> Remote:
    """Return the model of a server."""
    from bertsmith.serve.client import Client
    from bertsmith.serve.remote import Remote

    return Remote(Client(url, model=model))


def embed(
    model: Model = None,
    data: RowsLast = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="A .npy, .parquet or .jsonl file")],
    pooling: Pooling = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Scale vectors to length 1; default: as saved with the pooling"
        ),
    ] = None,
    layer: Annotated[
        int, typer.Option("--layer", help="The layer to pool: 0 for the embeddings, 1 for the first, -1 for the last")
    ] = -1,
    max_length: MaxLength = None,
    keep: Keep = "",
    text: TextColumn = "",
    force: Force = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a sentence vector for every text of a file, in order.

    \b
    Example: bertsmith embed run texts.txt --out vectors.npy --pooling mean --normalize
    By the default model: bertsmith embed texts.txt --out vectors.npy
    """
    from bertsmith.inference.embedder import embed as function

    model, data = model_and(model, data, "INPUT")
    found = function(
        model, data, out, pooling=pooling, normalize=normalize, layer=layer, max_length=max_length,
        keep=split_names(keep), text=text or "text", force=force, device=device,
    )  # fmt: skip
    show(found, as_json)


def features(
    model: Model = None,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT", help="Texts: .txt (one text per line), .csv, .tsv, .jsonl, .parquet, -; or a CoNLL file"
        ),
    ] = None,
    *,
    out: Out,
    layers: Annotated[
        str, typer.Option("--layers", help="-1, -4..-1, 0,6,12 or all; 0 is the embeddings, -1 the last layer")
    ] = "-1",
    align: Annotated[
        str,
        typer.Option("--align", help="first (sub-token of a word), mean (of its sub-tokens) or none (every sub-token)"),
    ] = "first",
    dtype: Annotated[str, typer.Option("--dtype", help="The type of the vectors: float16 or float32")] = "float16",
    conll: Annotated[
        bool, typer.Option("--conll", help="Read INPUT as CoNLL, one word per line, whatever its suffix")
    ] = False,
    documents: Annotated[
        bool,
        typer.Option("--documents/--sentences", help="CoNLL: encode sentences inside their document, or each alone"),
    ] = True,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Encode longer texts in windows of this many tokens")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option("--overlap", help="The tokens that two windows share; default: a quarter of a window")
    ] = None,
    text: TextColumn = "",
    resume: ResumeFile = False,
    precision: Precision = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write the hidden states of some layers for every word of a file.

    \b
    Example: bertsmith features run texts.txt --layers -4..-1 --out states
    Words given, in their documents: bertsmith features bert eng.train --layers all --out states
    In Python: from bertsmith import Features; Features.open("states")[0].vectors
    """
    from bertsmith.inference.features import features as function

    model, data = model_and(model, data, "INPUT")
    found = function(
        model, data, out, layers=layers, align=align, dtype=dtype, conll=conll, documents=documents,
        max_length=max_length, overlap=overlap, text=text, resume=resume, device=device,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    show(found, as_json)
