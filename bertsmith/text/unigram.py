"""Unigram vocabularies (Kudo 2018; ALBERT): training, and reading a released `spiece.model`.

A word begins with its space, written `▁`. Of all ways to divide a word into entries, the likeliest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from bertsmith.errors import UserError
from bertsmith.text.frame import ALBERT
from bertsmith.text.long_words import short_words
from bertsmith.text.special_tokens import place, register

SPACE = ALBERT.word_marker.text
CONTROL = Regex(r"[\p{C}&&[^\s]]|\x{FFFD}")  # invisible characters, which BERT's clean-up drops as well
QUOTES = ("``", "''")  # both become one straight quote


def normalizer(cased: bool) -> normalizers.Normalizer:
    """ALBERT's clean-up: quotes, control characters, compatibility forms (NFKC); uncased: no capitals, no accents.

    NFKC composes Hangul again after accents were stripped, as the table inside ALBERT's `spiece.model` does.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Replace(quote, '"') for quote in QUOTES]
    if not cased:
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    return normalizers.Sequence([*steps, normalizers.Replace(CONTROL, ""), normalizers.NFKC()])


def train(texts: Iterable[str], vocab_size: int, *, cased: bool) -> Backend:
    """Train a Unigram vocabulary."""
    if vocab_size < 2 * len(ALBERT.special_tokens):
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 30000 many")
    if not any(text.strip() for text in texts):
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    backend = pipeline([(ALBERT.unknown, 0.0)], normalizer(cased))
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(ALBERT.special_tokens),
        unk_token=ALBERT.unknown,
        show_progress=False,
    )
    backend.train_from_iterator(short_words(texts), trainer)
    register(backend, ALBERT)
    place(backend, ALBERT)
    return backend


def pipeline(entries: Sequence[tuple[str, float]], normal: normalizers.Normalizer) -> Backend:
    """A tokenizer with these entries and their logarithms of probability."""
    unknown = next(i for i, (entry, _) in enumerate(entries) if entry == ALBERT.unknown)
    backend = Backend(models.Unigram(list(entries), unk_id=unknown))
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return backend
