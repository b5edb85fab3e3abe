"""Examples as flat arrays of concatenated tokens, from which a batch is gathered without a loop.

T tokens in all, n examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from bertsmith.batch import CHARACTERS, IGNORE, ROWS, Batch, Example, Label, LabelKind, lay_out
from bertsmith.model.config import Direction
from bertsmith.objectives.causal_lm import MASKED, next_tokens
from bertsmith.objectives.causal_lm import TARGET as NEXT
from bertsmith.text.spelling import PADDING, Characters
from bertsmith.text.tokenizer import Tokenizer

AT_ONCE = 16384  # texts per call of the tokenizer: its output takes much more memory than the tokens

TARGET = LabelKind("sequence", loss="task")  # `label`: a class, a number, a row of numbers, or a (start, end) span
TAG = LabelKind("token", fill=IGNORE, loss="task")  # `tags`: a class per token, IGNORE where there is none
SOFT, SOFT_TOKEN = LabelKind("sequence"), LabelKind("token", fill=0)  # `soft`: the logits of a teacher
# `words`: the first token of each word that is predicted, the other tokens being context; `sentences`: those of them
# that start a sentence.
WORD = LabelKind("position", index=True)
ROW = LabelKind("sequence")  # `rows`: the row that each sequence, a window of its text, belongs to
SPELLING = LabelKind("token", fill=PADDING)  # the characters of every token


@dataclass(frozen=True)
class Spelling:
    """The characters of words: every distinct word once, and which of them each token is."""

    places: NDArray[np.int32]  # (T,)
    words: Characters  # (N, C)

    def at(self, tokens: Any) -> dict[str, Label]:
        """The label with the characters of some tokens (n, C)."""
        return {CHARACTERS: Label(self.words[self.places[tokens]], SPELLING)}


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """Concatenated examples: number i has the tokens from `starts[i]` to `starts[i + 1]`.

    If `step` examples belong together, as the endings of a question do, the first of them has the label. With `rows`,
    row i has the examples from `rows[i]` to `rows[i + 1]`, the windows of a text, and one label. `soft` are a teacher's
    logits, for each label or for each token. With `names_words` batches name the tokens that are tagged.
    """

    tokens: NDArray[np.int32]  # (T,)
    segments: NDArray[np.uint8]  # (T,)
    starts: NDArray[np.int64]  # (n + 1,)
    labels: NDArray[Any] | None = None  # (n / step, …)
    tags: NDArray[np.int32] | None = None  # (T,)
    step: int = 1
    word_marks: NDArray[np.uint8] | None = None  # (T,) 1 at the first token of a word, 2 where it starts a sentence
    soft: Label | None = None  # (n / step, K) or (T, K)
    predicted: Direction | None = None  # the direction of a language model that learns the texts; None: there is none
    spelling: Spelling | None = None  # for encoders that read characters
    names_words: bool = False  # for a BiLSTM on them
    rows: NDArray[np.int64] | None = None  # (number of rows + 1,); None: a row is `step` examples

    @classmethod
    def of(cls, examples: Sequence[Example], step: int = 1) -> Examples:
        """Concatenate single examples."""
        if isinstance(examples, Examples):
            return examples
        first = examples[0] if examples else Example(np.zeros(0), np.zeros(0))
        labels = [e.labels["label"].values for e in examples[::step]] if "label" in first.labels else None
        tags = [e.labels["tags"].values for e in examples] if "tags" in first.labels else None
        return cls(
            joined([e.tokens for e in examples], np.int32),
            joined([e.segments for e in examples], np.uint8),
            starts_of([len(e.tokens) for e in examples]),
            None if labels is None else np.asarray(labels),
            None if tags is None else joined(tags, np.int32),
            step,
            joined([_marks(e) for e in examples], np.uint8) if "words" in first.labels else None,
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, number: int) -> Example: ...
    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...
    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        place = slice(self.starts[number], self.starts[number + 1])
        labels = {}
        if self.labels is not None and self.rows is None and number % self.step == 0:
            labels["label"] = Label(self.labels[number // self.step], TARGET)
        if self.tags is not None:
            labels["tags"] = Label(self.tags[place], TAG)
        if self.word_marks is not None:
            labels |= _word_labels(self.word_marks[place])
        if self.spelling is not None:
            labels |= self.spelling.at(place)
        return Example(self.tokens[place], self.segments[place], labels)

    @property
    def num_rows(self) -> int:
        """The number of rows, each of which may be several examples."""
        return len(self) // self.step if self.rows is None else len(self.rows) - 1

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Rows as a packed batch to learn from, as `collate` makes it."""
        counts = self.step if self.rows is None else self.rows[rows + 1] - self.rows[rows]
        firsts = rows * self.step if self.rows is None else self.rows[rows]
        owners = np.repeat(np.arange(len(rows)), counts)
        chosen = firsts[owners] + _ranges(np.broadcast_to(counts, len(rows)))
        begins = self.starts[chosen]
        lengths = self.starts[chosen + 1] - begins
        shifts = begins - lengths.cumsum() + lengths  # from a token's place in the batch to its place here
        source = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        batch = lay_out(self.tokens[source], self.segments[source], lengths, packed=True)
        labels = {} if self.rows is None else {ROWS: Label(owners, ROW)}
        if self.labels is not None:
            labels["label"] = Label(self.labels[rows], TARGET)
        if self.tags is not None:
            labels["tags"] = Label(self.tags[source], TAG)
        if self.soft is not None:
            labels["soft"] = replace(self.soft, values=self.soft.values[rows if self.soft.kind == SOFT else source])
        if self.predicted is not None:
            places, targets = next_tokens(self.tokens[source], lengths, self.predicted)
            labels |= {"masked": Label(places, MASKED), "targets": Label(targets, replace(NEXT, loss="lm"))}
        if self.spelling is not None:
            labels |= self.spelling.at(source)
        if self.names_words and self.word_marks is not None:
            labels |= _word_labels(self.word_marks[source])
        return replace(batch.with_labels(labels), indices=rows)


def _marks(example: Example) -> NDArray[np.uint8]:
    marks = np.zeros(len(example.tokens), dtype=np.uint8)
    marks[example.labels["words"].values] = 1
    marks[example.labels["sentences"].values] = 2
    return marks


def _word_labels(marks: NDArray[np.uint8]) -> dict[str, Label]:
    found = {"words": 1, "sentences": 2}
    return {name: Label(np.flatnonzero(marks >= least), WORD) for name, least in found.items()}


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Concatenated arrays; an empty one for an empty list."""
    return np.concatenate(parts).astype(dtype) if len(parts) else np.zeros(0, dtype)


def starts_of(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """The start of each part, given their lengths, and the end of the last one."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


@dataclass(frozen=True)
class Texts:
    """The concatenated tokens of texts, with the start and the length of each."""

    tokens: NDArray[np.int32]  # (T,)
    begins: NDArray[np.int64]  # (n,)
    lengths: NDArray[np.int64]  # (n,)

    def at(self, places: NDArray[np.int64]) -> Texts:
        """A selection of the texts, in which a text may occur several times."""
        return Texts(self.tokens, self.begins[places], self.lengths[places])


def texts_of(texts: Sequence[str], tokenizer: Tokenizer) -> Texts:
    """The tokens of texts, encoded by the library on all cores; equal texts are encoded once."""
    numbers: dict[str, int] = {}
    places = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    distinct, tokens, lengths = list(numbers), [], list[int]()
    for begin in range(0, len(distinct), AT_ONCE):
        ids = tokenizer.encode(distinct[begin : begin + AT_ONCE])
        lengths += map(len, ids)
        tokens.append(np.fromiter(chain.from_iterable(ids), np.int32, sum(lengths[begin:])))
    whole = Texts(joined(tokens, np.int32), starts_of(lengths)[:-1], np.array(lengths, dtype=np.int64))
    return whole.at(places)


def join_texts(
    first: Texts, second: Texts, has_second: NDArray[np.bool_], tokenizer: Tokenizer, max_length: int
) -> tuple[Examples, NDArray[np.bool_]]:
    """Examples of one text or, where there is a second one, of a pair; and which of them had to be shortened."""
    special = np.where(has_second, tokenizer.frame.size(2), tokenizer.frame.size(1))
    kept_first, kept_second = shorten(first.lengths, second.lengths, max_length - special, has_second)
    is_part = np.stack([np.ones_like(has_second), has_second], axis=1)  # (n, 2)
    sizes = np.stack([kept_first, kept_second], axis=1)[is_part]
    begins = np.stack([first.begins, len(first.tokens) + second.begins], axis=1)[is_part]
    source = np.concatenate([first.tokens, second.tokens])
    tokens = source[_ranges(sizes) + np.repeat(begins, sizes)]
    joined = tokenizer.joiner.join_many(tokens, sizes, 1 + has_second)
    examples = Examples(joined.tokens, joined.segments.astype(np.uint8), starts_of(joined.lengths))
    return examples, (kept_first < first.lengths) | (kept_second < second.lengths)


def shorten(
    first: NDArray[Any], second: NDArray[Any], room: NDArray[Any], has_second: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The lengths after truncation: the end of a text is cut, for a pair that of the longer text.

    If both texts of a pair are cut, and the room is odd, the first one keeps one token more, as in the released code
    of BERT, ALBERT and ELECTRA and in the Python tokenizers of `transformers`; those in Rust give it to the longer one.
    """
    kept = np.where(has_second, np.minimum(second, np.maximum(room - first, room // 2)), 0)
    return np.minimum(first, room - kept), kept


def _ranges(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The concatenated ranges 0, 1, … up to each length."""
    starts = starts_of(lengths)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
