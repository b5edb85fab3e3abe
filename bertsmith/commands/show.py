"""How commands show their results: JSON for programs, tables for people."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.training.runlog import is_score


def show(values: dict[str, Any], as_json: bool, *header: str) -> None:
    """Print results as a JSON object or as a table; only rank 0 prints."""
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
    """Print names with a short description each, under the headings of their groups."""
    console = Console(highlight=False)
    for title, lines in groups.items():
        table = Table.grid(padding=(0, 2))
        for name, words in lines.items():
            table.add_row(f"  {name}", Text(words))
        console.print(title, style="bold", markup=False)
        console.print(table)
        console.print()


def show_prediction(prediction: dict[str, Any], as_json: bool) -> None:
    """Print the prediction for one text; in tables, every field with several entries gets a table of its own."""
    if as_json:
        show(prediction, as_json)
        return
    lists = {name: value for name, value in prediction.items() if isinstance(value, dict | list) and name != "labels"}
    if values := {name: value for name, value in prediction.items() if name not in lists}:
        show(values, as_json)
    if "words" in lists:
        words = zip(prediction["words"], prediction["tags"], prediction["scores"], strict=True)
        show_rows([{"word": word, "tag": tag, "score": score} for word, tag, score in words])
    elif isinstance(lists.get("scores"), dict):
        show_rows([{"label": label, "score": score} for label, score in prediction["scores"].items()])
    for name in ("entities", "nbest"):
        show_rows(prediction.get(name, []))


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print records with the same fields as a table."""
    if rows:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(Text(_cell(value, name)) for name, value in row.items()))
        Console().print(table)


def show_scores(found: dict[str, Any], as_json: bool) -> None:
    """Print the scores of a model; in tables, the scores of the classes get a table of their own."""
    classes = found.get("per_class")
    show(found if as_json else {name: value for name, value in found.items() if name != "per_class"}, as_json)
    if classes and not as_json:
        columns = ("precision", "recall", "f1", "rows")
        table = Table("class", *columns)
        for name, scores in classes.items():
            table.add_row(Text(name), *(_cell(scores[column], column) for column in columns))
        Console().print(table)


def show_summary(summary: dict[str, Any], as_json: bool) -> None:
    """Print the scores of several runs: a line for each setting, and which run was chosen."""
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
        Console().print(f"{run['folder']} failed and is not part of the scores", markup=False)
    best, metric = summary["best"], summary["metric"]
    Console().print(
        f"{summary['model']} is the model of {best['folder']} ({metric} {best[metric]:.1f}): the best of "
        f"{best['of_runs']} runs, chosen on dev, so this score is optimistic.",
        markup=False,
        soft_wrap=True,
    )


def show_glue(found: dict[str, Any], as_json: bool) -> None:
    """Print the GLUE table with a column for each protocol; missing tasks are named under it."""
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
            Console().print(f"no average of {words!r}: {', '.join(found[name]['absent'])} missing", markup=False)
    if found["left_out"]:
        Console().print(f"in neither column: {', '.join(found['left_out'])}", markup=False)
    if several := {Path(run).name: count for run, count in found["seeds"].items() if count > 1}:
        Console().print(f"means of seeds: {', '.join(f'{n} {count}' for n, count in several.items())}", markup=False)


def _points(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _cell(value: Any, name: str) -> str:
    """Format a value: a line for each entry of a dict, the beginning of a long list, a score with one decimal."""
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
