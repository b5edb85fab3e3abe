"""Whether a fine-tuned model has collapsed: it learnt no more than a guess that does not look at the text.

Fine-tuning a large model on few rows fails now and then for no other reason than its seed (section 4.1: random
restarts). Such a run says the same of every row, and its training loss stays where the best constant answer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks import tagging
from bertsmith.tasks.sequences import target

NEAR = 0.9  # of the guess's loss: a model that is below has learnt something, whatever it says of the dev rows
NARROW = 0.05  # of the deviation of the gold numbers: numbers that vary less are the same


def collapse(loss: float, guess: float | None, same: str) -> str:
    """Why a run has collapsed, in words; nothing where it has not.

    `loss` is its training loss at the end, `guess` that of a guess, `same` what it says of all dev rows, if it does.
    """
    if guess is None or not math.isfinite(loss):
        return ""
    if loss >= guess:
        return f"the training loss {loss:.3f} is not below that of a guess, {guess:.3f}{', and ' * bool(same)}{same}"
    return (
        f"{same}, with a training loss of {loss:.3f} (a guess has {guess:.3f})" if same and loss > NEAR * guess else ""
    )


def guess_loss(rows: Sequence[Row], head: HeadConfig, weights: Sequence[float] | None = None) -> float | None:
    """The training loss of the best answer that is the same for all rows; None where there is no such answer."""
    if head.kind == "span":
        return None
    if head.kind == "choice":
        return math.log(head.num_choices) if head.num_choices else None
    if head.kind == "tags":
        return _entropy(np.bincount([i for row in rows for i in tagging.check(row, head)]))
    targets = np.array([target(row, head) for row in rows], dtype=np.float64)
    if head.kind == "regression":
        return float(targets.var())
    counting = np.ones(len(head.labels)) if weights is None else np.asarray(weights)
    if head.kind == "multi":
        shares = targets.mean(0)
        losses = [_entropy(np.array([share, 1 - share])) for share in shares]
        return float((counting * losses).mean())
    weighed = counting * np.bincount(targets.astype(int), minlength=len(head.labels))
    return _entropy(weighed) * float(weighed.sum()) / len(rows)


def _entropy(counts: NDArray[Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def same_answer(rows: Sequence[Row], answers: Sequence[dict[str, Any]], head: HeadConfig) -> str:
    """What is said of all rows although their labels differ, in words; nothing where answers differ, too."""
    if head.kind == "regression":
        gold, said = np.std([target(row, head) for row in rows]), np.array([a["value"] for a in answers])
        return f"every dev row gets a number near {said.mean():.3g}" if said.std() < NARROW * gold else ""
    if head.kind == "single":
        expected, found = {target(row, head) for row in rows}, {a["label"] for a in answers}
    elif head.kind == "multi":
        expected = {tuple(target(row, head)) for row in rows}
        found = {", ".join(a["labels"]) or "none" for a in answers}
    elif head.kind == "tags":
        expected = {i for row in rows for i in tagging.check(row, head)}
        found = {tag for a in answers for tag in a["tags"]}
    else:
        return ""
    what = "every word of the dev rows gets the tag" if head.kind == "tags" else "every dev row gets the label"
    return f"{what} {min(found)!r}" if len(found) == 1 < len(expected) else ""
