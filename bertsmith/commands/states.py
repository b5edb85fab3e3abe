"""Commands that look inside a model: hidden states as features, and a page on one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.commands.options import Device, Json, Model, Out, Precision, TextColumn, show
from bertsmith.text.safe import safe_argument


def features(
    model: Model,
    data: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="Texts: .txt (a text a line), .csv, .tsv, .jsonl, .parquet, -; or CoNLL"),
    ],
    out: Out,
    layers: Annotated[
        str, typer.Option("--layers", help="-1, -4..-1, 0,6,12 or all; 0 is the embeddings, -1 the last")
    ] = "-1",
    align: Annotated[
        str, typer.Option("--align", help="A word's first sub-token, their mean, or none: every token by itself")
    ] = "first",
    dtype: Annotated[str, typer.Option("--dtype", help="Vectors as float16 or float32")] = "float16",
    conll: Annotated[
        bool, typer.Option("--conll", help="INPUT has a word a line, also where it ends with .txt")
    ] = False,
    documents: Annotated[
        bool, typer.Option("--documents/--sentences", help="CoNLL: read sentences in their document, or each alone")
    ] = True,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Longer texts are read in windows of so many tokens")
    ] = None,
    overlap: Annotated[int | None, typer.Option("--overlap", help="Tokens that two windows share; a quarter")] = None,
    text: TextColumn = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a folder that was not finished")] = False,
    precision: Precision = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write the hidden states of some layers for every word of a file.

    \b
    Example: bertsmith features run texts.txt --layers -4..-1 --out states
    Words given, in their documents: bertsmith features bert eng.train --layers all --out states
    In Python: from bertsmith.inference.features import Features; Features.open("states")[0].vectors
    """
    from bertsmith.inference.features import features as function

    found = function(
        model, data, out, layers=layers, align=align, dtype=dtype, conll=conll, documents=documents,
        max_length=max_length, overlap=overlap, text=text, resume=resume, device=device,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    show(found, as_json)


def view(
    model: Model,
    text: Annotated[str, typer.Argument(help="A text", callback=safe_argument)],
    pair: Annotated[str | None, typer.Argument(help="A second text, for a pair", callback=safe_argument)] = None,
    out: Annotated[Path, typer.Option("--out", help="The page to write")] = Path("view.html"),
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a page on what a model does with a text: attention, masked words, nearest words by layer.

    \b
    Example: bertsmith view run "The length of a list is its number of items." --out page.html
    A pair: bertsmith view run "Is it raining?" "The street is wet."
    """
    from bertsmith.pages.view import view as function

    show(function(model, text, pair, out, device=device), as_json)
