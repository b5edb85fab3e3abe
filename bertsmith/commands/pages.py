"""Commands that write HTML pages: a report on runs, and a look inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.commands.options import Device, Json, Model, model_and
from bertsmith.commands.show import show
from bertsmith.text.safe import safe_argument


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of runs; several runs are compared")
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML page to write")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write an HTML page on one run or the comparison of several: curves, settings, samples and mistakes.

    \b
    Example: bertsmith report run --out report.html
    Tasks beside the paper's figures: bertsmith report runs-of-tasks --out board.html
    """
    from bertsmith.pages.report.page_of_runs import report as function

    show(function(runs, out), as_json)


def view(
    model: Model = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to encode", callback=safe_argument)
    ] = None,
    pair: Annotated[
        str | None, typer.Argument(metavar="PAIR", help="The second text of a pair", callback=safe_argument)
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The HTML page to write")] = Path("view.html"),
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page on what a model does with a text: attention, masked words, nearest words by layer.

    \b
    Example: bertsmith view run "The length of a list is its number of items." --out page.html
    A pair: bertsmith view run "Is it raining?" "The street is wet."
    By the default model: bertsmith view "Is it raining?" "The street is wet."
    """
    from bertsmith.pages.view import view as function
    from bertsmith.tasks.inputs import looks_like_text

    if text is not None and pair is None and looks_like_text(model or ""):  # two texts and no model
        text, pair = None, text
    model, text = model_and(model, text, "TEXT")
    show(function(model, text, pair, out, device=device), as_json)
