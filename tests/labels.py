"""Labels of made-up examples and batches, of the kinds that tasks and the pre-training loader use."""

from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.batch import Label
from bertsmith.finetuning.frozen import STATE
from bertsmith.pretraining.loader import MASKED, PAIR, TARGET
from bertsmith.tasks import examples


def of_task(label: Any = None, tags: Any = None, words: Any = None, sentences: Any = None, states: Any = None) -> Any:
    """The labels of a task's example that are not None; without `sentences` the example is one sentence."""
    sentences = words[:1] if sentences is None and words is not None else sentences
    given = {
        "label": (label, examples.TARGET),
        "tags": (tags, examples.TAG),
        "words": (words, examples.WORD),
        "sentences": (sentences, examples.WORD),
        "states": (states, STATE),
    }
    return {name: Label(values, kind) for name, (values, kind) in given.items() if values is not None}


def of_pretraining(masked: Any, targets: Any, follows: Any = None) -> dict[str, Label]:
    """The labels of a batch of masked sequences."""
    labels = {"masked": Label(masked, MASKED), "targets": Label(targets, replace(TARGET, loss="mlm"))}
    return labels if follows is None else {**labels, "next": Label(np.asarray(follows), PAIR)}
