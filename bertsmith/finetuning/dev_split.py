"""Dev rows held out from the training rows, if there are no others.

Which rows are held out depends only on the rows: runs with other seeds or settings are scored on the same rows, and so
is a resumed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertsmith import draws
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.kinds import KINDS

HELD_OUT = 107  # the stream of draws
FEWEST = 20  # texts; with fewer, none is held out
LEAST = 5  # texts to hold out


def hold_out(rows: Sequence[Row], head: HeadConfig, share: float) -> tuple[list[Row], dict[str, list[Row]], str]:
    """The training rows, the held-out rows, and a note about them.

    About `share` of the texts are held out, stratified by label; the last text of a label is trained on. All rows with
    the same text (the same context, for questions) are on one side, or the scores would be too high.
    """
    kind, texts = KINDS[head.kind], dict[str, list[int]]()
    for number, row in enumerate(rows):
        texts.setdefault(kind.group(row), []).append(number)
    chosen = _chosen([kind.stratum(rows[numbers[0]], head) for numbers in texts.values()], share)
    held = {number for place, numbers in enumerate(texts.values()) if place in chosen for number in numbers}
    if not held:
        few = "are too few" if len(texts) < FEWEST else "have too few of the same label"
        return list(rows), {}, f"no dev rows were given, and {len(texts)} texts {few} to hold some out; see --dev"
    sides: tuple[list[Row], list[Row]] = ([], [])
    for number, row in enumerate(rows):
        sides[number in held].append(row)
    line = f"no dev rows were given: {len(held)} of the {len(rows)} training rows are held out to score on"
    return sides[0], {"": sides[1]}, f"{line} (data.dev_share; 0 trains on all of them)"


def _chosen(strata: Sequence[Any], share: float) -> set[int]:
    """The texts that are held out: evenly spaced in a random order that is sorted by stratum."""
    counts = Counter(strata)
    order = draws.permute(np.arange(len(strata)), len(strata), HELD_OUT).tolist()
    free = sorted(
        (i for i in order if not isinstance(strata[i], str) or counts[strata[i]] > 1), key=lambda i: strata[i]
    )
    count = min(max(LEAST, round(share * len(strata))), len(free) // 2) if len(strata) >= FEWEST else 0
    return {free[int((k + 0.5) * len(free) / count)] for k in range(count)}
