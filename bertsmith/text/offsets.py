"""Character offsets of tokens that never split a letter.

A letter may be several characters: a Hangul syllable as jamo, a vowel with its accents, an emoji with a skin tone. The
tokenizers library composes or drops some of them, and its offsets then end at the first character of the last letter.
Here a token covers all characters of every letter that it touches, so an answer is never cut inside a letter, and
decomposed text has the offsets of the same letters as composed text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import Encoding

JOINERS = "\u200c\u200d"  # zero-width (non-)joiners: inside Persian and Indic words, and inside emoji
SKIN_TONES = "\U0001f3fb-\U0001f3ff"
HALF_WIDTH_MARKS = "\uff9e\uff9f"  # of half-width katakana: voiced, half-voiced
FLAG = "[\U0001f1e6-\U0001f1ff]"  # two regional indicators are one flag
PICTURE = "[\u2190-\u2bff\U0001f000-\U0001faff]"
Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Aligned:
    """The tokens of a text with their ids, character offsets and word numbers."""

    text: str
    encoding: Encoding
    ids: list[int]
    folds_repeats: bool = False  # whether the tokenizer drops repeated marks: ㅋㅋㅋㅋ

    @property
    def tokens(self) -> list[str]:
        return self.encoding.tokens

    @property
    def word_ids(self) -> list[int | None]:
        return self.encoding.word_ids

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """The first and the end character of each token, extended to whole letters and to repeated marks."""
        offsets = whole_letters(self.text, self.encoding.offsets)
        return with_repeats(self.text, offsets) if self.folds_repeats else offsets


def whole_letters(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Extend offsets to the whole of every letter that they touch."""
    letters = [] if text.isascii() else [found.span() for found in letter_pattern().finditer(text)]
    if not letters:
        return list(offsets)
    begins, ends = np.arange(len(text)), np.arange(1, len(text) + 1)
    for begin, end in letters:
        begins[begin:end], ends[begin:end] = begin, end
    return [(int(begins[a]), int(ends[b - 1])) if a < b else (a, b) for a, b in offsets]


def with_repeats(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Extend tokens to the dropped marks before them: of a repeated mark, the last ones were kept."""
    found, covered = [], 0
    for begin, end in offsets:
        while covered < begin < len(text) and text[begin - 1] == text[begin]:
            begin -= 1
        found.append((begin, end))
        covered = max(covered, end)
    return found


@cache
def letter_pattern() -> re.Pattern[str]:
    """A pattern for letters of several characters."""
    joined = f"\u200d{PICTURE}|[{marks()}{SKIN_TONES}{HALF_WIDTH_MARKS}\u1160-\u11ff\ud7b0-\ud7ff]"
    return re.compile(rf"{FLAG}{{2}}|\S(?:{joined})+")


@cache
def marks() -> str:
    """The combining characters, which belong to the character before them: vowel signs, accents, tones, joiners."""
    signs = map(chr, (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)))  # other ranges hold no marks
    return "".join(sign for sign in signs if unicodedata.category(sign).startswith("M") or sign in JOINERS)
