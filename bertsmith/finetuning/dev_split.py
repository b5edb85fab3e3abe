"""Dev rows out of the training rows, where none are given.

Which rows are held out depends on the rows alone: runs with other seeds or settings are scored on the same ones, and a
run that is resumed finds them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertsmith import draws
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.sequences import label_of, target

HELD_OUT = 107  # the stream of draws
FEWEST = 20  # texts: of fewer, none is held out
LEAST = 5  # texts to hold out


def hold_out(rows: Sequence[Row], head: HeadConfig, share: float) -> tuple[list[Row], dict[str, list[Row]], str]:
    """The rows to train on, those to score on, and a line that says so.

    About `share` of the texts are held out, in proportion to their labels; the last text of a label stays. All rows of
    a text (of questions: of a context) are on the same side, or the scores would flatter the model.
    """
    texts: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        texts.setdefault((row.pair if head.kind == "span" else row.text) or "", []).append(number)
    chosen = _chosen([_label(rows[numbers[0]], head) for numbers in texts.values()], head, share)
    held = {number for place, numbers in enumerate(texts.values()) if place in chosen for number in numbers}
    if not held:
        return list(rows), {}, f"no dev rows were given, and {len(texts)} texts are too few to hold some out; see --dev"
    sides: tuple[list[Row], list[Row]] = ([], [])
    for number, row in enumerate(rows):
        sides[number in held].append(row)
    line = f"no dev rows were given: {len(held)} of the {len(rows)} training rows are held out to score on"
    return sides[0], {"": sides[1]}, f"{line} (data.dev_share; 0 trains on all of them)"


def _chosen(labels: Sequence[Any], head: HeadConfig, share: float) -> set[int]:
    """The places that are held out: evenly spaced in a random order that is sorted by label."""
    counts = Counter(labels) if head.kind == "single" else None
    order = draws.permute(np.arange(len(labels)), len(labels), HELD_OUT).tolist()
    free = sorted((i for i in order if counts is None or counts[labels[i]] > 1), key=lambda i: labels[i])
    count = min(max(LEAST, round(share * len(labels))), len(free) // 2) if len(labels) >= FEWEST else 0
    return {free[int((k + 0.5) * len(free) / count)] for k in range(count)}


def _label(row: Row, head: HeadConfig) -> Any:
    """What rows are sorted by: one label or a number; several, tags and answers have no order."""
    if head.kind == "single":
        return label_of(row)
    return float(target(row, head)) if head.kind == "regression" else 0
