"""Where tokens stand in their text, in whole letters.

A letter may be several characters: a Hangul syllable as jamo, a vowel with its accents, an emoji with a skin tone. The
tokenizer composes or drops some of them, and then counts a token to the first character of its last letter alone. Here
a token covers all characters of every letter that it touches, so an answer is never cut inside one, and decomposed
text has the offsets of the same letters as composed text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import Encoding

JOINERS = "\u200c\u200d"  # stand inside words of Persian and of India's languages, and inside emoji
SKIN_TONES = "\U0001f3fb-\U0001f3ff"
FLAG = "[\U0001f1e6-\U0001f1ff]"  # two letters of this kind are one flag
PICTURE = "[\u2190-\u2bff\U0001f000-\U0001faff]"
Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Aligned:
    """The tokens of a text, each with its characters and the word that it belongs to."""

    text: str
    encoding: Encoding

    @property
    def ids(self) -> list[int]:
        return self.encoding.ids

    @property
    def tokens(self) -> list[str]:
        return self.encoding.tokens

    @property
    def word_ids(self) -> list[int | None]:
        return self.encoding.word_ids

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Where each token begins and ends, in characters of the text and in whole letters."""
        return whole_letters(self.text, self.encoding.offsets)


def whole_letters(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Offsets that cover every letter whole that they touch."""
    letters = [] if text.isascii() else [found.span() for found in letter_pattern().finditer(text)]
    if not letters:
        return list(offsets)
    begins, ends = np.arange(len(text)), np.arange(1, len(text) + 1)
    for begin, end in letters:
        begins[begin:end], ends[begin:end] = begin, end
    return [(int(begins[a]), int(ends[b - 1])) if a < b else (a, b) for a, b in offsets]


@cache
def letter_pattern() -> re.Pattern[str]:
    """The letters that are written with several characters."""
    joined = f"\u200d{PICTURE}|[{marks()}{SKIN_TONES}\u1160-\u11ff\ud7b0-\ud7ff]"
    return re.compile(rf"{FLAG}{{2}}|\S(?:{joined})+")


@cache
def marks() -> str:
    """The characters that belong to the one before them: vowel signs, accents, tones, and the joiners."""
    signs = map(chr, (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)))  # no others hold marks
    return "".join(sign for sign in signs if unicodedata.category(sign).startswith("M") or sign in JOINERS)
