"""Masking for the masked language model (BERT paper, section 3.1): 15 % of the tokens, 80/10/10.

The unit of masking is a token, a word (whole-word masking, as in the code released with BERT), a span of words
(SpanBERT, Joshi et al. 2020, section 3.1) or an n-gram of words (ALBERT, Lan et al. 2020, section 4.1). Shapes: T
tokens of B sequences; M chosen tokens; W words; S spans.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError
from bertsmith.text.frame import WORDPIECE, WordMarker
from bertsmith.text.tokenizer import Tokenizer

Unit = Literal["token", "word", "span", "n-gram"]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Keys = NDArray[np.uint64]
ORDER, REPLACEMENT, RANDOM, SPAN_LENGTH, SPAN_START, SPAN_REPLACEMENT = range(
    6
)  # streams of draws under a sequence's key


@dataclass(frozen=True)
class MaskPolicy:
    """How many tokens are chosen, in which units, and which shares become masks or random tokens; the rest is kept.

    `span_max` is the largest length of a span or an n-gram in words. The length of a span has the geometric
    distribution of `span_p`, and its tokens are masked, replaced or kept together; the length n of an n-gram has a
    probability proportional to 1/n, and each of its tokens has its own draw.
    """

    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    unit: Unit = "token"
    span_p: float = 0.2
    span_max: int = 10
    BOUNDS = {
        "rate": Bounds(0, 1, "()"),
        "mask_share": Bounds(0, 1),
        "random_share": Bounds(0, 1),
        "span_p": Bounds(0, 1, "(]"),
        "span_max": Bounds(1, 10**6),  # words
    }

    def __post_init__(self) -> None:
        check_bounds(self, "data.masking.")
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError(
                f"data.masking: mask_share {self.mask_share} and random_share {self.random_share} are more than all"
            )
        if self.unit not in get_args(Unit):
            raise UserError(f"data.masking.unit must be one of {', '.join(get_args(Unit))}, not {self.unit!r}")


@dataclass(frozen=True)
class Masked:
    """Masked tokens, the positions of the chosen ones, and the original tokens there."""

    tokens: NDArray[Any]  # (T,)
    positions: NDArray[np.int64]  # (M,)
    targets: NDArray[Any]  # (M,)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The facts about a tokenizer that masking uses: the mask's id, the special tokens, and the pieces of words."""

    mask_id: int
    is_special: NDArray[np.bool_]  # (V,)
    is_marked: NDArray[np.bool_]  # (V,) whether a token carries the word marker
    word_marker: WordMarker = WORDPIECE.word_marker

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        return cls(tokenizer.mask_id, tokenizer.is_special, tokenizer.is_marked, tokenizer.frame.word_marker)

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """The ids of all tokens that are not special."""
        return np.flatnonzero(~self.is_special)

    def continues(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """Which tokens continue the word of the token before them (T,)."""
        return self.word_marker.continues(self.is_marked[tokens])


def mask_tokens(
    tokens: NDArray[Any], lengths: NDArray[Any], keys: NDArray[np.uint64], policy: MaskPolicy, vocabulary: Vocabulary
) -> Masked:
    """Mask packed sequences; sequence i draws only from `keys[i]`, so its masks do not depend on the other sequences.

    In a sequence of n tokens (special ones included) the budget is max(1, round(rate · n)) tokens, as in the released
    code: the unit word chooses as many as whole words fit, the other units exactly that many. Special tokens are never
    chosen.
    """
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(tokens)) - starts[owner]
    special = vocabulary.is_special[tokens]
    budget = np.maximum(1, np.rint(policy.rate * lengths)).astype(np.int64)
    budget = np.minimum(budget, np.bincount(owner, ~special, len(lengths)).astype(np.int64))
    if policy.unit == "token":
        positions = _choose_tokens(special, owner, places, keys, budget)
    else:
        words = find_words(special, vocabulary.continues(tokens), owner)
        if policy.unit == "word":
            positions = _choose_words(words, places, keys, budget)
        else:
            spans = draw_spans(words, keys, budget, policy)
            positions = _ranges(spans.begin, spans.end)
    if policy.unit == "span":
        draw = np.repeat(draws.uniform(keys[spans.owner], spans.number, SPAN_REPLACEMENT), spans.end - spans.begin)
    else:
        draw = draws.uniform(keys[owner[positions]], places[positions], REPLACEMENT)
    masked = tokens.copy()
    masked[positions[draw < policy.mask_share]] = vocabulary.mask_id
    random = (draw >= policy.mask_share) & (draw < policy.mask_share + policy.random_share)
    chosen = positions[random]
    masked[chosen] = vocabulary.ordinary[
        draws.below(len(vocabulary.ordinary), keys[owner[chosen]], places[chosen], RANDOM)
    ]
    return Masked(masked, positions, tokens[positions])


def _choose_tokens(special: Flags, owner: Numbers, places: Numbers, keys: Keys, budget: Numbers) -> Numbers:
    """Positions of the first tokens of each sequence in a random order, up to its budget."""
    order_draw = draws.uniform(keys[owner], places, ORDER)
    order_draw[special] = 1.0  # after all others
    order = np.argsort(order_draw + 2.0 * owner)  # sorted inside each sequence
    return np.sort(order[places < budget[owner]])


@dataclass(frozen=True, eq=False)
class Words:
    """The words of packed sequences: the begin, the end and the sequence (`owner`) of each. Each (W,)."""

    begin: Numbers
    end: Numbers
    owner: Numbers


def find_words(special: Flags, continuation: Flags, owner: Numbers) -> Words:
    """Find the words: a token and its continuations up to the next word, special token or end of the sequence.

    Continuations at the beginning of a segment, where truncation dropped the word's first token, are a word too.
    """
    opens = np.diff(owner, prepend=-1) != 0  # the first token of a sequence
    opens[1:] |= special[:-1]
    starts = ~special & (~continuation | opens)
    bounds = np.flatnonzero(starts | special | opens)
    ends = np.append(bounds[1:], len(owner))
    chosen = starts[bounds]
    return Words(bounds[chosen], ends[chosen], owner[bounds[chosen]])


def _choose_words(words: Words, places: Numbers, keys: Keys, budget: Numbers) -> Numbers:
    """Positions of whole words, taken in a random order while they fit the budget (as in the released code).

    Where every word of a sequence is longer than its budget, the released code masks nothing. Here the first tokens of
    the first word in the order are then taken, up to the budget.
    """
    order_draw = draws.uniform(keys[words.owner], places[words.begin], ORDER)
    order = np.argsort(order_draw + 2.0 * words.owner)
    begin, end, owner = words.begin[order], words.end[order], words.owner
    taken = _fitting(end - begin, owner, budget)
    first, _, whose = _groups(owner)
    taken[first] |= np.bincount(owner[taken], minlength=len(budget))[whose] == 0
    end = np.minimum(end, begin + budget[owner])  # shortens only words that are longer than their budget
    return np.sort(_ranges(begin[taken], end[taken]))


def _fitting(sizes: Numbers, owner: Numbers, budget: Numbers) -> Flags:
    """Which units are taken when each sequence goes through its units in order and skips those that do not fit.

    A round takes all units up to the first that does not fit, then drops those that are too long for the rest of the
    budget. That rest is then shorter than the unit that did not fit, so there are few rounds.
    """
    taken, left = np.zeros(len(sizes), dtype=bool), budget.copy()
    waiting = np.flatnonzero(sizes <= left[owner])
    while len(waiting):
        size, whose = sizes[waiting], owner[waiting]
        total, (first, count, _) = np.cumsum(size), _groups(whose)
        fits = total - np.repeat((total - size)[first], count) <= left[whose]
        taken[waiting[fits]] = True
        left -= np.bincount(whose[fits], size[fits], len(left)).astype(np.int64)
        waiting = waiting[~fits]
        waiting = waiting[sizes[waiting] <= left[owner[waiting]]]
    return taken


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans in the order of the text: `begin`, `end`, the sequence, and the span's number in its draws. Each (S,)."""

    begin: Numbers
    end: Numbers
    owner: Numbers
    number: Numbers


def draw_spans(words: Words, keys: Keys, budget: Numbers, policy: MaskPolicy) -> Spans:
    """Draw spans of whole words until the budget of each sequence is used up."""
    owner = np.repeat(
        np.arange(len(budget)), budget
    )  # a span has at least one token: there are no more spans than this
    number = _ranges(np.zeros_like(budget), budget)
    lengths = span_lengths(draws.uniform(keys[owner], number, SPAN_LENGTH), policy).tolist()
    starts = draws.key(keys[owner], number, SPAN_START).tolist()
    ends = np.cumsum(budget).tolist()
    bounds = np.searchsorted(words.owner, np.arange(len(budget) + 1)).tolist()
    spans: list[tuple[int, int, int, int]] = []
    for i, size in enumerate(budget.tolist()):
        begin, end = words.begin[bounds[i] : bounds[i + 1]], words.end[bounds[i] : bounds[i + 1]]
        own = slice(ends[i] - size, ends[i])
        spans += [(*span, i, n) for n, span in enumerate(_spans_of(begin, end, size, lengths[own], starts[own]))]
    columns = np.array(sorted(spans), dtype=np.int64).reshape(-1, 4).T
    return Spans(*columns)


def _spans_of(begin: Numbers, end: Numbers, left: int, lengths: list[int], words: list[int]) -> list[tuple[int, int]]:
    """The spans of one sequence, from a drawn length and a 32-bit random number for the start of each.

    The start is drawn among the places where that many free words follow one another, so that neither other spans nor
    special tokens shorten a span. The span that would exceed the budget loses words at its end, and shorter ones may
    follow it; a word is cut only if no free word fits the rest of the budget. Sets of words are bits of an integer.
    """
    free, joined = (1 << len(begin)) - 1, _bits(begin[1:] == end[:-1])  # joined: the next word follows at once
    begins, ends, sizes = begin.tolist(), end.tolist(), end - begin
    largest = int(sizes.max(initial=0))
    spans: list[tuple[int, int]] = []
    for wanted, word in zip(lengths, words, strict=True):
        if not left:
            break
        fitting = free if left >= largest else free & _bits(sizes <= left) or free
        starts, length = _starts(free, joined, fitting, wanted)
        start = _nth_bit(starts, word * starts.bit_count() >> 32)
        limit = begins[start] + left
        after = max(start, min(start + length, bisect_right(ends, limit)))  # the word after the last whole one
        stop = ends[after - 1] if after > start else limit
        free &= ~((1 << after) - (1 << start))
        left -= stop - begins[start]
        spans.append((begins[start], stop))
    return spans


def _starts(free: int, joined: int, fitting: int, wanted: int) -> tuple[int, int]:
    """The words where a run of `wanted` free words starts, or of the longest length that exists, and that length."""
    row = free
    for length in range(1, wanted):
        longer = free & joined & (row >> 1)
        if not longer & fitting:
            return row & fitting, length
        row = longer
    return row & fitting, wanted


def _bits(flags: Flags) -> int:
    """Flags as the bits of an integer, the first flag as the lowest bit."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _nth_bit(bits: int, n: int) -> int:
    """The index of the n-th set bit, by binary search."""
    low, high = 0, bits.bit_length()
    while high - low > 1:
        middle = (low + high) // 2
        below = (bits & ((1 << middle) - 1)).bit_count()
        low, high = (low, middle) if n < below else (middle, high)
    return low


def span_lengths(uniform: NDArray[np.float64], policy: MaskPolicy) -> Numbers:
    """Lengths of spans or n-grams in words from uniform numbers: a geometric distribution or 1/n, up to `span_max`."""
    # Longer spans are left out of the distribution, not clipped to span_max: the mean is 3.8, as SpanBERT reports.
    shorter = np.arange(policy.span_max)
    shares = np.cumsum(1 / (1 + shorter) if policy.unit == "n-gram" else (1 - policy.span_p) ** shorter)
    return 1 + np.searchsorted(shares[:-1] / shares[-1], uniform, "right")


def _groups(owner: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The first index, the size and the owner of each group of equal entries in a sorted array."""
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    return first, np.diff(first, append=len(owner)), owner[first]


def _ranges(begin: Numbers, end: Numbers) -> Numbers:
    """The concatenated ranges from each begin to its end."""
    sizes = end - begin
    return np.arange(sizes.sum()) + np.repeat(begin - (np.cumsum(sizes) - sizes), sizes)
