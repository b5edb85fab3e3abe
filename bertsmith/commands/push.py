"""The command that uploads a model to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.commands.options import Json
from bertsmith.commands.show import show


def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A model folder or the folder of a finished run")],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of the repository on the hub: NAME or OWNER/NAME")
    ],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="The branch to push to; it is created if it does not exist")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="A file with the access token; default: HF_TOKEN or `hf auth login`"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload a model folder with its model card to the Hugging Face hub.

    \b
    Example: bertsmith push runs/classifier me/support-topics --private
    """
    from bertsmith.formats.hub import push as function

    found = function(folder, name, private=private, revision=revision, token_file=token_file)
    show(found, as_json)
