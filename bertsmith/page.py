"""Self-contained HTML pages: text, tables and plots in one file that opens anywhere."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bertsmith.folders import new_file

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2")
SIZE = (4.6, 3.1)  # inches of a plot: two stand side by side
STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2937; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.8rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.lead { color: #4b5563; margin-top: 0; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figures svg { max-width: 100%; height: auto; } .number { font-size: 2rem; font-weight: 600; color: #2563eb; }
table { border-collapse: collapse; margin: .6rem 0; } td, th { padding: .3rem .9rem .3rem 0; text-align: left; }
th { border-bottom: 2px solid #d1d5db; font-weight: 600; } td { border-bottom: 1px solid #e5e7eb; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } code { background: #f3f4f6; padding: 0 .25rem; }
@media (prefers-color-scheme: dark) { body { background: #111827; color: #e5e7eb; } .lead { color: #9ca3af; }
code { background: #1f2937; } .figures svg { background: #f9fafb; border-radius: .4rem; } }
"""


def write_page(path: str | Path, title: str, lead: str, parts: Iterable[str]) -> None:
    """Write a page out of parts that are HTML already (`table`, `plot`, `section`, `paragraph`)."""
    body = f"<h1>{html.escape(title)}</h1>\n<p class=lead>{html.escape(lead)}</p>\n" + "\n".join(parts)
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{html.escape(title)}</title>"
    with new_file(path) as work:
        top = f"<!doctype html>\n<html lang=en><head>{head}<style>{STYLE}</style></head>\n"
        work.write_text(f"{top}<body>\n{body}\n</body></html>\n", encoding="utf-8")


def section(title: str) -> str:
    return f"<h2>{html.escape(title)}</h2>"


def paragraph(text: str, css: str = "") -> str:
    return f"<p class='{css}'>{html.escape(text)}</p>"


def figures(plots: Iterable[str]) -> str:
    """Plots side by side where there is room."""
    return f"<div class=figures>{''.join(plots)}</div>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers stand to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(row[i][1] for row in cells) for i in range(len(header))]
    mark = [" class=n" if n else "" for n in numeric]
    top = "".join(f"<th{mark[i]}>{html.escape(name)}</th>" for i, name in enumerate(header))
    body = "".join(
        "<tr>" + "".join(f"<td{mark[i]}>{html.escape(text)}</td>" for i, (text, _) in enumerate(row)) + "</tr>\n"
        for row in cells
    )
    return f"<table><tr>{top}</tr>\n{body}</table>"


def _cell(value: object) -> tuple[str, bool]:
    if isinstance(value, float):
        return f"{value:.4g}", True
    if isinstance(value, int):
        return f"{value:,}", True
    return str(value), False


def plot(title: str, curves: Mapping[str, Curve], x_label: str = "step", y_label: str = "") -> str:
    """Curves as an SVG picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for number, (name, (x, y)) in enumerate(curves.items()):
        axes.plot(x, y, label=name, color=COLOURS[number % len(COLOURS)], linewidth=1.8)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return _svg(figure)


def bars(title: str, groups: Mapping[str, Sequence[float]], labels: Sequence[str], y_label: str = "") -> str:
    """Groups of bars as an SVG picture: one group a label, one colour a name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        places = [i + (number - (len(groups) - 1) / 2) * width for i in range(len(labels))]
        drawn = axes.bar(places, values, width * 0.92, label=name, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper center", ncols=len(groups), bbox_to_anchor=(0.5, -0.1))
    return _svg(figure)


def _svg(figure: object) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})  # type: ignore[attr-defined]
    return buffer.getvalue().split("<?xml", 1)[-1].split("?>", 1)[-1].split(">", 1)[-1].lstrip()
