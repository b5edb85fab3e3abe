"""WordPiece vocabularies (BERT, DistilBERT, ELECTRA): training, and reading a released `vocab.txt`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bertsmith.errors import UserError
from bertsmith.text.alphabet import alphabet, inner_pieces
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.long_words import MAX_WORD, short_words
from bertsmith.text.morphemes import Bordered, continued, repeated, segments
from bertsmith.text.normalisation import OWN, Normalisation
from bertsmith.text.special_tokens import named, place, register

PRIVATE = 0xF0000  # the first of 65,534 characters that no text has


def normalizer(cased: bool = False, jamo: bool = False, chosen: Normalisation = OWN) -> normalizers.Normalizer:
    """BERT's clean-up: drop control characters, put spaces around CJK, and if uncased, lower-case and strip accents.

    Stripping accents decomposes every character, and the released code leaves Hangul decomposed, as jamo. Here it is
    composed again; `jamo=True` keeps the released behaviour, for vocabularies that were trained with it.
    """
    bert = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=not cased, lowercase=not cased
    )
    return chosen.around([bert], composed=cased or not jamo)


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    cased: bool,
    jamo: bool = False,
    normalise: Normalisation = OWN,
    morphemes: Bordered | None = None,
    min_count: int = 2,
) -> Backend:
    """Train a WordPiece vocabulary; `texts` is iterated twice, first to count characters, then to count words.

    The entries of the alphabet (see `alphabet`) are at most half of the vocabulary. They get their ids before training,
    in the order of the characters: the library would number them in the order of a hash table and break ties by these
    numbers, but the same text has to give the same vocabulary.
    """
    if vocab_size < 2 * len(WORDPIECE.special_tokens):
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 30000 many")
    if cased and jamo:
        raise UserError(
            "--jamo is for uncased vocabularies: with --cased Hangul is never decomposed; give only one of them"
        )
    if jamo and normalise != OWN:
        raise UserError("--jamo is the normalisation of the released models; give only one of --jamo and --normalise")
    backend = _pipeline(_model(), normalizer(cased, jamo, normalise))
    room = max(vocab_size // 2, min(128, vocab_size - len(WORDPIECE.special_tokens)))
    characters = alphabet(texts, backend, vocab_size, room)
    if not characters:
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    inner = inner_pieces(characters, backend)
    if morphemes is not None:
        vocab = _learn_segments(morphemes, backend.normalizer, characters, inner, vocab_size, min_count)
        return _framed(_pipeline(_model(vocab), backend.normalizer))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=[*WORDPIECE.special_tokens, *characters, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    backend.train_from_iterator(short_words(texts), trainer)
    return _framed(_pipeline(_model(backend.get_vocab()), backend.normalizer))


def _framed(backend: Backend) -> Backend:
    register(backend, WORDPIECE)
    place(backend, WORDPIECE)
    return backend


def _learn_segments(
    morphemes: Bordered,
    normal: normalizers.Normalizer,
    characters: list[str],
    inner: list[str],
    vocab_size: int,
    min_count: int,
) -> dict[str, int]:
    """Learn entries that cross no border of morphemes; the entries with their ids.

    The library marks all characters of a word but its first as continuations. A morpheme inside a word has to be marked
    from its first character, so continuations are written as private characters here, and the library learns plain BPE.
    """
    marker = WORDPIECE.word_marker.text
    private = {piece.removeprefix(marker): chr(PRIVATE + number) for number, piece in enumerate(inner)}
    plain = {code: character for character, code in private.items()}
    first, words = set(characters), Counter[str]()
    for word, count in segments(morphemes).items():
        for segment in continued(word, normal):
            codes = [private.get(c, "") if place or segment.continues else c for place, c in enumerate(segment.text)]
            if all(codes) and first.issuperset(segment.text) and len(codes) <= MAX_WORD:
                words["".join(codes)] += count
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=[*WORDPIECE.special_tokens, *characters, *private.values()],
        initial_alphabet=[],
        limit_alphabet=len(characters) + len(inner),
        show_progress=False,
    )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.train_from_iterator(repeated(words), trainer)
    found = {}
    for entry, number in sorted(backend.get_vocab().items(), key=lambda item: item[1]):
        text = "".join(plain.get(c, c) for c in entry)
        found[marker + text if entry[0] in plain else text] = number
    return found


def read(path: Path, settings: Mapping[str, Any]) -> Backend:
    """Make a tokenizer from a `vocab.txt` as in the released models, with their normalisation."""
    try:
        vocab = {token: i for i, token in enumerate(path.read_text(encoding="utf-8").split("\n")) if token}
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None
    lowercase, strip = bool(settings.get("do_lower_case", True)), settings.get("strip_accents")
    normal = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=lowercase if strip is None else strip,
        lowercase=lowercase,
    )
    frame = named(WORDPIECE, settings)
    backend = _pipeline(_model(vocab, frame.unknown), normal)
    register(backend, frame, settings)
    place(backend, frame)
    return backend


def _model(vocab: dict[str, int] | None = None, unknown: str = WORDPIECE.unknown) -> models.Model:
    return models.WordPiece(vocab or {}, unk_token=unknown, max_input_chars_per_word=MAX_WORD)


def _pipeline(model: models.Model, normal: normalizers.Normalizer) -> Backend:
    backend = Backend(model)
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=WORDPIECE.word_marker.text)
    return backend
