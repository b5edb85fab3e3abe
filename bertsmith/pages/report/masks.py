"""Filled masks: what a model predicts for the same held-out texts in the course of training."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertsmith.pages import page
from bertsmith.pages.page import Html
from bertsmith.pages.report.runs import SAMPLES, Record, Run, is_number
from bertsmith.text.frame import SHOWN_MASK

TEXTS, MASKS, MOMENTS, GUESSES = 4, 4, 6, 3  # maximum numbers that are shown


def filled_masks(runs: Sequence[Run]) -> str:
    """Return the predictions of one run over time, or the last ones of several runs side by side."""
    if not any(map(_moments, runs)):
        return ""
    parts = [page.section("Filled masks")]
    if len(runs) == 1:
        return "".join([*parts, _over_time(runs[0])])
    last = [(run.label, moments[-1][1]) for run in runs if (moments := _moments(run))]
    texts = list(dict.fromkeys(text for _, samples in last for text in samples))
    texts.sort(key=lambda text: -sum(text in samples for _, samples in last))  # those that most runs share first
    tables = [_table("run", [(label, s[text]) for label, s in last if text in s]) for text in texts[:TEXTS]]
    parts.append(page.figures(tables))
    parts += [page.folded(f"Over time: {run.label}", _over_time(run)) for run in runs if _moments(run)]
    return "".join(parts)


def _over_time(run: Run) -> str:
    """Return a table for each text, with a few evaluations spread over the run, the last one included."""
    moments = _moments(run)
    chosen = [moments[i] for i in sorted({*np.linspace(0, len(moments) - 1, MOMENTS).round().astype(int).tolist()})]
    tables = []
    for text in list(moments[-1][1])[:TEXTS]:
        tables.append(_table("step", [(step, samples[text]) for step, samples in chosen if text in samples]))
    return page.figures(tables)


def _moments(run: Run) -> list[tuple[str, dict[str, Record]]]:
    """Return the evaluations that hold samples: the step, and the samples by their text."""
    found = []
    for record in run.records:
        listed = record.get(SAMPLES)
        samples = {s["text"]: s for s in listed if _is_sample(s)} if isinstance(listed, list) else {}
        if samples:
            step = record.get("step")
            found.append((f"{step:,.0f}" if is_number(step) else "?", samples))
    return found


def _is_sample(value: Any) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("text"), str)):
        return False
    return isinstance(value.get("guesses"), list) and isinstance(value.get("answers", []), list)


def _table(first: str, rows: Sequence[tuple[str, Record]]) -> str:
    """Return a text with its masked words, and a row of predictions for each evaluation or run."""
    sample = rows[-1][1]
    answers, count = sample.get("answers", []), len(sample["guesses"])
    header = [f"{i + 1}: {answers[i] if i < len(answers) else '?'}" for i in range(min(count, MASKS))]
    body = [(name, *(_guesses(s, i) for i in range(len(header)))) for name, s in rows]
    note = page.paragraph(f"The first {MASKS} of {count} masks.", "note") if count > MASKS else ""
    return f"<figure><p>{_text(sample['text'], answers)}</p>{page.table([first, *header], body)}{note}</figure>"


def _text(text: str, answers: Sequence[Any]) -> str:
    """Return the text with the right words in place of its masks."""
    first, *rest = text.split(SHOWN_MASK)
    shown = html.escape(first)
    for number, piece in enumerate(rest):
        answer = html.escape(str(answers[number])) if number < len(answers) else SHOWN_MASK
        shown += f"<span class=mask>{answer}<sup>{number + 1}</sup></span>{html.escape(piece)}"
    return shown


def _guesses(sample: Record, mask: int) -> Html:
    """Return the likeliest words for one mask; the right one is marked and shown even if its rank is lower."""
    guesses = sample["guesses"][mask] if mask < len(sample["guesses"]) else []
    answers = sample.get("answers", [])
    answer = str(answers[mask]) if mask < len(answers) else None
    listed = guesses if isinstance(guesses, list) else []
    pairs = [g for g in listed if isinstance(g, list) and len(g) == 2 and is_number(g[1])]
    lines = [
        _guess(str(word), chance, rank, str(word) == answer)
        for rank, (word, chance) in enumerate(pairs, 1)
        if rank <= GUESSES or str(word) == answer
    ]
    return Html("<br>".join(lines))


def _guess(word: str, chance: float, rank: int, right: bool) -> str:
    percent = f"{100 * chance:.0f}" if chance >= 0.1 else f"{100 * chance:.1f}"
    place = f"{rank}. " if rank > GUESSES else ""
    shown = f"{place}{html.escape(word)} <small>{percent} %</small>"
    return f"<span class='guess right'>✓ {shown}</span>" if right else f"<span class=guess>{shown}</span>"
