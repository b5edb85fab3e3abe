"""Borders of morphemes in Korean words, for vocabularies whose entries end there: 학교 + 에서, 짧 + 았다.

An analyser (Kiwi) is used while a vocabulary is trained, and never after: the vocabulary learns no entry that crosses a
border, so a plain tokenizer divides most words there. Words are analysed one by one, without their sentence, so that
the same word always has the same borders.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

from tokenizers import normalizers

from bertsmith.errors import UserError
from bertsmith.text.unmarked import HANGUL

BORDER = "\ue000"  # a private character; tokenizers drop it, and it is removed from the text itself
MOST_CHARACTERS = 1_000_000  # of distinct words, the most frequent ones, are analysed; this takes about a minute
RUN = re.compile(r"\w+")
# Particles, endings, suffixes and the copula, by their tags in the Sejong scheme.
BOUND = ("J", "E", "XS", "VCP")
Analyse = Callable[[list[str]], Iterable[list[int]]]


@dataclass(frozen=True, eq=False)
class Bordered:
    """Texts with the borders of morphemes in their Korean words; words that were not analysed are left out."""

    texts: Iterable[str]
    words: Mapping[str, str]  # the analysed words, with their borders

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            yield RUN.sub(self._bordered, _composed(text).replace(BORDER, ""))

    def _bordered(self, found: re.Match[str]) -> str:
        word = found[0]
        return self.words.get(word) or (" " if HANGUL.search(word) else word)


def bordered(texts: Iterable[str], analyser: str) -> Bordered:
    """Find the morphemes of the most frequent Korean words of texts."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word in RUN.findall(_composed(text)) if HANGUL.search(word))
    words, size = [], 0
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        size += len(word)
        if size > MOST_CHARACTERS:
            break
        words.append(word)
    if not words:
        raise UserError(f"--morphemes {analyser} divides Korean words, and the text has none")
    borders = open_analyser(analyser)(words)
    return Bordered(texts, {word: divided(word, places) for word, places in zip(words, borders, strict=True)})


def _composed(text: str) -> str:
    """A text in NFC, because text from macOS has its syllables as jamo (NFD), which no analyser knows."""
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def divided(word: str, places: Iterable[int]) -> str:
    """A word with a border at each of these places."""
    cuts = [0, *sorted(places), len(word)]
    return BORDER.join(word[a:b] for a, b in pairwise(cuts))


def open_analyser(name: str) -> Analyse:
    """The analyser of a name, which returns the places of the borders in each word."""
    if name != "kiwi":
        raise UserError(f"--morphemes {name!r} is not one of kiwi")
    try:
        from kiwipiepy import Kiwi
    except ImportError:
        raise UserError("--morphemes kiwi needs kiwipiepy: pip install 'bertsmith[korean]'") from None
    kiwi = Kiwi()
    return lambda words: map(borders, kiwi.tokenize(words))


def borders(morphemes: Iterable[Any]) -> list[int]:
    """Where particles, endings and suffixes begin; one that shares a syllable with its stem (했, 간) has no border."""
    found, end = [], 0
    for morpheme in morphemes:
        if morpheme.tag.startswith(BOUND) and morpheme.start >= end > 0:
            found.append(morpheme.start)
        end = max(end, morpheme.end)
    return found


def segments(texts: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Count the runs of letters and digits of texts, each divided into its morphemes."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(SEGMENTED.findall(text))
    return Counter({tuple(word.split(BORDER)): count for word, count in counts.items()})


@dataclass(frozen=True)
class Segment:
    """A part of a word that is tokenised alone or, if it continues the part before it, with that."""

    text: str
    continues: bool


def continued(word: tuple[str, ...], normal: normalizers.Normalizer) -> Iterator[Segment]:
    """The morphemes of a word after normalisation, which may put spaces into it (around ideographs)."""
    open_word = False
    for morpheme in word:
        text = normal.normalize_str(morpheme)
        for number, part in enumerate(text.split()):
            yield Segment(part, open_word and number == 0 and not text[0].isspace())
        open_word = bool(text) and not text[-1].isspace()


SEGMENTED = re.compile(rf"[\w{BORDER}]+")


def repeated(words: Mapping[str, int]) -> Iterator[str]:
    """Lines in which each word occurs as often as it was counted."""
    for word, count in words.items():
        for begin in range(0, count, 1000):
            yield " ".join(repeat(word, min(1000, count - begin)))
