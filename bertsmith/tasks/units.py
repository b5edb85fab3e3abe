"""What a tagger tags: words, or sub-tokens where the boundary of an entity may lie inside a word.

Entities that are given by their characters are learnt at every sub-token, so that a particle or the rest of a compound
can be left out. Characters are the unit of their scores, as in KLUE's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from bertsmith.model.config import TagUnit
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.rows.entities import Entity
from bertsmith.text.offsets import FLAG, PICTURE, SKIN_TONES, Aligned, marks
from bertsmith.text.tokenizer import Tokenizer

SPACED = re.compile(r"\S+")
AT_ONCE = 4096  # texts that are encoded with offsets at a time: these take much more memory than the tokens
Places = list[tuple[int, int]]  # the first character of each unit, and the one after its last
Pieces = dict[str, list[int]]  # the sub-tokens of each word


@dataclass(frozen=True)
class Units:
    """The units of a row: `pieces` are the tokens of all units of its document, in which the row begins at `begin`."""

    places: Places
    pieces: Sequence[list[int]]
    begin: int = 0


def units_of(rows: Sequence[Row], tokenizer: Tokenizer, head: HeadConfig) -> Iterator[Units]:
    """The units of each row, as the head tags them."""
    if head.unit == "token":
        for begin in range(0, len(rows), AT_ONCE):
            encoded = tokenizer.encode_aligned([row.text for row in rows[begin : begin + AT_ONCE]])
            yield from map(_sub_tokens, encoded)
        return
    all_places = [words_of(row, head.unit) for row in rows]
    texts = [[row.text[a:b] for a, b in places] for row, places in zip(rows, all_places, strict=True)]
    pieces = _pieces([word for row in rows for word in row.document] + [w for words in texts for w in words], tokenizer)
    for row, places, words in zip(rows, all_places, texts, strict=True):
        document, begin = (row.document, row.begin) if row.document else (words, 0)
        yield Units(places, [pieces[word] for word in document], begin)


def are_spaced(rows: Sequence[Row]) -> bool:
    """Whether the words of rows are what stands between spaces, with its punctuation, such as Korean eojeols."""
    attached = alone = 0
    for row in rows:
        for word in row.parts:
            if not word[-1:].isalnum():
                attached, alone = attached + word[:1].isalnum(), alone + (not word[:1].isalnum())
    return attached > alone


def words_of(row: Row, unit: TagUnit = "word") -> Places:
    """The places of a row's words in its text: of its `parts`, else split by letters and punctuation, or by spaces."""
    if not row.parts:
        return [match.span() for match in (SPACED if unit == "spaced" else word_pattern()).finditer(row.text)]
    ends = np.cumsum([len(word) + 1 for word in row.parts]) - 1
    return [(int(end) - len(word), int(end)) for word, end in zip(row.parts, ends, strict=True)]


@cache
def word_pattern() -> re.Pattern[str]:
    """Letters and digits together, each punctuation sign alone, both with combining marks (accents, vowel signs)."""
    sign = rf"{FLAG}{{2}}|[^\w\s](?:\u200d{PICTURE}|[{marks()}{SKIN_TONES}])*"
    return re.compile(rf"\w[\w{marks()}]*|{sign}")


def characters_of(row: Row) -> Places:
    """The characters of a row's text, without its spaces."""
    return [(place, place + 1) for place, sign in enumerate(row.text) if not sign.isspace()]


def cut_at(text: str, cuts: Collection[int]) -> Places:
    """The parts of a text between its spaces and these places."""
    found = Places()
    for match in re.finditer(r"\S+", text):
        ends = sorted({match.start(), match.end(), *(cut for cut in cuts if match.start() < cut < match.end())})
        found += pairwise(ends)
    return found


def _pieces(words: Sequence[str], tokenizer: Tokenizer) -> Pieces:
    """The sub-tokens of each word; a word without sub-tokens is the unknown token."""
    distinct = list(dict.fromkeys(words))
    unknown = [tokenizer.unknown_id]
    found = tokenizer.encode([tokenizer.space + word for word in distinct])
    return {word: ids or unknown for word, ids in zip(distinct, found, strict=True)}


def _sub_tokens(found: Aligned) -> Units:
    """The sub-tokens of a text; tokens that share a letter, as those of its bytes do, are one unit.

    A token of spaces alone belongs to the unit before it, at the beginning of a text to the one after it.
    """
    places, pieces, waiting = Places(), list[list[int]](), list[int]()
    for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
        inside = found.text[begin:end]
        begin, end = begin + len(inside) - len(inside.lstrip()), begin + len(inside.rstrip())
        if places and (begin >= end or begin < places[-1][1]):
            pieces[-1].append(token)
            places[-1] = (places[-1][0], max(places[-1][1], end))
        elif begin < end:
            places.append((begin, end))
            pieces.append([*waiting, token])
            waiting = []
        else:
            waiting.append(token)
    return Units(places, pieces)


def unit_tags(places: Places, entities: Sequence[Entity]) -> list[str]:
    """The tags of units in BIO: a unit belongs to the entity that covers more than half of its characters.

    An entity that covers no unit so far gets the one that it covers most, if that one belongs to no other entity.
    """
    tags = ["O"] * len(places)
    begins, ends = (np.array([place[side] for place in places], dtype=np.int64) for side in (0, 1))
    for entity in entities:
        near = range(int(np.searchsorted(ends, entity.start, "right")), int(np.searchsorted(begins, entity.end)))
        shares = {u: (min(ends[u], entity.end) - max(begins[u], entity.start)) / (ends[u] - begins[u]) for u in near}
        free = {unit: share for unit, share in shares.items() if tags[unit] == "O"}
        chosen = [unit for unit, share in free.items() if share > 0.5] or sorted(free, key=lambda u: -free[u])[:1]
        for number, unit in enumerate(chosen):
            tags[unit] = f"{'I' if number else 'B'}-{entity.label}"
    return tags
