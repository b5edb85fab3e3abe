"""The HTML of the page that `view` writes. Everything that comes from a text or a vocabulary is embedded as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bertsmith.pages.page import asset, paragraph, section, table

MOST_LABELS = 10


def prediction_parts(prediction: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the section with the prediction; nothing for a model without a task."""
    if prediction is None:
        return
    yield section("Prediction")
    if "words" in prediction:
        rows = zip(prediction["words"], prediction["tags"], prediction["scores"], strict=True)
        yield table(["word", "tag", "probability"], [(word, tag, _percent(score)) for word, tag, score in rows])
    elif "scores" in prediction:
        shown = prediction.get("label") or ", ".join(prediction.get("labels", ())) or "none of its labels"
        yield paragraph(shown, "number")
        order = sorted(prediction["scores"].items(), key=lambda pair: -pair[1])
        yield table(["label", "probability"], [(name, _percent(score)) for name, score in order[:MOST_LABELS]])
    elif "value" in prediction:
        yield paragraph(f"{prediction['value']:.3f}", "number")
    else:
        yield paragraph(prediction["text"] or "The text has no answer.", "number")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def body(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the page; `<` inside the JSON is escaped, since it could end the script element."""
    yield f"<style>\n{asset('view.css')}</style>"
    yield section("The text")
    yield paragraph("Point at a token to see what the model does with it; a click keeps it.", "note")
    yield f"<div id=view>\n{asset('view.html')}</div>"
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    yield f"<script type=application/json id=data>{text}</script>"
    call = 'showView(document.getElementById("view"), JSON.parse(document.getElementById("data").textContent));'
    yield f"<script type=module>\n{asset('view.js')}{call}\n</script>"
