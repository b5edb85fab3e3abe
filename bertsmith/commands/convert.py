"""The command that turns one format into another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.commands.options import Json, MaxLength, show
from bertsmith.errors import UserError


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A TensorFlow 1 checkpoint, a model folder, a run or a hub name")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; must be new or empty")],
    to: Annotated[
        str | None,
        typer.Option("--to", help="hf, tf1, onnx or sentence-transformers; hf for a TensorFlow 1 checkpoint"),
    ] = None,
    cased: Annotated[
        bool | None, typer.Option("--cased/--uncased", help="tf1: whether texts keep capitals; else it is guessed")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="tf1: a bert_config.json from elsewhere")] = None,
    vocab: Annotated[Path | None, typer.Option("--vocab", help="tf1: a vocab.txt from elsewhere")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Weights as float32, float16 or bfloat16")] = None,
    half: Annotated[bool, typer.Option("--half", help="The same as --dtype float16")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="onnx: weights of 8 bits")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="onnx: labelled rows; what int8 costs on them is measured and kept")
    ] = None,
    pooling: Annotated[
        str | None, typer.Option("--pooling", help="sentence-transformers: mean, cls or max; mean by default")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="sentence-transformers: vectors of length 1")
    ] = None,
    max_length: MaxLength = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare hidden states and scores with transformers, layer by layer")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn a model into another format, heads included.

    \b
    Example: bertsmith convert uncased_L-12_H-768_A-12 bert-base --verify
    Back: bertsmith convert run released --to tf1
    For ONNX Runtime: bertsmith convert classifier exported --to onnx --int8 --data dev.csv
    For sentence vectors: bertsmith convert run encoder --to sentence-transformers --pooling mean --normalize
    """
    from bertsmith.conversion import Options
    from bertsmith.conversion import convert as function

    if half and dtype not in (None, "float16"):
        raise UserError(f"--half is --dtype float16, and --dtype says {dtype!r}; give one of them")
    options = Options(
        cased, config, vocab, "float16" if half else dtype, int8 or None, pooling, normalize, max_length, data
    )
    report = function(source, target, to, options, verify=verify)
    found = report.get("parity")
    if as_json or not found:
        show(report, as_json)
    else:
        show({name: value for name, value in report.items() if name != "parity"}, as_json)
        show(found["differences"], as_json, f"against {found['class']}", "largest difference")
    if found and not found["equal"]:
        raise typer.Exit(1)
