"""Unigram vocabularies (Kudo 2018; ALBERT): training, and reading a released `spiece.model`.

A word begins with its space, written `▁`. Of all ways to divide a word into entries, the likeliest is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bertsmith.errors import UserError
from bertsmith.text.alphabet import alphabet
from bertsmith.text.frame import ALBERT
from bertsmith.text.long_words import short_words
from bertsmith.text.special_tokens import place, register
from bertsmith.text.unigram_entries import choose_entries

SPACE = ALBERT.word_marker.text
CONTROL = Regex(r"[\p{C}&&[^\s]]|\x{FFFD}")  # invisible characters, which BERT's clean-up drops as well
QUOTES = ("``", "''")  # both become one straight quotation mark


def normalizer(cased: bool) -> normalizers.Normalizer:
    """ALBERT's clean-up: quotes, control characters, compatibility forms (NFKC); uncased: no capitals, no accents.

    NFKC composes Hangul again after accents were stripped, as the table inside ALBERT's `spiece.model` does.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Replace(quote, '"') for quote in QUOTES]
    if not cased:
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    return normalizers.Sequence([*steps, normalizers.Replace(CONTROL, ""), normalizers.NFKC()])


def train(texts: Iterable[str], vocab_size: int, *, cased: bool) -> Backend:
    """Train a Unigram vocabulary; `texts` is iterated twice, first to count characters, then to count words.

    As with WordPiece, the alphabet is at most half of the vocabulary.
    """
    special = ALBERT.special_tokens
    if vocab_size < 2 * len(special):
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 30000 many")
    backend = _pipeline([(ALBERT.unknown, 0.0)], normalizer(cased))
    room = max(vocab_size, 2 * min(128, vocab_size - len(special) - 1))
    characters = alphabet(texts, backend, vocab_size, room)  # counted twice: `alphabet` leaves room for `##c`
    if not characters:
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    words = _words(short_words(texts), backend.normalizer)
    found = choose_entries(words, {SPACE, *characters}, vocab_size - len(special))
    trained = _pipeline([*((name, 0.0) for name in special), *found], backend.normalizer)
    register(trained, ALBERT)
    place(trained, ALBERT)
    return trained


def _words(texts: Iterable[str], normal: normalizers.Normalizer) -> Counter[str]:
    """Count the words of texts after normalisation, each with the marker before it."""
    written: Counter[str] = Counter()
    for text in texts:
        written.update(text.split())
    words: Counter[str] = Counter()
    for word, count in written.items():
        for part in normal.normalize_str(word).split():
            words[SPACE + part] += count
    return words


def _pipeline(entries: Sequence[tuple[str, float]], normal: normalizers.Normalizer) -> Backend:
    """A tokenizer with these entries and their logarithms of probability."""
    unknown = next(i for i, (entry, _) in enumerate(entries) if entry == ALBERT.unknown)
    backend = Backend(models.Unigram(list(entries), unk_id=unknown))
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return backend
