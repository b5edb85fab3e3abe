"""The entries of a Unigram vocabulary (Kudo 2018, section 3.2): many substrings at first, pruned by what each is worth.

The same words always give the same entries. (The trainer of the `tokenizers` library adds in the order of a hash table
and of threads, so that its scores, and with them the order of entries, differ from run to run.) Shapes: N places, which
are the characters of all words with one more place at the end of each; W words; P pieces, the substrings that may
become entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 16  # characters of a piece
SEEDS = 1_000_000  # pieces at the beginning
MOST_CHARACTERS = 2_000_000  # of distinct words, the most frequent ones; more would take minutes and gigabytes
KEPT, ROUNDS = 0.75, 2  # the share of the pieces that a pruning keeps, and the rounds of EM before it
SPARE = 1.1  # pruning stops at this multiple of the size; then the likeliest pieces are taken
LEAST = 0.5  # expected occurrences; a piece with fewer is dropped
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def choose_entries(words: Mapping[str, int], letters: Iterable[str], size: int) -> list[tuple[str, float]]:
    """Choose `size` entries for words with their counts; each has the logarithm of its probability.

    All `letters` become entries; words with other characters are left out.
    """
    known = set(letters)
    kept = most_frequent({word: count for word, count in words.items() if known.issuperset(word)})
    absent = sorted(known.difference(*kept))
    lattice = Lattice.of(kept)
    scores = np.log(lattice.seeds / lattice.seeds.sum())
    wanted = max(size - len(absent), int(lattice.is_letter.sum()))
    while True:
        for _ in range(ROUNDS):
            lattice, scores = lattice.fitted(scores)
        if len(scores) <= SPARE * wanted:
            break
        lattice, scores = lattice.best(lattice.worth(scores), scores, max(SPARE * wanted, KEPT * len(scores)))
    lattice, scores = lattice.best(scores, scores, wanted)
    order = np.argsort(-scores, kind="stable").tolist()
    found = [(lattice.piece(number), round(float(scores[number]), 6)) for number in order]
    return [*found, *((letter, round(float(scores.min()) - 1, 6)) for letter in absent)]


def most_frequent(words: Mapping[str, int]) -> dict[str, int]:
    """The most frequent words, as many as fit into `MOST_CHARACTERS`."""
    ordered = sorted(words, key=lambda word: (-words[word], word))
    within = np.cumsum([len(word) for word in ordered]) <= MOST_CHARACTERS
    return {word: words[word] for word in ordered[: int(within.sum())]}


@dataclass(frozen=True, eq=False)
class Lattice:
    """All ways to divide words into pieces.

    A word of n characters has n + 1 places, and a piece leads from one to another. Places are ordered by their number
    inside the word, then by the word, longest first, so that those with the number k are a slice.
    """

    words: list[str]  # longest first
    counts: Floats  # (W,) how often each word occurs
    reach: Ints  # (K,) how many words have a place k; the longest has K - 1 characters
    offsets: Ints  # (K,) where the places k begin
    pieces: NDArray[np.int32]  # (LONGEST, N) the piece of each length that begins at a place, or -1
    owner: Ints  # (P,) a word that has the piece
    begin: Ints  # (P,) where the piece begins in that word
    length: Ints  # (P,)
    seeds: Floats  # (P,) how often it occurs, times its length

    @classmethod
    def of(cls, words: Mapping[str, int]) -> Lattice:
        """Find the substrings that occur at least twice, and all characters."""
        ordered = sorted(words, key=lambda word: (-len(word), word))
        counts = np.array([words[word] for word in ordered], dtype=np.float64)
        sizes = np.array([len(word) for word in ordered], dtype=np.int64)
        reach = np.array([np.count_nonzero(sizes >= at) for at in range(sizes.max(initial=0) + 1)])
        none = np.full((LONGEST, reach.sum()), -1, dtype=np.int32)
        empty = np.zeros(0, dtype=np.int64)
        found = cls(ordered, counts, reach, np.cumsum(reach) - reach, none, empty, empty, empty, np.zeros(0))
        return found._with_pieces()

    def _with_pieces(self) -> Lattice:
        """Number the substrings, the shorter first: one of n characters is one of n - 1 and a character after it."""
        characters = np.array([ord(word[at]) for at, count in enumerate(self.reach[1:]) for word in self.words[:count]])
        codes = np.zeros(self.pieces.shape[1], dtype=np.int64)
        codes[self._places(1, 0)] = characters
        found: list[tuple[NDArray[Any], ...]] = []
        before, total = np.zeros_like(codes), 0
        for size in range(1, LONGEST + 1):
            places, ends = self._places(size, 0), self._places(size, size - 1)
            possible = before[places] >= 0
            places, ends, owners = places[possible], ends[possible], self._owners(size)[possible]
            keys = before[places] << 21 | codes[ends]  # a code point has 21 bits
            _, one, number = np.unique(keys, return_index=True, return_inverse=True)
            often = np.bincount(number, self.counts[owners], len(one))
            keep = (often > 1) | (size == 1)
            new = np.where(keep, np.cumsum(keep) - 1, -1)
            before = np.full(len(codes), -1)
            before[places] = new[number]
            self.pieces[size - 1, places] = np.where(keep, new + total, -1)[number]
            total += int(keep.sum())
            one = one[keep]
            begin = np.searchsorted(self.offsets, places[one], side="right") - 1
            found.append((owners[one], begin, np.full(len(one), size), size * often[keep]))
        owner, begin, length, seeds = map(np.concatenate, zip(*found, strict=True))
        seeded = replace(self, owner=owner, begin=begin, length=length, seeds=seeds)
        return seeded.best(seeds, seeds, SEEDS)[0]

    def _places(self, size: int, ahead: int) -> Ints:
        """The places that are `ahead` places after the begin of each piece of this size that words have room for."""
        spans = zip(self.offsets[ahead:], self.reach[size:], strict=False)
        return np.concatenate([np.arange(offset, offset + count) for offset, count in spans] or [np.zeros(0, int)])

    def _owners(self, size: int) -> Ints:
        """The words of these places."""
        return np.concatenate([np.arange(count) for count in self.reach[size:]] or [np.zeros(0, int)])

    @property
    def is_letter(self) -> NDArray[np.bool_]:
        return self.length == 1

    def piece(self, number: int) -> str:
        begin = self.begin[number]
        return self.words[self.owner[number]][begin : begin + self.length[number]]

    def best(self, values: Floats, scores: Floats, size: float) -> tuple[Lattice, Floats]:
        """The pieces with the highest values, and all letters; ties go to the first piece."""
        rounded = np.where(self.is_letter, np.inf, values.astype(np.float32))  # processors differ in the last digits
        keep = np.zeros(len(values), dtype=bool)
        keep[np.argsort(-rounded, kind="stable")[: max(int(size), int(self.is_letter.sum()))]] = True
        return self._only(keep), scores[keep]

    def _only(self, keep: NDArray[np.bool_]) -> Lattice:
        """The lattice with some of its pieces."""
        if keep.all():
            return self
        new = np.append(np.where(keep, np.cumsum(keep) - 1, -1), -1).astype(np.int32)  # the last entry is for no piece
        facts = {name: getattr(self, name)[keep] for name in ("owner", "begin", "length", "seeds")}
        return replace(self, pieces=new[self.pieces], **facts)

    def fitted(self, scores: Floats) -> tuple[Lattice, Floats]:
        """One round of EM: scores from the expected counts of the pieces; rare pieces are dropped."""
        expected = self.expected(scores)
        keep = (expected >= LEAST) | self.is_letter
        expected = np.maximum(expected[keep], LEAST)
        return self._only(keep), np.log(expected / expected.sum())

    def expected(self, scores: Floats) -> Floats:
        """How often each piece occurs, over all ways to divide the words, weighted by their probabilities (P,)."""
        edges = np.append(scores, -np.inf)[self.pieces]  # (LONGEST, N)
        before, after = self._sums(edges, back=False), self._sums(edges, back=True)
        found = np.zeros(len(scores) + 1)
        for size in range(1, min(LONGEST, len(self.reach) - 1) + 1):
            places, ends, owners = self._places(size, 0), self._places(size, size), self._owners(size)
            chance = np.exp(before[places] + edges[size - 1, places] + after[ends] - after[owners])  # a word's place 0
            found += np.bincount(self.pieces[size - 1, places] + 1, chance * self.counts[owners], len(found))
        return found[1:]

    def _sums(self, edges: Floats, *, back: bool) -> Floats:
        """The log probability of the ways from the begin of a word to each place, or from there to its end (N,)."""
        sums = np.zeros(edges.shape[1])
        longest = len(self.reach) - 1
        for at in range(longest - 1, -1, -1) if back else range(1, longest + 1):
            width = self.reach[at + 1] if back else self.reach[at]
            ways = np.full((min(LONGEST, longest - at if back else at), width), -np.inf)
            for size, way in enumerate(ways, 1):
                count = self.reach[at + size] if back else width  # the words that reach the end of such a piece
                begin, other = (self.offsets[place] for place in ((at, at + size) if back else (at - size, at - size)))
                way[:count] = sums[other : other + count] + edges[size - 1, begin : begin + count]
            top = ways.max(0)
            sums[self.offsets[at] : self.offsets[at] + width] = top + np.log(np.exp(ways - top).sum(0))
        return sums

    def worth(self, scores: Floats) -> Floats:
        """The likelihood that the text loses without a piece: its occurrences times what its best division costs."""
        edges, longest = np.append(scores, -np.inf), len(self.reach) - 1
        best = np.full((LONGEST + 1, len(scores)), -np.inf)  # the best division of the first n characters of each piece
        best[0] = 0
        for end in range(1, min(LONGEST, longest) + 1):
            some = np.flatnonzero(self.length >= end)
            for begin in range(end):
                places = self.offsets[self.begin[some] + begin] + self.owner[some]
                way = best[begin, some] + edges[self.pieces[end - begin - 1, places]]
                itself = (self.length[some] == end) & (begin == 0)
                best[end, some] = np.maximum(best[end, some], np.where(itself, -np.inf, way))
        divided = best[self.length, np.arange(len(scores))]
        return self.expected(scores) * (scores - divided)
