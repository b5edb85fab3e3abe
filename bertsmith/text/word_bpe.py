"""BPE vocabularies whose words end with a marker (OpenAI GPT; Sennrich et al. 2016): training, and the released files.

A word is divided into letters, the last of them with the marker `</w>`, and pairs of pieces are merged in the order of
the merges. A letter that the vocabulary lacks is the unknown token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bertsmith.errors import UserError
from bertsmith.text import wordpiece
from bertsmith.text.alphabet import alphabet, joining
from bertsmith.text.byte_bpe import MERGES, learn
from bertsmith.text.frame import GPT, GPT_TEXT, Frame
from bertsmith.text.normalisation import OWN, Normalisation
from bertsmith.text.special_tokens import named, place, register

END = GPT.word_marker.text


def train(
    texts: Iterable[str], vocab_size: int, *, cased: bool, normalise: Normalisation = OWN, min_count: int = 2
) -> Backend:
    """Train a BPE vocabulary; `texts` is iterated twice, first to count characters, then to count words.

    As with WordPiece, the entries of the alphabet are at most half of the vocabulary and get their ids before training,
    in the order of the characters, and Hangul stays composed. The released vocabulary has 40,000 merges and 478 other
    entries.
    """
    special = GPT_TEXT.special_tokens
    if vocab_size < 2 * len(special) + 8:
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 40000 many")
    backend = _pipeline(_model(), wordpiece.normalizer(cased, chosen=normalise))
    room = max(vocab_size // 2, min(128, vocab_size - len(special)))
    characters = alphabet(texts, backend, vocab_size, room)
    if not characters:
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    entries = [*joining(characters, backend), *(character + END for character in characters)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=[*special, *entries],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        end_of_word_suffix=END,
        show_progress=False,
    )
    trained = _pipeline(_model(*learn(backend, trainer, texts)), backend.normalizer)
    register(trained, GPT_TEXT)
    return trained


def marks_ends(vocab: Collection[str]) -> bool:
    """Whether the entries of a `vocab.json` mark the ends of words, as OpenAI GPT's do; RoBERTa's mark begins."""
    return any(len(entry) == 1 + len(END) and entry.endswith(END) for entry in vocab)


def read(vocab: Path, settings: Mapping[str, Any]) -> Backend:
    """Make a tokenizer from a released `vocab.json` and the `merges.txt` beside it, with their normalisation."""
    frame = named(GPT_TEXT, settings)
    try:
        model = models.BPE.from_file(
            str(vocab), str(vocab.with_name(MERGES)), unk_token=frame.unknown, end_of_word_suffix=END
        )
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{vocab} and {MERGES} are not a BPE vocabulary: {error}") from None
    backend = _pipeline(model, normalizers.BertNormalizer(lowercase=True))
    register(backend, frame, settings)
    return backend


def with_frame(backend: Backend, frame: Frame) -> Backend:
    """A copy of a tokenizer with the special tokens of a frame after its entries, and their places."""
    copy = Backend.from_str(backend.to_str())
    copy.add_special_tokens(list(frame.special_tokens))
    place(copy, frame)
    return copy


def _model(vocab: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None) -> models.BPE:
    return models.BPE(vocab or {}, merges or [], unk_token=GPT.unknown, end_of_word_suffix=END)


def _pipeline(model: models.Model, normal: normalizers.Normalizer) -> Backend:
    backend = Backend(model)
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix=END)
    return backend
