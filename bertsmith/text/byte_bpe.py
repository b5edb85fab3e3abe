"""Byte-level BPE vocabularies (RoBERTa; Radford et al. 2019, section 2.2): training, and reading the released files.

Every text is a row of 256 possible bytes, so no token is ever unknown. A word begins with its space, written `Ġ`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bertsmith.errors import UserError
from bertsmith.text.frame import DEBERTA, ROBERTA, Frame
from bertsmith.text.long_words import short_words
from bertsmith.text.morphemes import BORDER, Bordered
from bertsmith.text.normalisation import OWN, Normalisation
from bertsmith.text.special_tokens import named, place, register

VOCAB, MERGES = "vocab.json", "merges.txt"
BYTES = pre_tokenizers.ByteLevel.alphabet()
FIRST = (ROBERTA.first[0], str(ROBERTA.pad), ROBERTA.last[0], ROBERTA.unknown)  # RoBERTa's order; the mask is last


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    cased: bool,
    normalise: Normalisation = OWN,
    morphemes: Bordered | None = None,
    min_count: int = 2,
) -> Backend:
    """Train a byte-level BPE vocabulary.

    Text is composed first (NFC), so that a letter has the same bytes however it was typed. A space is put before every
    text, so that its first word is the same token as inside a text: sentences are tokenised one by one.
    """
    least = len(FIRST) + len(BYTES) + 1
    if vocab_size < least:
        raise UserError(f"--vocab-size {vocab_size} is too small: bytes and special tokens alone are {least} entries")
    if not any(text.strip() for text in texts):
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    composed = normalise.around([] if cased else [normalizers.Lowercase()])
    backend = _pipeline(models.BPE(), composed, prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_count,
        special_tokens=list(FIRST),
        initial_alphabet=BYTES,
        show_progress=False,
    )
    if morphemes is not None:
        texts = (f" {text}" for text in morphemes)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(BORDER, "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    vocab, merges = learn(backend, trainer, texts)
    model = models.BPE({**vocab, str(ROBERTA.mask): len(vocab)}, merges)
    return _framed(_pipeline(model, composed, prefix_space=True), ROBERTA, {"add_prefix_space": True})


def read(vocab: Path, settings: Mapping[str, Any]) -> Backend:
    """Make a tokenizer from a released `vocab.json` and the `merges.txt` beside it, without any normalisation.

    The special tokens are RoBERTa's or, where the vocabulary has those, DeBERTa's.
    """
    try:
        model = models.BPE.from_file(str(vocab), str(vocab.with_name(MERGES)))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{vocab} and {MERGES} are not a byte-level vocabulary: {error}") from None
    backend = _pipeline(model, None, prefix_space=bool(settings.get("add_prefix_space", False)))
    if backend.token_to_id(ROBERTA.first[0]) is None and backend.token_to_id(DEBERTA.first[0]) is not None:
        frame = named(DEBERTA, settings)
        register(backend, frame, settings)
        place(backend, frame)
        return backend
    return _framed(backend, named(ROBERTA, settings), settings)


def learn(backend: Backend, trainer: Any, texts: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a BPE; its entries with their ids, and its merges in their order, as `models.BPE` takes them."""
    backend.train_from_iterator(short_words(texts), trainer)
    found = rules(backend)
    return found["vocab"], [(first, second) for first, second in found["merges"]]


def rules(backend: Backend) -> dict[str, Any]:
    """The entries with their ids, and the merges in their order."""
    return json.loads(backend.model.__getstate__())  # type: ignore[no-any-return]


def files(backend: Backend) -> dict[str, str]:
    """The vocabulary in the two files of the released models, by name."""
    found = rules(backend)
    merges = "".join(f"{first} {second}\n" for first, second in found["merges"])
    return {VOCAB: json.dumps(found["vocab"], ensure_ascii=False), MERGES: f"#version: 0.2\n{merges}"}


def _pipeline(model: models.Model, normal: normalizers.Normalizer | None, prefix_space: bool) -> Backend:
    backend = Backend(model)
    if normal is not None:
        backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _framed(backend: Backend, frame: Frame, settings: Mapping[str, Any]) -> Backend:
    """Register the special tokens; offsets are trimmed to the letters, without the space of a word."""
    register(backend, frame, settings)
    first, last = backend.token_to_id(frame.first[0]), backend.token_to_id(frame.last[0])
    if first is not None and last is not None:
        backend.post_processor = processors.RobertaProcessing(
            (frame.last[0], last),
            (frame.first[0], first),
            bool(settings.get("trim_offsets", True)),
            bool(settings.get("add_prefix_space", False)),
        )
    return backend
