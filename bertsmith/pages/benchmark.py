"""The table and the page of `benchmark`: the scores of encoders beside each other, and over minutes and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from bertsmith.finetuning.benchmark import COLUMNS, MEAN, PUBLISHED
from bertsmith.pages import page

ABSENT = "–"
Values = dict[str, Any]


def header(result: Values) -> list[str]:
    """Return the names of the columns."""
    return ["model", "shape", "minutes", "tokens", "loss", MEAN, *result["columns"]]


def lines(result: Values) -> Iterator[list[str]]:
    """Yield the lines of the table: the models, then scores that others published."""
    for row in result["rows"]:
        held_out = row.get("held_out", {})
        yield [
            row["name"],
            f"{row['layers']} × {row['width']}",
            f"{row['minutes']:.1f}" if "minutes" in row else ABSENT,
            page.short(row["tokens"]) if "tokens" in row else ABSENT,
            f"{next(iter(held_out.values())):.2f}" if held_out else ABSENT,
            f"{row['mean']:.1f}" if "mean" in row else ABSENT,
            *(cell(row["scores"].get(name)) for name in result["columns"]),
        ]
    counted = [column.name for column in COLUMNS if column.counts]
    for name, values in PUBLISHED.items():
        known = dict(zip(counted, values, strict=True))
        shown = [f"{known[name]:.1f}" if name in known else ABSENT for name in result["columns"]]
        yield [name, *[ABSENT] * 4, f"{mean(values):.1f}", *shown]


def cell(figures: Values | None) -> str:
    """Format a median with the lowest and the highest score of the seeds."""
    if figures is None:
        return ABSENT
    values = figures["values"]
    spread = f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else ""
    return f"{figures['median']:.1f}{spread}" + (f", {figures['failed']} failed" if figures.get("failed") else "")


def remarks(result: Values) -> list[str]:
    """Return the protocol and what differs from it, for the reader."""
    protocol, seeds = result["protocol"], result["seeds"]
    length = f"{protocol['epochs']:g} epochs" if protocol["epochs"] else f"{protocol['steps']} steps"
    words = f"{length}, batches of {protocol['batch_size']}, learning rate {protocol['learning_rate']:g}, "
    words += f"warm-up {protocol['warmup']:.0%}, dropout {protocol['dropout']:g}"
    metrics = ", ".join(f"{name} {metric}" for name, metric in result["metrics"].items())
    spread = f"Scores are medians over {seeds} seeds on dev, with the lowest and the highest"
    notes = [f"{spread if seeds > 1 else 'Scores are of one seed on dev'}: {metrics}."]
    notes += [f"The same settings for all tasks and models: {words}. Nothing is chosen on dev."]
    notes += [f"Changed by --set: {' '.join(result['settings'])}."] if result["settings"] else []
    notes += [f"Missing: {name}: {why}." for name, why in result["absent"].items()]
    notes += [f"Partial: {name}: {'; '.join(why)}." for name, why in result["partial"].items()]
    counted = ", ".join(column.name for column in COLUMNS if column.counts)
    named = " and of ".join(name.split(",")[0].split(":")[0] for name in PUBLISHED)
    return [*notes, f"{MEAN} is the mean of {counted}. The scores of {named} are published ones on dev."]


def write_benchmark(path: Path, result: Values) -> None:
    """Write the page."""
    parts = [page.table(header(result), list(lines(result))), *(page.paragraph(t, "note") for t in remarks(result))]
    page.write_page(path, "Benchmark", "Encoders fine-tuned by one protocol", [*parts, page.figures(_drawn(result))])


def _drawn(result: Values) -> Iterator[str]:
    rows = result["rows"]
    for key, name in (("minutes", "minutes of pre-training"), ("tokens", "tokens of pre-training")):
        known = sorted((row for row in rows if key in row and "mean" in row), key=lambda row: row[key])
        if len({row[key] for row in known}) > 1:
            curve = [row[key] for row in known], [row["mean"] for row in known]
            yield page.plot(f"{MEAN} after so many {name}", {MEAN: curve}, x_label=name)
    for name in result["columns"]:
        medians = [row["scores"][name]["median"] for row in rows]
        yield page.bars(name, {"median": medians}, [row["name"] for row in rows])
