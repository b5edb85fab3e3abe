"""How texts become sequences: the special tokens around and between them, their segment numbers, the pieces of words.

A sequence is made of one part of text or of several. P parts of n sequences, T tokens in all.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SHOWN_MASK = "[MASK]"  # how a masked word is shown to the user, whatever the tokenizer's mask token is
Ids = Sequence[int] | NDArray[Any]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class WordMarker:
    """How the pieces of one word are recognised: by a marker on its first piece, its last one, or all but the first."""

    text: str
    on: Literal["first", "last", "continuations"]

    def marks(self, token: str) -> bool:
        """Whether a token carries the marker: at its end if it marks last pieces, else at its beginning."""
        return token.endswith(self.text) if self.on == "last" else token.startswith(self.text)

    def strip(self, token: str) -> str:
        """A token without its marker."""
        return token.removesuffix(self.text) if self.on == "last" else token.removeprefix(self.text)

    def once_per_word(self, marked: Flags) -> Flags:
        """Which tokens occur exactly once in every word, by whether they are marked."""
        return ~marked if self.on == "continuations" else marked

    def continues(self, marked: Flags) -> Flags:
        """Which tokens of a text continue the word of the token before them, by whether they are marked (T,)."""
        if self.on == "last":
            return np.concatenate([[False], ~marked[:-1]]) if len(marked) else marked
        return marked if self.on == "continuations" else ~marked

    def spell(self, tokens: Sequence[str]) -> str:
        """The words of a text's tokens, with a space between two words."""
        if self.on == "continuations":
            return " ".join(tokens).replace(f" {self.text}", "")
        return "".join(tokens).replace(self.text, " ").strip()


_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")  # and kana
_LETTER = re.compile("[^\\W_]|\ufffd")  # a letter, a digit, or bytes that are part of a character


def has_letter(text: str) -> bool:
    """Whether a token has a letter or a digit, or is part of a character."""
    return _LETTER.search(text) is not None


def stands_alone(text: str) -> bool:
    """Whether a token is a word although no space is before it: punctuation, or one that begins with an ideograph."""
    if _IDEOGRAPH.match(text) is not None:
        return True
    signs = [character for character in text if not unicodedata.category(character).startswith("M")]  # no accents
    return bool(signs) and not has_letter(text)


@dataclass(frozen=True)
class Frame:
    """The special tokens of a sequence, by name, and the segment number of each of its parts.

    The tokens `first` come before the first part and belong to it; those `between` two parts and the `last` ones
    belong to the part before them. `segments` are the numbers of the first part, the second one and so on; parts
    beyond them have the last number.
    """

    first: tuple[str, ...]
    between: tuple[str, ...]
    last: tuple[str, ...]
    segments: tuple[int, ...]
    word_marker: WordMarker
    unknown: str
    pad: str | None = None
    mask: str | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token once."""
        names = (self.pad, self.unknown, *self.first, *self.between, *self.last, self.mask)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def size(self, parts: int) -> int:
        """The number of special tokens in a sequence with this number of parts."""
        return len(self.first) + (parts - 1) * len(self.between) + len(self.last)

    def segments_of(self, parts: int) -> tuple[int, ...]:
        """The segment number of each part in a sequence with this number of parts."""
        return (*self.segments[:parts], *self.segments[-1:] * (parts - len(self.segments)))

    def arrange(self, parts: Sequence[str]) -> list[tuple[str, int]]:
        """The names of parts with the special tokens around and between them, each with its segment number."""
        numbers = self.segments_of(len(parts))
        names = [(name, numbers[0]) for name in self.first]
        for i, (part, number) in enumerate(zip(parts, numbers, strict=True)):
            after = self.last if i == len(parts) - 1 else self.between
            names += [(name, number) for name in (part, *after)]
        return names


def wordpiece_frame(
    *, first: str = "[CLS]", last: str = "[SEP]", unknown: str = "[UNK]", pad: str = "[PAD]", mask: str = "[MASK]"
) -> Frame:
    """BERT's frame, `[CLS] a [SEP] b [SEP]` with two segments, perhaps with other names for its tokens."""
    marker = WordMarker("##", "continuations")
    return Frame((first,), (last,), (last,), (0, 1), marker, unknown, pad, mask)


WORDPIECE = wordpiece_frame()
# `<s> a </s></s> b </s>`, one segment (Liu et al. 2019).
ROBERTA = Frame(
    ("<s>",), ("</s>", "</s>"), ("</s>",), (0,), WordMarker("Ġ", "first"), unknown="<unk>", pad="<pad>", mask="<mask>"
)
# `[CLS] a [SEP] b [SEP]`, two segments, as in BERT, and SentencePiece's marker of words (Lan et al. 2020, section 4.1).
ALBERT = Frame(
    ("[CLS]",), ("[SEP]",), ("[SEP]",), (0, 1), WordMarker("▁", "first"), unknown="<unk>", pad="<pad>", mask="[MASK]"
)
# `[CLS] a [SEP] b [SEP]` with byte-level BPE, and with SentencePiece's marker (He et al. 2021, and its later versions).
DEBERTA = replace(wordpiece_frame(), word_marker=WordMarker("Ġ", "first"))
DEBERTA_V2 = replace(wordpiece_frame(), word_marker=WordMarker("▁", "first"))
# `<S> a </S> b </S>`, two segments; the names are those of ELMo's vocabulary (Peters et al. 2018).
WORDS = wordpiece_frame(first="<S>", last="</S>", unknown="<UNK>", pad="<PAD>", mask="<MASK>")
# Start, delimiter and extract tokens (Radford et al. 2018, section 3.3; the names are those of the released code);
# nothing is masked, and nothing padded. They are added for fine-tuning; before, a sequence is text alone.
GPT = Frame(("_start_",), ("_delimiter_",), ("_classify_",), (0,), WordMarker("</w>", "last"), unknown="<unk>")
GPT_TEXT = replace(GPT, first=(), between=(), last=())


@dataclass(frozen=True, eq=False)
class Joined:
    """Parts joined into concatenated sequences."""

    tokens: NDArray[Any]  # (T,)
    segments: NDArray[np.int64]  # (T,)
    begins: NDArray[np.int64]  # (P,) where each part begins in `tokens`
    lengths: NDArray[np.int64]  # (n,)


@dataclass(frozen=True, eq=False)
class Joiner:
    """Joins the tokens of parts into sequences: a frame with the ids of its tokens in one vocabulary.

    A sequence has at least one token: without text and special tokens it is the unknown token.
    """

    frame: Frame
    first: NDArray[np.int64]
    between: NDArray[np.int64]
    last: NDArray[np.int64]
    unknown: int = 0

    def join(self, *parts: Ids) -> Joined:
        """Join parts into one sequence."""
        if not self.frame.size(len(parts)) and not any(map(len, parts)):
            parts = ([self.unknown], *parts[1:])
        pieces, begins = [self.first], [len(self.first)]
        for part in parts:
            pieces += [part, self.between]  # type: ignore[list-item]
            begins.append(begins[-1] + len(part) + len(self.between))
        pieces[-1] = self.last
        tokens = np.concatenate(pieces, dtype=np.int64, casting="unsafe")  # an empty list would be an array of floats
        segments = np.repeat(self.frame.segments_of(len(parts)), np.diff([0, *begins[1:-1], len(tokens)]))
        return Joined(tokens, segments, np.array(begins[:-1]), np.array([len(tokens)]))

    def join_many(self, tokens: NDArray[Any], sizes: Ids, counts: Ids, segments: Sequence[int] | None = None) -> Joined:
        """Join the parts of many sequences at once, with the result of `join` for each.

        The parts are concatenated in `tokens`, with `sizes` (P,) tokens each; sequence i takes the next `counts[i]`
        of them, at least one. `segments` (P,) are the numbers of the parts where they are not the frame's.
        """
        sizes, counts = np.array(sizes, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        ends = np.cumsum(counts)
        if not self.frame.size(1):
            tokens = self._without_empty(tokens, sizes, ends - counts)
        leads, closes = np.zeros((2, len(sizes)), dtype=bool)  # the first and the last part of each sequence
        leads[ends - counts] = closes[ends - 1] = True
        before = np.where(leads, len(self.first), 0)
        widths = before + sizes + np.where(closes, len(self.last), len(self.between))
        begins = np.cumsum(widths) - widths + before
        joined = np.empty(int(widths.sum()), dtype=tokens.dtype)
        is_text = np.ones(len(joined), dtype=bool)
        after = begins + sizes
        rows = (
            (begins[leads] - len(self.first), self.first),
            (after[~closes], self.between),
            (after[closes], self.last),
        )
        for starts, ids in rows:
            for offset, number in enumerate(ids):
                joined[starts + offset], is_text[starts + offset] = number, False
        joined[is_text] = tokens
        numbers = self._segments(counts) if segments is None else np.asarray(segments)
        return Joined(joined, np.repeat(numbers, widths), begins, np.add.reduceat(widths, ends - counts))

    def _without_empty(self, tokens: NDArray[Any], sizes: NDArray[np.int64], firsts: Ids) -> NDArray[Any]:
        """The tokens of parts with the unknown one in every sequence that has none; `sizes` is changed."""
        empty = np.asarray(firsts)[np.add.reduceat(sizes, firsts) == 0] if len(sizes) else np.zeros(0, dtype=np.int64)
        places = (np.cumsum(sizes) - sizes)[empty]
        sizes[empty] = 1
        return np.insert(tokens, places, self.unknown)

    def _segments(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The segment numbers of the parts, given the number of parts of each sequence."""
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.array(self.frame.segments)[np.minimum(places, len(self.frame.segments) - 1)]
