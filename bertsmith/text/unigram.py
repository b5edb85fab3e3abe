"""Unigram vocabularies (Kudo 2018; ALBERT, DeBERTa): training, and reading a released `spiece.model` or `spm.model`.

A word begins with its space, written `▁`. Of all ways to divide a word into entries, the likeliest is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bertsmith.errors import UserError
from bertsmith.text.alphabet import alphabet
from bertsmith.text.frame import ALBERT, DEBERTA_V2
from bertsmith.text.long_words import short_words
from bertsmith.text.morphemes import BORDER, Bordered
from bertsmith.text.normalisation import OWN, Form, Normalisation
from bertsmith.text.offsets import marks
from bertsmith.text.special_tokens import named, place, register
from bertsmith.text.spiece import SentencePiece, read_spiece
from bertsmith.text.unigram_entries import choose_entries

PIECES, DEBERTA_PIECES = "spiece.model", "spm.model"  # the files of released vocabularies
SPACE = ALBERT.word_marker.text
CONTROL = Regex(r"[\p{C}&&[^\s]]|\x{FFFD}")  # invisible characters, which BERT's clean-up drops as well
QUOTES = ("``", "''")  # both become one straight quotation mark


def normalizer(cased: bool, chosen: Normalisation = OWN) -> normalizers.Normalizer:
    """ALBERT's clean-up: quotes, control characters, compatibility forms (NFKC); uncased: no capitals, no accents.

    NFKC composes Hangul again after accents were stripped, as the table inside ALBERT's `spiece.model` does.
    """
    steps = _steps(lowercase=not cased, accents=cased, form=chosen.form)
    return chosen.around([*steps, normalizers.Replace(CONTROL, "")], own="nfkc")


def _steps(lowercase: bool, accents: bool, form: Form | None = None) -> list[normalizers.Normalizer]:
    """The steps before SentencePiece's own normalisation."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace(quote, '"') for quote in QUOTES]
    if not accents:
        steps += [normalizers.NFD() if form == "nfc" else normalizers.NFKD(), normalizers.StripAccents()]
    return [*steps, normalizers.Lowercase()] if lowercase else steps


def read(path: Path, settings: Mapping[str, Any]) -> Backend:
    """Make a tokenizer from ALBERT's `spiece.model` or DeBERTa's `spm.model`, which are read in different ways."""
    return read_deberta(path, settings) if path.name == DEBERTA_PIECES else read_albert(path, settings)


def read_deberta(path: Path, settings: Mapping[str, Any]) -> Backend:
    """Make a tokenizer from the `spm.model` of DeBERTa v2 or v3; its mask comes after all pieces."""
    found, frame = read_spiece(path), named(DEBERTA_V2, settings)
    lowercase = [normalizers.Lowercase()] if settings.get("do_lower_case") else []
    table = _character_table(found, path) or [normalizers.NFC()]
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    end = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=False, right=True)]
    entries = [(piece.text, piece.score) for piece in found.pieces]
    backend = Backend(models.Unigram(entries, unk_id=found.unknown, byte_fallback=found.byte_fallback))
    backend.normalizer = normalizers.Sequence([*lowercase, spaces, *table, *end])
    split = [pre_tokenizers.Punctuation("isolated")] if settings.get("split_by_punct") else []
    marked = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, marked])
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    mask = {"content": str(frame.mask), "normalized": False, "lstrip": False}
    backend.add_special_tokens([AddedToken(str(frame.mask), normalized=False)])
    objects = {key: value for key, value in settings.items() if isinstance(value, dict)}
    register(backend, frame, {"mask_token": mask, **objects})
    place(backend, frame)
    return backend


def _character_table(found: SentencePiece, path: Path) -> list[normalizers.Normalizer]:
    """The table of characters in a model file, if it has one."""
    try:
        return [normalizers.Precompiled(found.character_map)] if found.character_map else []
    except Exception:  # the library raises bare Exception
        raise UserError(f"{path} is damaged: its table of characters cannot be read") from None


def read_albert(path: Path, settings: Mapping[str, Any]) -> Backend:
    """Make a tokenizer from ALBERT's `spiece.model`, with the normalisation of its table of characters.

    ALBERT's code never takes a digit with a comma after it as one piece; here such a piece is made unlikely.
    """
    found, frame = read_spiece(path), named(ALBERT, settings)
    lowercase, accents = bool(settings.get("do_lower_case", True)), bool(settings.get("keep_accents", False))
    steps = [*_steps(lowercase, accents), *_character_table(found, path)]
    steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    entries = [(piece.text, piece.score - 100 * bool(re.search("[0-9],$", piece.text[-2:]))) for piece in found.pieces]
    model = models.Unigram(entries, unk_id=found.unknown, byte_fallback=found.byte_fallback)
    backend = _pipeline(model, normalizers.Sequence(steps))
    register(backend, frame, settings)
    place(backend, frame)
    return backend


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    cased: bool,
    normalise: Normalisation = OWN,
    morphemes: Bordered | None = None,
) -> Backend:
    """Train a Unigram vocabulary; `texts` is iterated twice, first to count characters, then to count words.

    As with WordPiece, the alphabet is at most half of the vocabulary.
    """
    special = ALBERT.special_tokens
    if vocab_size < 2 * len(special):
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 30000 many")
    backend = _pipeline(models.Unigram(), normalizer(cased, normalise))
    room = max(vocab_size, 2 * min(128, vocab_size - len(special) - 1))
    characters = alphabet(texts, backend, vocab_size, room)  # counted twice: `alphabet` leaves room for `##c`
    if not characters:
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    words = _words(short_words(texts if morphemes is None else morphemes), backend.normalizer)
    found = choose_entries(words, {SPACE, *characters}, vocab_size - len(special))
    entries = [*((name, 0.0) for name in special), *found]
    model = models.Unigram(entries, unk_id=special.index(ALBERT.unknown), byte_fallback=False)
    trained = _pipeline(model, backend.normalizer)
    register(trained, ALBERT)
    place(trained, ALBERT)
    return trained


def _words(texts: Iterable[str], normal: normalizers.Normalizer) -> Counter[str]:
    """Count the words of texts after normalisation, each with the marker before it.

    Letters, digits and other signs are counted apart, since no entry mixes them: the full stop is no part of a word.
    """
    written: Counter[str] = Counter()
    for text in texts:
        written.update(text.split())
    words: Counter[str] = Counter()
    runs = re.compile(rf"{SPACE}?(?:\d+|(?:[^\W\d_]|[{marks()}])+|[^\w{SPACE}{marks()}]+|_+)|{SPACE}")
    for word, count in written.items():
        for number, morpheme in enumerate(word.split(BORDER)):
            for part in normal.normalize_str(morpheme).split():
                for run in runs.findall(part if number else SPACE + part):
                    words[run] += count
    return words


def _pipeline(model: models.Model, normal: normalizers.Normalizer) -> Backend:
    backend = Backend(model)
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return backend
