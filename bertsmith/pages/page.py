"""Self-contained HTML pages: text, tables and plots in one file that opens anywhere."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertsmith.folders import locked, new_file

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
Limits = Literal["all", "robust", "zero"]  # of y: all values, without outliers, or from zero and without outliers
# Colours of medium lightness, which are visible on white and on black.
COLOURS = ("#3b82f6", "#ea580c", "#16a34a", "#a855f7", "#e11d48", "#0891b2", "#b45309", "#64748b")
GREY = "#8b93a1"  # of axes
SIZE = (4.8, 2.9)  # inches of a plot, so that two fit side by side
SHORT = 20  # characters of a cell that is not wrapped
LONG_WORD = 16  # characters; a browser may break inside words of twice as many
SCRIPTS = {"ko": "가-힣ᄀ-ᇿ㄰-㆏", "ja": "ぁ-ヿ", "zh": "一-鿿", "th": "฀-๿", "he": "֐-׿", "el": "Ͱ-Ͽ"}
MOST_POINTS = 800  # of a drawn line; more would not be visible


class Html(str):
    """Text that is HTML already, so that tables do not escape it."""


@dataclass(frozen=True)
class Line:
    """A curve of a chart; `light` puts it behind the others, `group` is the CSS class that a legend can hide.

    Points that are not `joined` make a scatter plot.
    """

    x: Sequence[float]
    y: Sequence[float]
    colour: str = COLOURS[0]
    label: str = ""
    light: bool = False
    dots: bool = False
    group: str = ""
    joined: bool = True


@dataclass(frozen=True)
class Mark:
    """A mark on the x axis: a dashed vertical line, or a cross at the bottom."""

    x: float
    kind: Literal["line", "cross"] = "line"
    colour: str = GREY
    label: str = ""
    group: str = ""


def write_page(path: str | Path, title: str, lead: str, parts: Iterable[str]) -> None:
    """Write a page from parts that are HTML already (`table`, `plot`, `section`, `paragraph`)."""
    page = page_text(title, lead, parts)
    with locked(path), new_file(path) as work:
        work.write_text(page, encoding="utf-8")


def page_text(title: str, lead: str, parts: Iterable[str]) -> str:
    """Return the text of a page from parts that are HTML already."""
    body = f"<h1>{html.escape(title)}</h1>\n<p class=lead>{html.escape(lead)}</p>\n" + "\n".join(parts)
    view = "<meta name=viewport content='width=device-width, initial-scale=1'>"
    head = f"<meta charset=utf-8>{view}<title>{html.escape(title)}</title>"
    top = f"<!doctype html>\n<html lang=en><head>{head}<style>\n{asset('page.css')}</style></head>\n"
    return f"{top}<body>\n{body}\n</body></html>\n"


def asset(name: str) -> str:
    """Return a style sheet, a script or markup from the files of the package."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def colour_of(number: int) -> str:
    """Return the colour of the first, second, … curve, run or bar."""
    if number < len(COLOURS):
        return COLOURS[number]
    red, green, blue = hls_to_rgb(0.618 * number % 1, 0.5, 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def section(title: str, level: int = 2) -> str:
    return f"<h{level}>{html.escape(title)}</h{level}>"


def paragraph(text: str, css: str = "") -> str:
    return f"<p class='{css}'{lang(text)}>{html.escape(text)}</p>"


def captioned(title: str, content: str) -> str:
    """Return content with a title, to be placed among plots."""
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{content}</figure>\n"


def figures(plots: Iterable[str]) -> str:
    """Return plots side by side where the page is wide enough."""
    return f"<div class=figures>{''.join(plots)}</div>"


def folded(title: str, content: str, *, is_open: bool = False) -> str:
    """Return content that a click opens and closes."""
    return f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary>{content}</details>"


def cards(values: Iterable[tuple[str, str, str]]) -> str:
    """Return key figures as cards: name, value, and a short remark below."""
    drawn = [
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span><small>{html.escape(words)}</small></div>"
        for name, value, words in values
    ]
    return f"<div class=cards>{''.join(drawn)}</div>" if drawn else ""


def dot(colour: str) -> str:
    """Return a coloured dot to place before a name."""
    return f"<i class=dot style='background:{colour}'></i>"


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a sticky legend of names and colours; a click on a name hides the curves of its group."""
    boxes, rules = [], []
    for name, colour, group in entries:
        box = f"<input type=checkbox id=show-{group} checked>"
        boxes.append(f"<label>{box} {dot(colour)}{html.escape(name)}</label>")
        rules.append(f"body:has(#show-{group}:not(:checked)) svg .{group} {{ display: none; }}")
    return f"<style>{' '.join(rules)}</style><div class=legend>{''.join(boxes)}</div>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], css: str = "") -> str:
    """Return a table; columns of numbers are aligned to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(cells) and all(row[i][1] for row in cells) for i in range(len(header))]
    top = "".join(f"<th{' class=n' if n else ''}>{_escape(name)}</th>" for name, n in zip(header, numeric, strict=True))
    body = "".join(
        f"<tr>{''.join(_td(text, is_number) for (text, _), is_number in zip(row, numeric, strict=True))}</tr>\n"
        for row in cells
    )
    return f"<div class=wide><table{f' class={css}' if css else ''}><tr>{top}</tr>\n{body}</table></div>"


def _td(text: str, is_number: bool) -> str:
    """Return a cell: short text stays on one line, longer text gets a minimum width."""
    length = len(re.sub("<.*?>", "", text) if isinstance(text, Html) else text)
    kind = "n" if is_number else "short" if length <= SHORT else "long"
    return f"<td class={kind}{lang(text)}>{_escape(text)}</td>"


def _escape(text: str) -> str:
    """Escape text; a browser may break words that are too long for a line, and no others."""
    if isinstance(text, Html):
        return text
    return "<wbr>".join(html.escape(part) for part in re.split(rf"(?<=\S{{{LONG_WORD}}})(?=\S{{{LONG_WORD}}})", text))


def lang(text: str) -> str:
    """Return the `lang` attribute of text whose script shows its language, if that is not the page's language."""
    counts = {name: len(re.findall(f"[{letters}]", text)) for name, letters in SCRIPTS.items()}
    name = max(counts, key=lambda key: counts[key])
    others = sum(map(str.isalpha, text)) - sum(counts.values())
    if name == "zh" and counts["ja"]:  # Japanese uses both scripts
        name = "ja"
    return f" lang={name}" if counts[name] and 2 * sum(counts.values()) >= others else ""


def _cell(value: object) -> tuple[str, bool]:
    if isinstance(value, float):
        return f"{value:.4g}", True
    if isinstance(value, int):
        return f"{value:,}", True
    return value if isinstance(value, str) else str(value), False


def short(value: float, digits: int = 3) -> str:
    """Format a number for an axis or a headline: 0.02, 640, 12k, 1.31M, 2.5B."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{value / unit:.{digits}g}{name}"
    return f"{value:.{digits}g}"


def plot(title: str, curves: Mapping[str, Curve], x_label: str = "step", y_label: str = "") -> str:
    """Draw named curves, each in its own colour."""
    lines = [
        Line(x, y, colour_of(i), name if len(curves) > 1 else "") for i, (name, (x, y)) in enumerate(curves.items())
    ]
    return chart(title, lines, x_label=x_label, y_label=y_label)


def chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    x_label: str = "step",
    y_label: str = "",
    limits: Limits = "all",
) -> str:
    """Draw lines and marks."""
    figure, axes = _canvas(x_label, y_label)
    for line in lines:
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        if not line.joined:
            axes.plot(x, y, "o", color=line.colour, markersize=2.6, alpha=0.45, markeredgewidth=0, zorder=3)
            continue
        x, y = _thin(x, y)
        width, alpha = (0.8, 0.35) if line.light else (1.8, 1.0)
        point = "o" if (line.dots and len(x) <= 40) or len(x) == 1 else ""
        style = {"color": line.colour, "linewidth": width, "alpha": alpha, "marker": point, "markersize": 3.5}
        axes.plot(x, y, gid=line.group or None, zorder=2 if line.light else 3, **style)
    if (found := _limits(lines, limits)) is not None:
        axes.set_ylim(*found)
    left, right = axes.get_xlim()
    for mark in marks:
        _draw_mark(axes, mark, mark.x > (left + right) / 2)
    return _figure(figure, title, {line.label: line.colour for line in lines if line.label})


def _canvas(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(color=GREY)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: short(value, 6))
        axis.set_major_locator(
            MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=x_label == "step" and axis is axes.xaxis)
        )
    return figure, axes


def _draw_mark(axes: Any, mark: Mark, right: bool) -> None:
    place, group = axes.get_xaxis_transform(), mark.group or None
    if mark.kind == "cross":
        axes.plot([mark.x], [0.03], "x", transform=place, color=mark.colour, markersize=5, gid=group, clip_on=False)
        return
    axes.axvline(mark.x, color=mark.colour, linestyle="--", linewidth=1, gid=group)
    if mark.label:
        side, shift = ("right", -3) if right else ("left", 3)
        offset = {"xytext": (shift, 0), "textcoords": "offset points", "xycoords": place}
        axes.annotate(mark.label, (mark.x, 1.0), ha=side, va="top", fontsize=8, **offset)


def _limits(lines: Sequence[Line], limits: Limits) -> tuple[float, float] | None:
    """Return the limits of y; the first 3 % of a curve and single outliers may lie outside."""
    if limits == "all":
        return None
    low, high = [], []
    for line in lines:
        later = np.asarray(line.y, float)[len(line.y) // 33 :]
        if len(later):
            low.append(np.quantile(later, 0.01 if line.light else 0.0))
            high.append(np.quantile(later, 0.99 if line.light else 1.0))
    if not low or min(low) == max(high):
        return None
    bottom = 0.0 if limits == "zero" else float(min(low))
    margin = 0.06 * (float(max(high)) - bottom)
    return bottom - (margin if bottom > margin else bottom), float(max(high)) + margin


def _thin(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Thin out a long line to the minimum and maximum of every stretch, which keeps its look and its peaks."""
    if len(x) <= MOST_POINTS:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    places = np.array(sorted(kept))
    return x[places], y[places]


def bars(
    title: str, groups: Mapping[str, Sequence[float]], labels: Sequence[str], y_label: str = "", decimals: int = 1
) -> str:
    """Draw groups of bars: a group for each label, a colour for each name."""
    figure, axes = _canvas("", y_label)
    width, names = 0.8 / len(groups), {}
    for number, (name, values) in enumerate(groups.items()):
        places = [i + (number - (len(groups) - 1) / 2) * width for i in range(len(labels))]
        names[name] = colour_of(number)
        drawn = axes.bar(places, values, width * 0.92, color=names[name])
        axes.bar_label(drawn, fmt=f"%.{decimals}f", fontsize=8)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    return _figure(figure, title, names if len(groups) > 1 else {})


def _figure(figure: Any, title: str, names: Mapping[str, str]) -> str:
    """Return a drawing with its title and the names of its colours."""
    key = "".join(f"<span class=key>{dot(c)}{html.escape(n)}</span>" for n, c in names.items())
    return f"<figure><figcaption>{html.escape(title)}{key}</figcaption>{_svg(figure, title)}</figure>\n"


def _svg(figure: Any, title: str) -> str:
    """Return the drawing as inline SVG, whose text takes the font and colour of the page."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Ids are hashes with this salt, so a page is reproducible and no two drawings share an id.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "path.simplify": False}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    box, drawing = re.findall(r'<svg[^>]*viewBox="([^"]*)"[^>]*>(.*)', buffer.getvalue(), re.S)[0]
    drawing = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>|font-family: [^;\"]*;? ?| id=\"[\w.]+_\d+\"", "", drawing, flags=re.S
    )
    drawing = re.sub(r' id="(group\w+)"', r' class="\1"', drawing)
    drawing = re.sub(
        r' d="[^"]*"', lambda path: " " + " ".join(re.sub(r"(\.\d\d)\d+", r"\1", path[0]).split()), drawing
    )
    return f'<svg viewBox="{box}" role=img aria-label="{html.escape(title)}">{drawing.strip()}'
