"""The page with the findings of `corpus doctor`."""

from __future__ import annotations

import html
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertsmith.corpus.doctor.examination import summary
from bertsmith.corpus.doctor.findings import Diagnosis, Finding, Histogram, percent
from bertsmith.pages import page

COLOURS = {"problem": "#dc2626", "warning": "#ea580c", "ok": "#16a34a"}


def write_report(diagnosis: Diagnosis, path: str | Path) -> None:
    """Write a diagnosis as a self-contained page."""
    bad = [*diagnosis.of("problem"), *diagnosis.of("warning")]
    parts = [page.section("What to fix"), *(map(_item, bad) if bad else [page.paragraph("Nothing to fix.")])]
    fine = [(finding.name.replace("_", " "), finding.sentence) for finding in diagnosis.of("ok")]
    parts += [page.section("What is fine"), page.table(("check", "result"), fine)]
    parts += [page.section("Lengths"), page.figures(map(_bars, diagnosis.histograms))]
    parts += [page.section("Figures"), page.table(("", ""), _rows(diagnosis.facts))]
    if unknown := diagnosis.facts.get("unknown_words"):
        parts += [page.section("Words that become [UNK]"), page.table(("word", "times"), unknown.items())]
    if diagnosis.left_out:
        parts += [page.section("Not checked"), *map(page.paragraph, diagnosis.left_out)]
    page.write_page(path, "Corpus doctor", summary(diagnosis), parts)


def _item(finding: Finding) -> str:
    """Return a finding as HTML."""
    mark = f"<b style='color:{COLOURS[finding.severity]}'>{finding.severity}</b>"
    fix = f"<br>Fix: <code>{html.escape(finding.fix)}</code>" if finding.fix else ""
    examples = "".join(f"<li><small>{html.escape(example)}</small></li>" for example in finding.examples)
    return f"<p>{mark} {html.escape(finding.sentence)}{fix}</p>" + (f"<ul>{examples}</ul>" if examples else "")


def _bars(histogram: Histogram) -> str:
    total = max(1, sum(histogram.counts))
    shares = [100 * count / total for count in histogram.counts]
    labels = [f"{edge >> 10}k" if edge >= 1024 else str(edge) for edge in histogram.edges]
    with warnings.catch_warnings():  # matplotlib warns that a name with _ gets no legend, which is wanted here
        warnings.simplefilter("ignore")
        return page.bars(f"{histogram.title}, from … on", {"_": shares}, labels, f"% of {histogram.items}")


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield facts as rows of a table; nested values are written out."""
    for name, value in facts.items():
        if name == "scripts":
            value = ", ".join(f"{script} {percent(share)}" for script, share in value.items())
        shown = f"{value:,}" if type(value) is int else f"{value:.3g}" if isinstance(value, float) else value
        if name not in ("pairs", "unknown_words"):
            yield name.replace("_", " "), ", ".join(shown) if isinstance(shown, list) else str(shown)
