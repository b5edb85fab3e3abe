"""The description of a labelled data set: a task. The kind of its head decides how it is encoded and scored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.model.config import HeadKind, PooledWindows
from bertsmith.tasks.examples import Examples

Names = dict[str, tuple[str, ...]]
Prediction = dict[str, Any]  # plain values: label, score and scores of a classifier, text, start and end of a span, …
DEV = ("dev", "validation", "valid", "val")
# The usual names of columns, for tasks of several files.
QUESTIONS: Names = {
    "text": ("question",),
    "pair": ("context", "passage", "text"),
    "label": ("answers", "answer"),
    "start": ("answer_start",),
    "key": ("id",),
}
WORDS: Names = {
    "text": ("tokens", "words", "text"),
    "label": ("ner_tags", "tags", "labels", "label", "entities", "spans"),
}


@dataclass(frozen=True)
class Task:
    """A description of a labelled data set.

    `names` are the column names to look for, by role: text, pair, label, endings, start, key. `train`, `dev` and `test`
    are file names without their suffix, in the order in which a folder is searched for them; names with a `+` between
    them are files that belong together. There may be several dev
    files, by the prefix of their scores, and several test files, by the name of their prediction file. `labels` are the
    classes in the order of the hub's numbers, `header` the columns of files that have no header line.
    """

    name: str
    head: HeadKind
    metrics: tuple[str, ...]
    names: Names
    train: tuple[str, ...] = ("train",)
    dev: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"": DEV})
    test: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    own: bool = False  # for the user's own files: a bad row is refused, while bad rows of a data set are skipped
    scale: tuple[float, float] | None = None  # the lowest and highest number that a regression predicts
    no_answer: bool = False  # some questions have no answer
    unlabelled: str = ""  # the label of rows whose annotators did not agree; such rows are skipped
    letters: bool = False  # F1 of answers compares characters instead of words (Korean)
    max_length: int = 128
    symmetric: bool = False  # the order of the two texts means nothing: they are alike, or they are not


@dataclass(frozen=True)
class Limits:
    """The maximum lengths of inputs and answers, on which encoding and decoding have to agree.

    A context longer than `max_length` is read in windows that begin `stride` tokens apart; a question keeps `max_query`
    tokens, an answer has at most `max_answer`. The prediction is no answer where its score exceeds that of the best
    answer by more than `threshold` (the paper's -τ); with None there is always an answer. A model that may give no
    answer and has no threshold of its own takes 0, as the original code does.

    A text to classify that is longer than `max_length` is read in at most `windows` windows, whose logits are `pooled`
    by their mean or their maximum; with 0 it is truncated.
    """

    max_length: int = 128
    stride: int = 128
    max_query: int = 64
    max_answer: int = 30
    n_best: int = 20
    threshold: float | None = None
    windows: int = 0
    pooled: PooledWindows = "mean"


@dataclass(frozen=True)
class Encoded:
    """Rows as parts: `owners` has the row of each part (in order), `details` the facts about it that decoding needs.

    A part is an example of its own or, with `sources`, belongs to the example that they name: sentences with the same
    context share an example.
    """

    examples: Examples
    owners: Sequence[int] | NDArray[np.int64]
    details: Sequence[Any] = ()
    shortened: int = 0  # rows that were truncated
    sources: Sequence[int] | NDArray[np.int64] | None = None

    def parts_of(self, row: int) -> range:
        """The parts of a row."""
        return range(bisect_left(self.owners, row), bisect_right(self.owners, row))  # type: ignore[arg-type]

    def source_of(self, part: int) -> int:
        """The example that a part belongs to."""
        return part if self.sources is None else int(self.sources[part])
