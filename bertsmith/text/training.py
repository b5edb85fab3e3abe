"""Training a vocabulary of any kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from bertsmith.errors import UserError
from bertsmith.text.morphemes import bordered
from bertsmith.text.normalisation import OWN, Normalisation
from bertsmith.text.tokenizer import (
    Kind,
    Tokenizer,
    repeatable,
    train_byte_bpe,
    train_unigram,
    train_word_bpe,
    train_wordpiece,
    train_words,
)


def train(
    texts: Iterable[str],
    vocab_size: int,
    kind: Kind,
    *,
    cased: bool | None,
    jamo: bool,
    normalise: Normalisation = OWN,
    morphemes: str = "",
) -> Tokenizer:
    """Train a vocabulary of a kind; `cased` is by default as in the model that the kind is known from.

    `morphemes` names the analyser of morphemes that the entries of the vocabulary end at.
    """
    if kind not in get_args(Kind):
        raise UserError(f"--kind {kind!r} is not one of {', '.join(get_args(Kind))}")
    if jamo and kind != "wordpiece":
        raise UserError(f"--jamo is for --kind wordpiece, not {kind}: the others never decompose Hangul")
    if morphemes and (kind in ("bpe", "words") or jamo):
        raise UserError("--morphemes is for --kind wordpiece, bytes and unigram, without --jamo")
    found = bordered(repeatable(texts), morphemes) if morphemes else None
    if kind == "bytes":
        return train_byte_bpe(texts, vocab_size, cased=cased is not False, normalise=normalise, morphemes=found)
    if kind == "words":
        return train_words(texts, vocab_size, cased=cased is not False, normalise=normalise)
    if kind == "unigram":
        return train_unigram(texts, vocab_size, cased=bool(cased), normalise=normalise, morphemes=found)
    if kind == "bpe":
        return train_word_bpe(texts, vocab_size, cased=bool(cased), normalise=normalise)
    return train_wordpiece(texts, vocab_size, cased=bool(cased), jamo=jamo, normalise=normalise, morphemes=found)
