"""The text of sequences: segment pairs (BERT paper, section 3.1 and appendix A.2; ALBERT's), or text in one segment.

An index names a chunk of about one sequence's tokens; every epoch shifts the chunks. For pairs, each document is
divided into chunks, and random draws decide whether the second segment is the next or a random one (or whether the two
are swapped), how long the sequence is, and where it is divided. For text in one segment, all documents are concatenated
and then divided, and some sequences may be shortened. Everything is a pure function of (seed, epoch, index).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.text.frame import WORDPIECE, Frame

PairKind = Literal["next", "order", "full", "varied", "contiguous"]
ONE_SEGMENT = ("full", "varied", "contiguous")  # kinds without pairs
SHIFT, SHORT = 108, 112  # streams of draws
NUM_WORDS = 6 + 32  # six numbers and 1024 random bits, more than the truncation of a sequence uses
Ids = NDArray[Any]


@dataclass(frozen=True)
class Sample:
    """The parts of text of a sequence, without special tokens, and the label of a pair."""

    parts: tuple[Ids, ...]
    segments: tuple[int, ...]  # of each part
    label: int | None = None


@dataclass(frozen=True)
class Pair:
    """Two segments and whether the second follows the first in its document (else: a random one, or swapped)."""

    first: Ids
    second: Ids
    is_next: bool


@dataclass(frozen=True, eq=False)
class PairSource:
    """Segment pairs from some documents of a corpus.

    In half of the pairs the second segment follows the first. In the others it is a random one (kind "next", BERT) or
    the two are swapped (kind "order", sentence-order prediction: ALBERT, Lan et al. 2020, section 3.1).
    """

    corpus: Corpus
    documents: NDArray[np.int64]
    max_length: int
    short_share: float = 0.1
    seed: int = 0
    kind: Literal["next", "order"] = "next"
    frame: Frame = WORDPIECE

    def __post_init__(self) -> None:
        if self.capacity < 2:
            least = self.frame.size(2) + 2
            raise UserError(f"data.max_length {self.max_length} leaves no room for two segments; at least {least}")
        if self.kind == "next" and len(self.documents) < 2:
            raise UserError(
                f"{self.corpus.folder} gives {len(self.documents)} document(s) to draw pairs from, and a random "
                "segment comes from another document: separate documents by a blank line, or set data.pairs=full with "
                "objective.next_sentence=false"
            )
        if len(self) == 0:
            raise UserError(f"{self.corpus.folder} gives no document of two or more tokens to draw pairs from")

    @property
    def capacity(self) -> int:
        return self.max_length - self.frame.size(2)

    @cached_property
    def chunk_ends(self) -> NDArray[np.int64]:
        """The cumulative number of chunks after each document."""
        lengths = self.corpus.document_tokens[self.documents].astype(np.int64)
        chunks = (lengths + self.capacity - 1) // self.capacity
        if self.kind == "order":
            chunks[lengths < 2] = 0  # one token has no order
        return np.cumsum(chunks)

    def __len__(self) -> int:
        return int(self.chunk_ends[-1]) if len(self.documents) else 0

    def samples(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> list[Sample]:
        """The sequences of some chunks, each in its epoch: label 0 where the second segment follows the first."""
        segments = self.frame.segments_of(2)
        return [Sample((p.first, p.second), segments, int(not p.is_next)) for p in self.pairs(epochs, indices)]

    def pairs(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> list[Pair]:
        """The pairs of some chunks, each in its epoch."""
        places = np.searchsorted(self.chunk_ends, indices, side="right")
        chunks = indices - np.where(places > 0, self.chunk_ends[places - 1], 0)
        shifts = draws.below(self.capacity, self.seed, epochs, places, SHIFT)
        words = draws.key(self.seed, epochs[:, None], indices[:, None], np.arange(NUM_WORDS))
        rows = zip(places.tolist(), chunks.tolist(), shifts.tolist(), words.tolist(), strict=True)
        return [self._pair(*row) for row in rows]

    def _pair(self, place: int, chunk: int, shift: int, words: list[int]) -> Pair:
        """A pair from its random 32-bit numbers: the first six are used as fractions, the others as bits."""
        u = [word / 2**32 for word in words[:6]]
        tokens, starts, begin, end = self.corpus.place(int(self.documents[place]))
        origin, length = int(starts[begin]), int(starts[end]) - int(starts[begin])
        target = self.capacity if u[0] >= self.short_share else 2 + int(u[1] * (self.capacity - 1))
        start = chunk * self.capacity
        if length > self.capacity:  # the chunks of a long document are shifted in every epoch
            start = min(max(0, start + shift - self.capacity // 2), length - self.capacity)
        bounds = _sentences_from(starts, begin, end, origin + start, target)
        if self.kind == "order" and bounds[-1] - bounds[0] == 1:  # the last token of a document, and a whole sentence
            bounds.insert(0, int(starts[end - 2]))
        cut = _division(bounds, u[2])
        is_next = u[3] < 0.5 and cut < bounds[-1]
        first, second = tokens[bounds[0] : cut], tokens[cut : bounds[-1]]
        if self.kind == "next" and not is_next:
            second = self._random_segment(place, target - len(first), u[4], u[5])
        elif not is_next:
            first, second = second, first  # before truncation, which may drop one token more of the second
        coins = int.from_bytes(np.array(words[6:], dtype=np.uint32).tobytes(), "little")
        return Pair(*truncate(first, second, target, coins), is_next)

    def _random_segment(self, place: int, length: int, u: float, v: float) -> Ids:
        """Whole sentences of a random other document, starting with a random one."""
        other = int(u * (len(self.documents) - 1))
        tokens, starts, begin, end = self.corpus.place(int(self.documents[other + (other >= place)]))
        bounds = _sentences_from(starts, begin, end, int(starts[begin + int(v * (end - begin))]), max(1, length))
        return tokens[bounds[0] : bounds[-1]]


@dataclass(frozen=True, eq=False)
class FullSource:
    """Full sentences of some concatenated documents (FULL-SENTENCES: RoBERTa, Liu et al. 2019, section 4.2).

    A sequence has one segment. It begins with a sentence and is filled to the end, over the ends of documents, with an
    extra separator between two of them; the last document is followed by the first. Its last sentence is cut, unless
    its part would be less than a twentieth of the sequence: then the sequence ends before it. Without
    `whole_sentences`, a sequence begins and ends anywhere (contiguous text: OpenAI GPT, Radford et al. 2018, section
    4.1).

    As in RoBERTa, there are no short sequences unless a `short_share` is given: then this share of the sequences is
    shortened to whole sentences of one document, until a random length is reached.
    """

    corpus: Corpus
    documents: NDArray[np.int64]
    max_length: int
    seed: int = 0
    frame: Frame = WORDPIECE
    whole_sentences: bool = True
    short_share: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            least = self.frame.size(1) + 1
            raise UserError(f"data.max_length {self.max_length} leaves no room for text; at least {least}")
        if len(self.documents) == 0:
            raise UserError(f"{self.corpus.folder} gives no documents to draw sentences from")

    @property
    def capacity(self) -> int:
        return self.max_length - self.frame.size(1)

    @property
    def separators(self) -> int:
        """The number of special tokens between two documents."""
        return len(self.frame.between)

    @cached_property
    def document_ends(self) -> NDArray[np.int64]:
        """The end of each document when all are concatenated, with a separator before each."""
        return np.cumsum(self.separators + self.corpus.document_tokens[self.documents].astype(np.int64))

    def __len__(self) -> int:
        return -(-int(self.document_ends[-1]) // self.capacity)

    def samples(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> list[Sample]:
        """The sequences of some chunks, each in its epoch; without labels."""
        shifts = draws.below(self.capacity, self.seed, epochs, SHIFT)
        tokens = (indices * self.capacity + shifts) % self.document_ends[-1]
        places = np.searchsorted(self.document_ends, tokens, side="right")
        offsets = tokens - np.where(places > 0, self.document_ends[places - 1], 0) - self.separators
        rows = places.tolist(), np.maximum(offsets, 0).tolist(), self._lengths(epochs, indices).tolist()
        return [self._sample(*row) for row in zip(*rows, strict=True)]

    def _lengths(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The length to which each sequence is shortened; 0: it is not."""
        if not self.short_share:
            return np.zeros(len(indices), dtype=np.int64)
        shortened = draws.uniform(self.seed, epochs, indices, SHORT) < self.short_share
        return np.where(shortened, 1 + draws.below(self.capacity, self.seed, epochs, indices, SHORT, 1), 0)

    def _sample(self, place: int, offset: int, length: int) -> Sample:
        """The sequence that begins with the sentence that holds a token of a document, perhaps with a length."""
        tokens, starts, first, last = self.corpus.place(int(self.documents[place]))
        token = int(starts[first]) + offset
        sentence = _sentence_of(starts, first, last, token)
        start, size = int(starts[sentence]), int(starts[sentence + 1] - starts[sentence])
        piece = -(-size // -(-size // self.capacity))  # a sentence longer than a sequence is divided evenly
        begin = token - (token - start) % piece if self.whole_sentences else token
        if length:
            end = _sentences_from(starts, first, last, begin, length)[-1]
            return Sample((tokens[begin : min(end, begin + self.capacity)],), self.frame.segments[:1])
        room = min(
            self.capacity, int(self.document_ends[-1]) - self.separators
        )  # at most the whole corpus: no token occurs twice
        parts = []
        while room > 0:
            end = int(starts[last])
            stop = min(end, begin + room)
            if stop < end and self.whole_sentences:
                start = int(starts[_sentence_of(starts, first, last, stop)])
                stop = start if stop - start < self.capacity // 20 else stop
            if stop > begin:
                parts.append(tokens[begin:stop])
            if stop < end:
                break
            room -= stop - begin + self.separators
            place = (place + 1) % len(self.documents)
            tokens, starts, first, last = self.corpus.place(int(self.documents[place]))
            begin = int(starts[first])
        return Sample(tuple(parts), self.frame.segments[:1] * len(parts))


SegmentSource = PairSource | FullSource


def segment_source(
    kind: PairKind,
    corpus: Corpus,
    documents: NDArray[np.int64],
    max_length: int,
    short_share: float,
    seed: int,
    frame: Frame = WORDPIECE,
) -> SegmentSource:
    """The source of the sequences of some documents, by `data.pairs`."""
    if kind == "next" or kind == "order":
        return PairSource(corpus, documents, max_length, short_share, seed, kind, frame)
    short_share = short_share if kind == "varied" else 0.0
    return FullSource(corpus, documents, max_length, seed, frame, kind != "contiguous", short_share)


def _sentence_of(starts: Ids, begin: int, end: int, token: int) -> int:
    """The number of the sentence, among `begin` to `end`, that contains a token."""
    return begin + int(starts[begin:end].searchsorted(token, "right")) - 1


def _sentences_from(starts: Ids, begin: int, end: int, token: int, length: int) -> list[int]:
    """Bounds of the sentences from the one that contains a token on, until the length or sentence `end` is reached."""
    first = _sentence_of(starts, begin, end, token)
    last = first + int(starts[first : end + 1].searchsorted(starts[first] + length, "left"))
    return starts[first : min(last, end) + 1].tolist()


def _division(bounds: list[int], u: float) -> int:
    """The end of the first segment: after a random sentence, or inside the only one, so that labels stay balanced."""
    if len(bounds) > 2:
        return bounds[1 + int(u * (len(bounds) - 2))]
    length = bounds[1] - bounds[0]
    return bounds[0] + (1 + int(u * (length - 1)) if length > 1 else 1)


def truncate(first: Ids, second: Ids, limit: int, coins: int) -> tuple[Ids, Ids]:
    """Drop tokens of the longer segment until both fit, each from the front or from the back at random.

    The bits of `coins` decide between front and back. The longer segment is first cut to the length of the shorter one,
    then both lose tokens in turn: the lengths are those of dropping one token at a time.
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
