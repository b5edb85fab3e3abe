"""The characters of words, as ELMo reads them: the bytes of UTF-8 between a begin and an end, in a row of fixed length.

W words, C characters of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bertsmith.text.frame import Frame

WORD_LENGTH = 50  # characters of a row, with the begin and the end; longer words are cut (the released settings)
BEGIN_TEXT, END_TEXT, BEGIN_WORD, END_WORD, PADDING = range(256, 261)  # after the 256 bytes
NUM_CHARACTERS = 261
Characters = NDArray[np.int16]


@dataclass(frozen=True)
class NewWords:
    """Words outside a vocabulary, numbered in the order in which they were met, and their characters."""

    numbers: dict[str, int] = field(default_factory=dict)
    rows: list[Characters] = field(default_factory=list)

    def number(self, word: str) -> int:
        """The number of a word, from 0."""
        if word not in self.numbers:
            self.numbers[word] = len(self.rows)
            self.rows.append(spell([word])[0])
        return self.numbers[word]


def spell(words: Iterable[str]) -> Characters:
    """The characters of words (W, C)."""
    return _rows([list(word.encode("utf-8")) for word in words])


def spell_vocabulary(tokens: Sequence[str], frame: Frame) -> Characters:
    """The characters of every token of a vocabulary (V, C), as it writes them.

    The special tokens at the begin and at the end of a text have a character of their own; padding has none.
    """
    rows = [list(token.encode("utf-8")) for token in tokens]
    ends = {name: [END_TEXT] for name in (*frame.between, *frame.last)}
    special = {**ends, **{name: [BEGIN_TEXT] for name in frame.first}}
    found = _rows([special.get(token, row) for token, row in zip(tokens, rows, strict=True)])
    found[[token == frame.pad for token in tokens]] = PADDING
    return found


def _rows(words: Sequence[list[int]]) -> Characters:
    found = np.full((len(words), WORD_LENGTH), PADDING, dtype=np.int16)
    for row, word in zip(found, words, strict=True):
        letters = [BEGIN_WORD, *word[: WORD_LENGTH - 2], END_WORD]
        row[: len(letters)] = letters
    return found
