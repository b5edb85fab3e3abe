"""Texts that are longer than the model: windows of tokens, and the logits of a text from those of its windows.

n windows of all rows, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.description import Encoded, Limits
from bertsmith.tasks.examples import Texts, join_texts, starts_of
from bertsmith.text.tokenizer import Tokenizer

OVERLAP = 8  # windows share at least one token in so many with the window before, so that phrases at borders are whole


def in_windows(
    first: Texts, second: Texts, has_second: NDArray[np.bool_], tokenizer: Tokenizer, limits: Limits
) -> Encoded:
    """Every row as the examples of its windows, at most `limits.windows`; of a pair, the longer text is in windows.

    The other text of a pair is whole in every window, or its beginning if it needs more than half of the room.
    `shortened` counts the rows of which something is in no window.
    """
    owners, bounds, shortened = list[int](), list[NDArray[np.int64]](), 0
    sizes = np.stack([first.lengths, np.where(has_second, second.lengths, 0)], axis=1)
    for row, lengths in enumerate(sizes):
        room = limits.max_length - tokenizer.frame.size(1 + int(has_second[row]))
        longer = int(lengths[1] > lengths[0])
        beside = min(int(lengths[1 - longer]), room // 2)
        found, whole = spread(int(lengths[longer]), room - beside, limits.windows)
        shortened += int(not whole or beside < lengths[1 - longer])
        for window in found:
            pair = np.array([[0, beside], [0, beside]])
            pair[longer] = window
            owners.append(row)
            bounds.append(pair)
    places, cut = np.array(owners, dtype=np.int64), np.array(bounds, dtype=np.int64).reshape(-1, 2, 2)
    one, two = (
        Texts(texts.tokens, texts.begins[places] + cut[:, side, 0], cut[:, side, 1] - cut[:, side, 0])
        for side, texts in enumerate((first, second))
    )
    examples, _ = join_texts(one, two, has_second[places], tokenizer, limits.max_length)
    counts = np.bincount(places, minlength=len(sizes))
    return Encoded(replace(examples, rows=starts_of(counts)), places, shortened=shortened)


def spread(length: int, room: int, most: int) -> tuple[list[tuple[int, int]], bool]:
    """Where the windows of a text begin and end, spread evenly over it; and whether they cover all of it."""
    if length <= room:
        return [(0, length)], True
    apart = max(1, room - room // OVERLAP)
    needed = 1 + -(-(length - room) // apart)
    count = min(needed, most)
    last = length - room if count == needed else (count - 1) * apart
    begins = np.linspace(0, last, count).round().astype(int).tolist()
    return [(begin, begin + room) for begin in begins], count == needed


def pooled(logits: Sequence[NDArray[np.float32]], encoded: Encoded, limits: Limits) -> list[NDArray[np.float32]]:
    """The logits of each row (K,) from those of its windows: their mean or, by class, their maximum."""
    rows = encoded.examples.rows
    assert rows is not None
    pool = np.mean if limits.pooled == "mean" else np.max
    return [pool(np.stack(logits[begin:end]), axis=0) for begin, end in pairwise(rows.tolist())]


def limits_to_save(rows: Sequence[object], limits: Limits) -> dict[str, object]:
    """What predictions need to know about the windows of training; nothing if texts were truncated."""
    return {"windows": limits.windows, "pooled": limits.pooled} if limits.windows else {}
