"""Examples with the characters of their words, for encoders that read them (ELMo); unknown words have theirs as well.

T tokens in all, N distinct words, C characters of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.batch import CHARACTERS, Example, Label
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Encoded, Limits
from bertsmith.tasks.examples import SPELLING, Spelling
from bertsmith.text.frame import Joined
from bertsmith.text.tokenizer import Tokenizer


def encode_spelled(
    encode: Callable[..., Encoded],
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    limits: Limits,
    head: HeadConfig,
    **options: Any,
) -> Encoded:
    """Encode rows and, where the encoder reads characters, add those of every token.

    While rows are encoded, the vocabulary is open: a word outside it has an id of its own, which becomes the unknown
    token again once the characters are known.
    """
    opened = tokenizer.opened()
    encoded = encode(rows, opened, limits, head, **options)
    if not opened.spells:
        return encoded
    tokens = encoded.examples.tokens
    distinct, places = np.unique(tokens, return_inverse=True)
    spelling = Spelling(places.astype(np.int32), opened.characters(distinct))
    return replace(encoded, examples=replace(encoded.examples, tokens=opened.known(tokens), spelling=spelling))


def example_of(joined: Joined, opened: Tokenizer) -> Example:
    """One sequence as an example; its ids come from this tokenizer, whose vocabulary is open."""
    if not opened.spells:
        return Example(joined.tokens, joined.segments)
    labels = {CHARACTERS: Label(opened.characters(joined.tokens), SPELLING)}
    return Example(opened.known(joined.tokens), joined.segments, labels)
