"""What a task is: a description of a labelled data set. Its head's kind says how it is encoded, decoded and scored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.model.config import HeadKind
from bertsmith.tasks.examples import Examples

Names = dict[str, tuple[str, ...]]
DEV = ("dev", "validation", "valid", "val")


@dataclass(frozen=True)
class Task:
    """A description of a labelled data set.

    `names` are the columns it may be found in, by role: text, pair, label, endings, start, key. `train`, `dev` and
    `test` are the beginnings of its files' names in a folder; `dev` and `test` may be several, `dev` by the prefix of
    their scores, `test` by the name of the file with their answers. `labels` are the classes in the order of the hub's
    numbers, `header` the columns of a file that has no header line.
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
    own: bool = False  # the user's own file: what is wrong in it is refused, not left out
    scale: tuple[float, float] | None = None  # the numbers that a regression may give
    no_answer: bool = False  # some questions have none
    unlabelled: str = ""  # what stands for the label where annotators did not agree; such rows are left out
    letters: bool = False  # answers are compared letter by letter (Korean)
    max_length: int = 128


@dataclass(frozen=True)
class Limits:
    """How long inputs and answers may be: what encoding and decoding have to agree on.

    A context longer than `max_length` is read in windows that begin `stride` tokens apart; a question keeps `max_query`
    tokens, an answer has at most `max_answer`. No answer is given where that scores more than `threshold` better than
    the best one (the paper's -τ); None: there is always an answer. A model without a threshold of its own that may find
    no answer takes 0, as the original code does.
    """

    max_length: int = 128
    stride: int = 128
    max_query: int = 64
    max_answer: int = 30
    n_best: int = 20
    threshold: float | None = None


@dataclass(frozen=True)
class Encoded:
    """Rows in parts: `owners` says which row each part belongs to (in order), `details` what decoding needs of it.

    A part is an example of its own or, where there are `sources`, is read from the example that they name: sentences
    with the same context share one.
    """

    examples: Examples
    owners: Sequence[int] | NDArray[np.int64]
    details: Sequence[Any] = ()
    shortened: int = 0  # rows of which something was cut off
    sources: Sequence[int] | NDArray[np.int64] | None = None

    def parts_of(self, row: int) -> range:
        """The parts of a row."""
        return range(bisect_left(self.owners, row), bisect_right(self.owners, row))  # type: ignore[arg-type]

    def source_of(self, part: int) -> int:
        """The example that a part is read from."""
        return part if self.sources is None else int(self.sources[part])
