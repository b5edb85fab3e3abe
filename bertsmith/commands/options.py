"""What commands share: their options, and how results are shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.training.runlog import is_score

Inputs = Annotated[
    list[str], typer.Argument(help="Text files or folders: .txt, .jsonl, .parquet, also .gz .xz .bz2 .zst")
]
Out = Annotated[Path, typer.Option("--out", help="The folder to write; must be new or empty")]
LearningRate = Annotated[
    float | None, typer.Option("--lr", "--learning-rate", help="The highest learning rate (train.learning_rate)")
]
Epochs = Annotated[float | None, typer.Option("--epochs", help="How often to go through the data (train.epochs)")]
Steps = Annotated[int | None, typer.Option("--steps", help="How many steps to make instead (train.steps)")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Sequences a step (train.batch_size)")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated")]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed of everything random (train.seed)")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or mps; the best there is by default")]
Engine = Annotated[
    str | None, typer.Option("--engine", help="torch or onnxruntime; by default what the folder is made for")
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; all cores by default")]
Precision = Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or int8; float32 by default")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output instead of a table")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run")]
Field = Annotated[str, typer.Option("--field", help="The field of JSON lines and parquet that holds the text")]
Encoding = Annotated[str, typer.Option("--encoding", help="The encoding of the text, if not UTF-8: cp949, utf-16, …")]
Model = Annotated[str, typer.Argument(help="A model folder, a run or a hub name")]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL…", help="A model folder, a run or a hub name; several answer together (an ensemble)"),
]
Combine = Annotated[
    str | None,
    typer.Option("--combine", help="Of several models: logits (their mean, the default) or nbest (answers in a text)"),
]
Rows = Annotated[
    str, typer.Argument(metavar="INPUT", help="Rows: .csv, .tsv, .jsonl, .parquet, .txt (a text a line), - for a pipe")
]
Keep = Annotated[str, typer.Option("--keep", metavar="A,B", help="Columns of the input to write as well")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite --out if it is there")]
TextColumn = Annotated[str, typer.Option("--text", help="The column of the text, where it is not the model's")]
Pooling = Annotated[
    str | None, typer.Option("--pooling", help="mean, cls or max; default: what the folder says, else mean")
]
MaxLength = Annotated[int | None, typer.Option("--max-length", help="Longer texts are cut to this many tokens")]


def show(values: dict[str, Any], as_json: bool, *header: str) -> None:
    """Results: a JSON object for programs, a table for people; of several processes the first one speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(values, ensure_ascii=False))
        return
    table = Table(*(header or ("", "")), show_header=bool(header))
    for name, value in values.items():
        table.add_row(name.replace("_", " ") if not header else name, _cell(value, name))
    Console().print(table)


def show_groups(groups: dict[str, dict[str, str]]) -> None:
    """Names with a few words each, under the headings of their groups."""
    console = Console(highlight=False)
    for title, lines in groups.items():
        table = Table.grid(padding=(0, 2))
        for name, words in lines.items():
            table.add_row(f"  {name}", Text(words))
        console.print(title, style="bold", markup=False)
        console.print(table)
        console.print()


def show_answer(answer: dict[str, Any], as_json: bool) -> None:
    """The answer to one text; for people, what there are several of is a table of its own."""
    if as_json:
        show(answer, as_json)
        return
    lists = {name: value for name, value in answer.items() if isinstance(value, dict | list) and name != "labels"}
    show({name: value for name, value in answer.items() if name not in lists}, as_json)
    if "words" in lists:
        words = zip(answer["words"], answer["tags"], answer["scores"], strict=True)
        show_rows([{"word": word, "tag": tag, "score": score} for word, tag, score in words])
    elif isinstance(lists.get("scores"), dict):
        show_rows([{"label": label, "score": score} for label, score in answer["scores"].items()])
    for name in ("entities", "nbest"):
        show_rows(answer.get(name, []))


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Records of the same fields as a table."""
    if rows:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(Text(_cell(value, name)) for name, value in row.items()))
        Console().print(table)


def show_scores(found: dict[str, Any], as_json: bool) -> None:
    """The scores of a model; for people, those of its classes are a table of their own."""
    classes = found.get("per_class")
    show(found if as_json else {name: value for name, value in found.items() if name != "per_class"}, as_json)
    if classes and not as_json:
        columns = ("precision", "recall", "f1", "rows")
        table = Table("class", *columns)
        for name, scores in classes.items():
            table.add_row(Text(name), *(_cell(scores[column], column) for column in columns))
        Console().print(table)


def show_summary(summary: dict[str, Any], as_json: bool) -> None:
    """The scores of several runs: for people a line a setting, and which run was taken."""
    if as_json or os.environ.get("RANK", "0") != "0":
        show(summary, as_json)
        return
    columns = ("seeds", "mean", "deviation", "median", "best")
    table = Table("setting", *columns, title=f"{summary['task']}: {summary['metric']} on dev")
    for setting in summary["settings"]:
        figures = (_cell(setting[name], summary["metric"]) for name in columns)
        table.add_row(setting["name"] or "as given", *figures)
    Console().print(table)
    for run in summary.get("failed", []):
        Console().print(f"{run['folder']} failed and is in no figure", markup=False)
    best, metric = summary["best"], summary["metric"]
    Console().print(
        f"{summary['model']} is the model of {best['folder']} ({metric} {best[metric]:.1f}): the best of "
        f"{best['of_runs']} runs, chosen on dev, which flatters that score.",
        markup=False,
        soft_wrap=True,
    )


def show_glue(found: dict[str, Any], as_json: bool) -> None:
    """GLUE's table in points, a column a protocol; what is absent is said under it."""
    if as_json:
        show(found, as_json)
        return
    protocols = {"alone": "each task alone", "from_mnli": "RTE, MRPC, STS-B from MNLI"}
    table = Table("GLUE dev", *protocols.values())
    rows = {task: task for name in protocols for task in found[name]["tasks"]}
    for task in rows:
        table.add_row(task, *(_points(found[name]["tasks"].get(task)) for name in protocols))
    table.add_section()
    for key, words in (("average", "average, as the server"), ("paper_average", "average, as the paper's table")):
        table.add_row(words, *(_points(found[name][key]) for name in protocols))
    Console().print(table)
    for name, words in protocols.items():
        if found[name]["absent"]:
            Console().print(f"no average of {words!r}: {', '.join(found[name]['absent'])} absent", markup=False)
    if found["left_out"]:
        Console().print(f"in neither column: {', '.join(found['left_out'])}", markup=False)
    if several := {Path(run).name: count for run, count in found["seeds"].items() if count > 1}:
        Console().print(f"means of seeds: {', '.join(f'{n} {count}' for n, count in several.items())}", markup=False)


def _points(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _cell(value: Any, name: str) -> str:
    """A value as people read it: an entry a line; of a long list the beginning; a score with one decimal."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_cell(entry, key)}" for key, entry in value.items())
    if value is None:
        return "–"
    if isinstance(value, float) and is_score(name):
        return _points(value)
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
    if isinstance(value, list):
        items = [" ".join(map(str, item)) if isinstance(item, list) else str(item) for item in value[:10]]
        return ", ".join(items) + (f", … ({len(value):,} in all)" if len(value) > 10 else "")
    return f"{value:,}" if type(value) is int else str(value)
