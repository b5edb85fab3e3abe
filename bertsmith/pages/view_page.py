"""The HTML of the page that `view` writes. Everything that comes from a text or a vocabulary is embedded as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bertsmith.pages.page import asset, paragraph, section, table

MOST_LABELS = 10


def answer_parts(answer: Mapping[str, Any] | None) -> Iterator[str]:
    """What the model answers, at the top of the page; nothing for a model without a task."""
    if answer is None:
        return
    yield section("What the model answers")
    if "words" in answer:
        rows = zip(answer["words"], answer["tags"], answer["scores"], strict=True)
        yield table(["word", "tag", "probability"], [(word, tag, _percent(score)) for word, tag, score in rows])
    elif "scores" in answer:
        said = answer.get("label") or ", ".join(answer.get("labels", ())) or "none of its labels"
        yield paragraph(said, "number")
        order = sorted(answer["scores"].items(), key=lambda pair: -pair[1])
        yield table(["label", "probability"], [(name, _percent(score)) for name, score in order[:MOST_LABELS]])
    elif "value" in answer:
        yield paragraph(f"{answer['value']:.3f}", "number")
    else:
        yield paragraph(answer["text"] or "The text has no answer.", "number")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def body(found: Mapping[str, Any]) -> Iterator[str]:
    """The parts of the page. A `<` inside the data could end its element, so it is written as an escape."""
    yield f"<style>\n{asset('view.css')}</style>"
    yield section("The text")
    yield paragraph("Point at a token to see what the model does with it; a click keeps it.", "note")
    yield asset("view.html").rstrip()
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    yield f"<script type=application/json id=data>{text}</script>"
    yield f"<script>\n{asset('view.js')}</script>"
