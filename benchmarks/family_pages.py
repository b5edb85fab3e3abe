"""The tables of the families' results, for the terminal and for docs/families.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.family_cpu import LENGTHS
from benchmarks.family_quality import EPOCHS
from benchmarks.family_table import FAMILIES
from bertsmith.commands.recipe_list import START

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
NAMES = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE"}
Results = dict[str, Any]
Rows = list[list[str]]


def speed_rows(speed: Results) -> Rows:
    """A line for each family and size, under the names of the columns."""
    rows = [["family", "tokens/s", "TFLOP/s", "of BERT's", "GB", "`transformers`: tokens/s", "GB", "times as fast"]]
    for name, found in speed.items():
        ours, theirs = found["bertsmith"], found.get("transformers", {})
        beside = ["–", "–", "–"]
        if isinstance(theirs, dict) and theirs:
            beside = [f"{theirs['tokens_per_second']:,}", f"{theirs['memory_gb']:g}", f"{found['ratio']:.2f}"]
        own = [f"{ours['tokens_per_second']:,}", f"{ours['tflops']:g}", f"{found['tflops_of_bert']:.2f}"]
        rows.append([name, *own, f"{ours['memory_gb']:g}", *beside])
    return rows


def quality_rows(quality: Results) -> Rows:
    """A line for each family, under the names of the columns; the mean is that of the five tasks of GLUE."""
    seen = ["million tokens", "tokens/s", "GB", "masked-word loss", "bits per byte"]
    rows = [["family", *seen, *NAMES.values(), "mean", "CoNLL-2003"]]
    for name in sorted(quality, key=list(FAMILIES).index):
        run, tasks = quality[name]["pretraining"], quality[name].get("tasks", {})
        words, memory = run["masked_words"] or {}, run.get("memory_gb")
        figures = [
            f"{run['tokens'] / 1e6:,.0f}",
            f"{run['tokens_per_second']:,}",
            "–" if memory is None else f"{memory:.1f}",
        ]
        figures += [_number(words.get(n)) for n in ("loss", "bits_per_byte")]
        mean = quality[name].get("mean") if tasks.keys() >= EPOCHS.keys() else None
        scores = [mean_cell(tasks.get(task)) for task in EPOCHS]
        rows.append([name, *figures, *scores, _number(mean), mean_cell(tasks.get("conll2003"))])
    return rows


def cpu_rows(cpu: Results) -> Rows:
    """A line for each family and precision: milliseconds of one text, and texts a second of sixteen."""
    columns = [*(f"1 × {n}, ms" for n in LENGTHS), *(f"16 × {n}, texts/s" for n in LENGTHS)]
    rows = [["family", "parameters, M", *columns]]
    for key in sorted(cpu, key=lambda key: (key.split(", ")[1], list(FAMILIES).index(key.split(", ")[0]))):
        times = cpu[key]["milliseconds"]
        alone = [f"{times[f'1 × {n}']:.3g}" for n in LENGTHS]
        together = [f"{16_000 / times[f'16 × {n}']:,.0f}" for n in LENGTHS]
        rows.append([key, f"{cpu[key]['parameters'] / 1e6:.0f}", *alone, *together])
    return rows


def start_rows() -> Rows:
    """The recipes to start with, as `bertsmith recipes` names them."""
    return [["when", "recipe"], *([when[0].lower() + when[1:], f"`{name}`"] for name, when in START.items())]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def mean_cell(found: Results | None) -> str:
    """The mean of a task's scores with its deviation, as far as there are any."""
    if not found or found["mean"] is None:
        return "–"
    return f"{found['mean']:.1f}" + (f" ± {found['deviation']:.1f}" if found["deviation"] is not None else "")


def show(results: Results) -> None:
    """Print the tables."""
    print_tables(tables(results), width=150)


def tables(results: Results) -> dict[str, Rows]:
    return {
        "choice": start_rows(),
        "speed": speed_rows(results.get("speed", {})),
        "quality": quality_rows(results.get("quality", {})),
        "equal tokens": quality_rows(results.get("quality at equal tokens", {})),
        "cpu": cpu_rows(results.get("cpu", {})),
    }


def write_page(results: Results, page: Path = PAGE) -> None:
    """Put the tables into the page."""
    put_tables(page, tables(results))


def print_tables(found: dict[str, Rows], width: int) -> None:
    """Print tables, whose first rows are the names of their columns."""
    for header, *rows in found.values():
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console(width=width).print(table)


def put_tables(page: Path, found: dict[str, Rows]) -> None:
    """Put tables into a page, each between the comments `<!-- speed -->` and `<!-- end of speed -->` of its name."""
    text = page.read_text(encoding="utf-8")
    for name, rows in found.items():
        body = "\n".join(map(_line, [rows[0], ["---"] * len(rows[0]), *rows[1:]])) if rows[1:] else "Not measured yet."
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        places = list(re.finditer(pattern, text, flags=re.DOTALL))
        assert len(places) == 1, f"{page} has no place for the table of {name}"
        (place,) = places
        text = f"{text[: place.start()]}{place[1]}{body}\n{place[2]}{text[place.end() :]}"
    page.write_text(text, encoding="utf-8")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
