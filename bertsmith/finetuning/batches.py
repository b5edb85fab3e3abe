"""The batches of a fine-tuning step, as a pure function of its number."""

from __future__ import annotations

import sys

from bertsmith import draws
from bertsmith.batch import Batch, split_for_rank
from bertsmith.finetuning.frozen import FrozenExamples
from bertsmith.tasks.examples import Examples
from bertsmith.training.settings import TrainConfig

ORDER = 106  # the stream of draws that orders the rows of an epoch


def micro_batches(
    examples: Examples | FrozenExamples,
    step: int,
    train: TrainConfig,
    max_length: int,
    rank: int = 0,
    ranks: int = 1,
    endings: int = 1,
) -> list[Batch]:
    """The micro-batches of one rank in a step: every epoch shuffles the rows, and the run's last step may be smaller.

    A row of a multiple-choice task is one example for each of its `endings`, which stay in one micro-batch, and so do a
    pair's two orders, and the windows of a text, of which there are at most `endings`.
    """
    count = examples.num_rows
    by_epochs = train.epochs is not None and train.steps is None and train.hours is None
    last = max(1, int((train.epochs or 0) * count)) if by_epochs else sys.maxsize
    begin = step * train.batch_size
    rows = draws.in_epochs(begin, min(begin + train.batch_size, last), count, train.seed, ORDER)
    size = train.micro_size(max_length) if endings == 1 else max(1, train.micro_size(max_length) // endings)
    batches = []
    for place, is_idle in split_for_rank(range(0, len(rows), size), rank, ranks):
        batch = examples.batch(rows[place : place + size])
        batches.append(batch.zero_weight() if is_idle else batch)
    return batches
