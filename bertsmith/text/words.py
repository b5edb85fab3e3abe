"""Vocabularies of whole words (ELMo): the most frequent ones; any other word is the unknown token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from bertsmith.errors import UserError
from bertsmith.text.frame import WORDS
from bertsmith.text.normalisation import OWN, Normalisation
from bertsmith.text.special_tokens import place, register
from bertsmith.text.wordpiece import normalizer


def train(
    texts: Iterable[str], vocab_size: int, *, cased: bool, normalise: Normalisation = OWN, min_count: int = 2
) -> Backend:
    """Train a vocabulary of the words that occur at least `min_count` times, the most frequent ones first.

    Text is cleaned and divided at spaces and punctuation, as for WordPiece.
    """
    if vocab_size < 2 * len(WORDS.special_tokens):
        raise UserError(f"--vocab-size {vocab_size} is too small; 20000 suits a few megabytes of text, 100000 many")
    backend = Backend(models.WordLevel({}, unk_token=WORDS.unknown))
    backend.normalizer = normalizer(cased, chosen=normalise)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=min_count, special_tokens=list(WORDS.special_tokens), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() == len(WORDS.special_tokens):
        raise UserError(f"no word of the text occurs {min_count} times, so there is nothing to train a vocabulary on")
    register(backend, WORDS)
    place(backend, WORDS)
    return backend
