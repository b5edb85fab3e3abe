"""The command that converts models between formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.commands.options import Json, MaxLength
from bertsmith.commands.show import show
from bertsmith.errors import UserError

To = Annotated[
    str | None,
    typer.Option("--to", help="hf, tf1, onnx or sentence-transformers; default for a TensorFlow 1 checkpoint: hf"),
]
Cased = Annotated[
    bool | None, typer.Option("--cased/--uncased", help="tf1: whether the tokenizer keeps upper case; default: guessed")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="tf1: a bert_config.json in another place")]
VocabFile = Annotated[Path | None, typer.Option("--vocab", help="tf1: a vocab.txt in another place")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="The type of the weights: float32, float16 or bfloat16")]
Half = Annotated[bool, typer.Option("--half", help="The same as --dtype float16")]
Int8 = Annotated[bool, typer.Option("--int8", help="onnx: also write a graph with weights quantised to 8 bits")]
QualityRows = Annotated[
    Path | None,
    typer.Option("--data", help="onnx: labelled rows, on which the loss of quality by int8 is measured and saved"),
]
NewPooling = Annotated[str | None, typer.Option("--pooling", help="sentence-transformers: mean (default), cls or max")]
Normalize = Annotated[
    bool | None,
    typer.Option("--normalize/--no-normalize", help="sentence-transformers: scale vectors to length 1"),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare hidden states and logits with transformers, layer by layer")
]


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A TensorFlow 1 checkpoint, a model folder, a run folder or a hub name")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The output folder; must be new or empty")],
    to: To = None,
    cased: Cased = None,
    config: ConfigFile = None,
    vocab: VocabFile = None,
    dtype: Dtype = None,
    half: Half = False,
    int8: Int8 = False,
    data: QualityRows = None,
    pooling: NewPooling = None,
    normalize: Normalize = None,
    max_length: MaxLength = None,
    verify: Verify = False,
    as_json: Json = False,
) -> None:
    """Convert a model to another format, heads included.

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
