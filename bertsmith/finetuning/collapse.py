"""Whether a fine-tuned model has collapsed: it is no better than the best constant prediction.

Fine-tuning a large model on few rows sometimes fails with some seeds (section 4.1: random restarts). Such a run
predicts the same for every row, and its training loss stays that of a constant prediction.
"""

from __future__ import annotations

import math

from bertsmith.progress import short

NEAR = 0.9  # of the constant prediction's loss: with a lower loss, a model has learnt something


def collapse(loss: float, constant_loss: float | None, constant: str) -> str:
    """The reason why a run has collapsed; empty if it has not.

    `loss` is its final training loss, `constant_loss` that of the best constant prediction; `constant` describes the
    prediction that all dev rows have in common, if there is one.
    """
    if constant_loss is None or not math.isfinite(loss):
        return ""
    final, guess = short(loss), short(constant_loss)
    if loss >= constant_loss:
        return f"the training loss {final} is not below that of a guess, {guess}{', and ' * bool(constant)}{constant}"
    if constant and loss > NEAR * constant_loss:
        return f"{constant}, with a training loss of {final} (a guess has {guess})"
    return ""
