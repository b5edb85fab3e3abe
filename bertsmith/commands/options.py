"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.errors import UserError
from bertsmith.text.safe import safe_argument

UNNAMED = "default: the one in BERTSMITH_MODEL, else the default model"  # what `usual_model` returns
Inputs = Annotated[
    list[str], typer.Argument(help="Text files or folders: .txt, .jsonl, .parquet, also .gz .xz .bz2 .zst")
]
Out = Annotated[Path, typer.Option("--out", help="The output folder; must be new or empty")]
LearningRate = Annotated[
    float | None, typer.Option("--lr", "--learning-rate", help="The peak learning rate (train.learning_rate)")
]
Epochs = Annotated[float | None, typer.Option("--epochs", help="Train for this many epochs (train.epochs)")]
Steps = Annotated[int | None, typer.Option("--steps", help="Train for this many steps (train.steps)")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Sequences per step (train.batch_size)")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given several times")
]
Seed = Annotated[int | None, typer.Option("--seed", help="The random seed (train.seed)")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or mps; default: the fastest one available")]
Engine = Annotated[
    str | None, typer.Option("--engine", help="torch or onnxruntime; default: the one that the folder was made for")
]
Threads = Annotated[int | None, typer.Option("--threads", help="Number of CPU threads; default: all cores")]
Precision = Annotated[str | None, typer.Option("--precision", help="float32 (default), bfloat16 or int8")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead of a table")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an unfinished run from its last checkpoint")]
Field = Annotated[str, typer.Option("--field", help="The field of JSON lines and parquet that holds the text")]
Encoding = Annotated[
    str, typer.Option("--encoding", help="The encoding of the text files if not UTF-8: cp949, utf-16, …")
]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A model folder, a run folder or a name on the Hugging Face hub; {UNNAMED}",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL…", help="A model folder, a run folder or a hub name; several models form an ensemble"
    ),
]
Combine = Annotated[
    str | None,
    typer.Option(
        "--combine", help="How an ensemble combines: logits (their mean, the default) or nbest (for question answering)"
    ),
]
ROWS = typer.Argument(
    metavar="INPUT", help="Rows: .csv, .tsv, .jsonl, .parquet, .txt (one text per line), - for standard input"
)
Rows = Annotated[str, ROWS]
RowsLast = Annotated[str | None, ROWS]  # after a model that may be left out
Keep = Annotated[
    str, typer.Option("--keep", metavar="A,B", help="Columns of the input to write beside the model's output")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite --out if it exists")]
TextColumn = Annotated[
    str, typer.Option("--text", help="The column that holds the text, if it is not the one of the training data")
]
Pooling = Annotated[
    str | None, typer.Option("--pooling", help="mean, cls or max; default: as saved in the model folder, else mean")
]
MaxLength = Annotated[int | None, typer.Option("--max-length", help="Truncate texts to this many tokens")]


def model_and(model: str | None, then: str | None, name: str) -> tuple[str, str]:
    """Return the two arguments `[MODEL] NAME`, of which NAME is a text or a file; a single one is NAME."""
    from bertsmith.formats.hub import USUAL, usual_model

    if model is None:
        raise UserError(f"{name} is missing; --help has examples")
    if then is not None:
        return model, then
    if Path(model).is_dir():
        raise UserError(f"{name} is missing after the model {model}")
    try:
        return usual_model(), safe_argument(model) or ""
    except UserError:
        words = f"{model!r} is taken as {name}, and no model is named"
        raise UserError(f"{words}: write MODEL {name}, or set {USUAL} to a model") from None
