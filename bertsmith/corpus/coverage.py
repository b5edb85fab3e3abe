"""How well a vocabulary fits a text: tokens per word, unknown words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from bertsmith.text.offsets import Aligned
from bertsmith.text.tokenizer import Tokenizer

EXAMPLES = 10
BATCH = 64  # paragraphs that are tokenised at a time
CANDIDATES = 1000  # words that are kept as candidates for the longest ones


@dataclass(frozen=True)
class Coverage:
    """Statistics on the words of a text; a punctuation mark is a word, as the tokenizer splits it off.

    `unk_share` is the share of unknown tokens, from 0 to 1. `longest_words` are the words with the most tokens and
    their numbers of tokens, and `unknown_words` the most frequent unknown words and their counts.
    """

    words: int
    tokens: int
    tokens_per_word: float
    unk_share: float
    longest_words: tuple[tuple[str, int], ...]
    unknown_words: tuple[tuple[str, int], ...]


def coverage(tokenizer: Tokenizer, paragraphs: Iterable[str]) -> Coverage:
    """Tokenise paragraphs and count words, tokens and unknown words."""
    unk = tokenizer.unknown_id
    words = tokens = unknown_tokens = 0
    pieces: dict[str, int] = {}
    unknown: Counter[str] = Counter()
    rest = iter(paragraphs)
    while batch := list(islice(rest, BATCH)):
        for text, encoding in zip(batch, tokenizer.encode_aligned(batch), strict=True):
            tokens += len(encoding.ids)
            unknown_tokens += encoding.ids.count(unk)
            for word, ids in _words(text, encoding):
                words += bool(word)  # a token of spaces alone is no word
                if unk in ids:
                    unknown[word] += 1
                elif len(ids) > 1:
                    pieces[word] = len(ids)
        if len(pieces) > CANDIDATES:
            pieces = dict(_most(pieces))
    shares = tokens / max(1, words), unknown_tokens / max(1, tokens)
    return Coverage(words, tokens, *shares, _most(pieces), _most(unknown))


def _words(text: str, encoding: Aligned) -> Iterator[tuple[str, list[int]]]:
    """Yield the words of a text, as they are written, with the ids of their tokens."""
    offsets, ids, numbers = encoding.offsets, encoding.ids, encoding.word_ids
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or numbers[end] is None or numbers[end] != numbers[start]:
            yield text[offsets[start][0] : offsets[end - 1][1]], ids[start:end]
            start = end


def _most(counts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """The words with the highest numbers, ties in alphabetical order."""
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:EXAMPLES])
