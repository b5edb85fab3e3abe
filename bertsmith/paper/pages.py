"""The page of a table of the paper: our scores beside the paper's, and plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

from bertsmith.pages import page
from bertsmith.paper.findings import HOLDS, NOISE, REVERSED

ABSENT = "–"


def lines(result: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of a table as text: for each row the paper's scores, and ours below them."""
    digits = {name: decimals(result, name) for name in result["columns"]}
    for row in result["rows"]:
        paper = [f"{row['paper'][n]:.{d}f}" if n in row["paper"] else ABSENT for n, d in digits.items()]
        is_ours = "not_run" not in row
        if row["paper"] or not is_ours:
            yield [row["name"], "paper", *paper, ""]
        if is_ours:
            ours = [cell_text(row["ours"].get(name), d) for name, d in digits.items()]
            yield [row["name"], "ours", *ours, page.short(row["tokens"]) if "tokens" in row else ABSENT]


def decimals(result: dict[str, Any], name: str) -> int:
    """Return the number of decimals in a column: that of the paper's scores, two for perplexities."""
    figures = [row["paper"][name] for row in result["rows"] if name in row["paper"]]
    return 1 if all(round(figure, 1) == figure for figure in figures) else 2


def cell_text(cell: dict[str, Any] | None, digits: int = 1) -> str:
    """Format a mean, with its deviation if there are several seeds."""
    if cell is None:
        return ABSENT
    spread = f" ± {cell['deviation']:.{digits}f}" if cell["deviation"] is not None else ""
    return f"{cell['mean']:.{digits}f}{spread}" + (f" ({cell['failed']} failed)" if cell.get("failed") else "")


def header(result: dict[str, Any]) -> list[str]:
    """Return the names of the columns."""
    return ["", "", *result["columns"], "tokens seen"]


def remarks(result: dict[str, Any]) -> list[str]:
    """Return remarks for the reader: seeds, missing and partial data, settings, notes."""
    seeds, counts = result["seeds"], {row["name"]: row["runs"] for row in result["rows"] if "runs" in row}
    runs = max(counts.values(), default=1)
    fewer = [f"{count} of {name}" for name, count in counts.items() if count < runs]
    once = f"{'one pre-training run' if runs == 1 else f'{runs} pre-training runs'} each"
    once += f" (but {', '.join(fewer)}), with one budget" if fewer else ", with one budget"
    once = "no pre-training, since models were given" if result["models"] else once
    each = "per score" if runs == 1 else "per score and pre-training run"
    notes = [f"{seeds} fine-tuning seed{'s' if seeds > 1 else ''} {each}; {once}."]
    notes += [_learnt(name, run) for name, run in result.get("pretraining", {}).items()]
    notes += [f"{name} is {path}." for name, path in result["models"].items()]
    notes += [f"Not run: {row['name']}: {row['not_run']}." for row in result["rows"] if "not_run" in row]
    notes += [f"Missing: {name}: {why}." for name, why in result["absent"].items()]
    notes += [f"Partial: {name}: {'; '.join(why)}." for name, why in result["partial"].items()]
    notes += [f"Settings: {' '.join(result['settings'])}"] if result["settings"] else []
    return [*notes, *result["notes"]]


def _learnt(name: str, run: dict[str, Any]) -> str:
    """Say what a pre-training run has seen and learnt."""
    losses = {key: value for key, value in run["scores"].items() if key.endswith("_loss")}
    held_out = "; held out: " + ", ".join(f"{key} {value:.3f}" for key, value in losses.items()) if losses else ""
    speed = f", {run['tokens_per_second']:,} tokens/s" if run["tokens_per_second"] else ""
    return f"{name}: {page.short(run['tokens'])} tokens in {run['seconds'] / 60:.1f} minutes{speed}{held_out}."


def findings(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each finding of the paper: where it holds here, by how much, and where it does not."""
    for found in result["findings"]:
        several = len({(c["better"], c["worse"]) for c in found["compared"]}) > 1
        verdicts = []
        for verdict in (HOLDS, NOISE, REVERSED):
            of = [c for c in found["compared"] if c["verdict"] == verdict]
            differences = [_difference(c, decimals(result, c["column"]), several) for c in of]
            verdicts += [f"{verdict}: {', '.join(differences)}"] if of else []
        yield f"The paper: {found['finding']}. Here, {'; '.join(verdicts)}."


def _difference(compared: dict[str, Any], digits: int, with_rows: bool) -> str:
    rows = f" ({compared['better']} over {compared['worse']})" if with_rows else ""
    spread = f" ± {compared['noise']:.{digits}f}" if compared["noise"] is not None else " (one run)"
    return f"{compared['column']}{rows} {compared['difference']:+.{digits}f}{spread}"


def write_table(path: Path, result: dict[str, Any]) -> None:
    """Write the page of a table or figure."""
    name = result["table"]
    title = f"{name[:-1].capitalize()} {name[-1]}: {result['title']}"
    words = [*(page.paragraph(t) for t in findings(result)), *(page.paragraph(t, "note") for t in remarks(result))]
    parts = [page.table(header(result), list(lines(result))), *words]
    drawn = list(_curves(result) if any(row.get("series") for row in result["rows"]) else _bars(result))
    page.write_page(path, title, f"The paper's rows and ours, scale {result['scale']}", [*parts, page.figures(drawn)])


def _curves(result: dict[str, Any]) -> Iterator[str]:
    """Yield the charts of figure 5: a score over the steps of pre-training."""
    for name in result["columns"]:
        curves: dict[str, page.Curve] = {}
        for row in result["rows"]:
            if name in row["ours"]:
                x, y = curves.setdefault(row["series"], ([], []))
                x.append(row["steps"]), y.append(row["ours"][name]["mean"])  # type: ignore[attr-defined]
        if curves:
            yield page.plot(f"{name} dev after so many steps", curves, y_label="%")


def _bars(result: dict[str, Any]) -> Iterator[str]:
    """Yield bar charts of the paper's scores and ours, one for each column."""
    for name in result["columns"]:
        both = [row for row in result["rows"] if name in row["ours"]]
        paper = [row["paper"].get(name, float("nan")) for row in both]
        ours = [row["ours"][name]["mean"] for row in both]
        if both:
            labels = [fill(row["name"].removeprefix("BERT-Base, "), 9) for row in both]
            yield page.bars(name, {"paper": paper, "ours": ours}, labels, decimals=decimals(result, name))
