"""Segment pairs for next sentence prediction (BERT paper, section 3.1 and appendix A.2).

Every document is a row of chunks of at most one sequence's tokens. An index names a chunk; the epoch moves the chunks
inside their document and draws the rest: whether the second segment follows or is a random one, how long the
sequence is, where it is divided. All of it is a pure function of (seed, epoch, index).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.data.shards import Corpus
from bertsmith.errors import UserError

SPECIAL = 3  # [CLS] A [SEP] B [SEP]
SHIFT = 108  # a stream of draws
NUM_WORDS = 6 + 32  # six numbers and 1024 coins: more than truncation, under two sentences, ever takes
Ids = NDArray[Any]


@dataclass(frozen=True)
class Pair:
    """Two segments and whether the second follows the first in its document."""

    first: Ids
    second: Ids
    is_next: bool


@dataclass(frozen=True, eq=False)
class PairSource:
    """The pairs of some documents of a corpus."""

    corpus: Corpus
    documents: NDArray[np.int64]
    max_length: int
    short_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_length < SPECIAL + 2:
            raise UserError(
                f"data.max_length {self.max_length} leaves no room for two segments; at least {SPECIAL + 2}"
            )
        if len(self.documents) < 2:
            raise UserError(
                f"{self.corpus.folder} gives {len(self.documents)} document(s) to draw pairs from, and a random "
                "segment comes from another document; separate documents by a blank line"
            )

    @property
    def capacity(self) -> int:
        return self.max_length - SPECIAL

    @cached_property
    def chunk_ends(self) -> NDArray[np.int64]:
        """How many chunks there are up to and with each document."""
        lengths = self.corpus.document_tokens[self.documents].astype(np.int64)
        return np.cumsum((lengths + self.capacity - 1) // self.capacity)

    def __len__(self) -> int:
        return int(self.chunk_ends[-1])

    def pairs(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> list[Pair]:
        """The pairs of some chunks, each in its epoch."""
        places = np.searchsorted(self.chunk_ends, indices, side="right")
        chunks = indices - np.where(places > 0, self.chunk_ends[places - 1], 0)
        shifts = draws.below(self.capacity, self.seed, epochs, places, SHIFT)
        words = draws.key(self.seed, epochs[:, None], indices[:, None], np.arange(NUM_WORDS))
        rows = zip(places.tolist(), chunks.tolist(), shifts.tolist(), words.tolist(), strict=True)
        return [self._pair(*row) for row in rows]

    def _pair(self, place: int, chunk: int, shift: int, words: list[int]) -> Pair:
        """A pair out of its draws: 32-bit words, of which the first few are used as numbers, the rest as bits."""
        u = [word / 2**32 for word in words[:6]]
        tokens, starts, begin, end = self.corpus.place(int(self.documents[place]))
        origin, length = int(starts[begin]), int(starts[end]) - int(starts[begin])
        target = self.capacity if u[0] >= self.short_share else 2 + int(u[1] * (self.capacity - 1))
        start = chunk * self.capacity
        if length > self.capacity:  # a long document: its chunks lie elsewhere in every epoch
            start = min(max(0, start + shift - self.capacity // 2), length - self.capacity)
        bounds = _sentences_from(starts, begin, end, origin + start, target)
        cut = _division(bounds, u[2])
        is_next = u[3] < 0.5 and cut < bounds[-1]
        first = tokens[bounds[0] : cut]
        second = tokens[cut : bounds[-1]] if is_next else self._random_segment(place, target - len(first), u[4], u[5])
        coins = int.from_bytes(np.array(words[6:], dtype=np.uint32).tobytes(), "little")
        return Pair(*truncate(first, second, target, coins), is_next)

    def _random_segment(self, place: int, length: int, u: float, v: float) -> Ids:
        """Whole sentences from a random one of a random other document on."""
        other = int(u * (len(self.documents) - 1))
        tokens, starts, begin, end = self.corpus.place(int(self.documents[other + (other >= place)]))
        bounds = _sentences_from(starts, begin, end, int(starts[begin + int(v * (end - begin))]), max(1, length))
        return tokens[bounds[0] : bounds[-1]]


def _sentences_from(starts: Ids, begin: int, end: int, token: int, length: int) -> list[int]:
    """Bounds of the sentences `begin` to `end` from the one that holds a token on, until the length is reached."""
    first = begin + int(starts[begin:end].searchsorted(token, "right")) - 1
    last = first + int(starts[first : end + 1].searchsorted(starts[first] + length, "left"))
    return starts[first : min(last, end) + 1].tolist()


def _division(bounds: list[int], u: float) -> int:
    """Where the first segment ends: at a random sentence, or inside the only one, so that labels stay balanced."""
    if len(bounds) > 2:
        return bounds[1 + int(u * (len(bounds) - 2))]
    length = bounds[1] - bounds[0]
    return bounds[0] + (1 + int(u * (length - 1)) if length > 1 else 1)


def truncate(first: Ids, second: Ids, limit: int, coins: int) -> tuple[Ids, Ids]:
    """Shorten the longer segment until both fit, each token taken from the front or the back as a coin falls.

    `coins` is a whole number whose bits are the coins. The longer one is levelled first, then both lose in turn:
    the same lengths as dropping one token at a time.
    """
    excess = len(first) + len(second) - limit
    if excess <= 0:
        return first, second
    difference = len(first) - len(second)
    from_first = min(max(difference, 0), excess)
    from_second = min(max(-difference, 0), excess)
    rest = excess - from_first - from_second
    from_first, from_second = from_first + rest // 2, from_second + rest - rest // 2
    return _cut(first, from_first, coins), _cut(second, from_second, coins >> from_first)


def _cut(tokens: Ids, count: int, coins: int) -> Ids:
    front = (coins & ((1 << count) - 1)).bit_count()
    return tokens[front : len(tokens) - (count - front)]
