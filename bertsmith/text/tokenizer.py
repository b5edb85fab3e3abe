"""Tokenizers of every kind: opening, encoding, saving, on top of the `tokenizers` library.

A tokenizer folder holds `tokenizer.json` (the whole tokenizer) and `tokenizer_config.json` (so that `transformers`
opens the folder and gives the same tokens). Beside them are the files in which released models have their
vocabularies: `vocab.txt` for WordPiece (BERT) and words (ELMo), `vocab.json` and `merges.txt` for byte-level BPE
(RoBERTa) and for BPE with marked ends of words (OpenAI GPT). A folder that has only such files, or only SentencePiece's
(Unigram: `spiece.model` of ALBERT, `spm.model` of DeBERTa), is opened as well; such a file is written back, but none is
made for a trained vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, models
from tokenizers import Tokenizer as Backend

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.text import byte_bpe, unigram, word_bpe, wordpiece, words
from bertsmith.text.frame import ALBERT, GPT, GPT_TEXT, ROBERTA, WORDPIECE, WORDS, Frame, Joiner, stands_alone
from bertsmith.text.morphemes import Bordered
from bertsmith.text.normalisation import OWN, Normalisation, folds_repeats
from bertsmith.text.offsets import Aligned
from bertsmith.text.opening import WHOLE, lowercases, open_backend
from bertsmith.text.safe import REPLACEMENT, valid_text
from bertsmith.text.special_tokens import TOKEN_FIELDS, as_written, frame_of, token_fields
from bertsmith.text.spelling import Characters, NewWords, spell_vocabulary

Kind = Literal["wordpiece", "bytes", "unigram", "bpe", "words"]
KINDS: dict[type, Kind] = {
    models.WordPiece: "wordpiece",
    models.BPE: "bytes",
    models.Unigram: "unigram",
    models.WordLevel: "words",
}
SETTINGS = "tokenizer_config.json"
KEPT = (  # fields of tokenizer_config.json that are written back as they were read, for `transformers`
    *TOKEN_FIELDS,
    *("bos_token", "eos_token", "additional_special_tokens", "extra_special_tokens"),
    *("padding_side", "truncation_side", "clean_up_tokenization_spaces", "add_prefix_space", "keep_accents"),
)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Turns text into token ids and back; its frame defines how parts of text become a sequence.

    With `spells` it belongs to an encoder that reads the characters of words (ELMo): batches then need them beside the
    ids. `opened` returns a tokenizer that gives words outside the vocabulary ids of their own, after all others, so
    that these words keep their characters; it remembers them in `new_words`.
    """

    backend: Backend
    lowercase: bool
    settings: Mapping[str, Any] = field(default_factory=dict)  # the tokenizer_config.json that it was opened with
    frame: Frame = WORDPIECE
    spells: bool = False
    new_words: NewWords | None = None
    pieces: Mapping[str, bytes] = field(default_factory=dict)  # SentencePiece's file, which is written back as it was

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Open a tokenizer folder, or a model folder with a tokenizer in it."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such folder: {folder}; `bertsmith tokenizer train TEXT --out {folder}` makes one")
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", SETTINGS):  # older releases name special tokens in a file of their own
            settings |= read_json(folder / name) if (folder / name).exists() else {}
        backend = open_backend(folder, settings)
        backend.no_padding()
        backend.no_truncation()
        frame = frame_of(backend, settings)
        if missing := [name for name in frame.special_tokens if backend.token_to_id(name) is None]:
            raise UserError(f"{folder}: the vocabulary lacks {', '.join(missing)}, which BERT needs")
        tokenizer = cls(backend, lowercases(backend), settings, frame)
        names = (unigram.PIECES, unigram.DEBERTA_PIECES) if tokenizer.kind == "unigram" else ()
        return replace(tokenizer, pieces={n: (folder / n).read_bytes() for n in names if (folder / n).is_file()})

    def save(self, folder: str | Path, max_length: int | None = None, num_segments: int = 2) -> None:
        """Write the files of a tokenizer folder.

        `max_length` is where other programs truncate texts; a model with fewer than two segments gets no numbers of
        them from other programs.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files(max_length, num_segments).items():
            (folder / name).write_bytes(data)

    def files(self, max_length: int | None = None, num_segments: int = 2) -> dict[str, bytes]:
        """The files of a tokenizer folder, by name; in `vocab.txt` an id without a token is an empty line."""
        segments = ["token_type_ids"] if min(len(self.frame.segments), num_segments) > 1 else []
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "do_lower_case": self.lowercase,
            "model_max_length": max_length or self.settings.get("model_max_length") or 512,
            "model_input_names": ["input_ids", *segments, "attention_mask"],
            **token_fields(self.frame, self.backend),
            **{name: as_written(self.settings[name]) for name in KEPT if self.settings.get(name) is not None},
        }
        texts = {WHOLE: self.backend.to_str(pretty=True)}
        if self.kind in ("wordpiece", "words"):
            texts["vocab.txt"] = "".join(f"{self.token(number)}\n" for number in range(self.vocab_size))
        elif self.kind in ("bytes", "bpe"):
            texts |= byte_bpe.files(self.backend)
        texts[SETTINGS] = json.dumps(settings, indent=2) + "\n"
        files = {name: text.encode("utf-8") for name, text in texts.items()}
        return {**files, **self.pieces}

    @property
    def kind(self) -> Kind:
        """The kind of vocabulary."""
        kind = KINDS.get(type(self.backend.model), "wordpiece")
        return "bpe" if kind == "bytes" and self.frame.word_marker == GPT_TEXT.word_marker else kind

    def length_within(self, positions: int) -> int:
        """The length at which other programs truncate texts: the folder's own, but at most a model's positions."""
        length = self.settings.get("model_max_length")
        return min(int(length), positions) if isinstance(length, (int, float)) and length > 0 else positions

    @cached_property
    def hash(self) -> str:
        """A digest of everything that changes the tokens, by which two tokenizers are compared."""
        text = self.backend.to_str()
        if self.kind == "unigram":  # the library reads back some scores with another last digit
            values = json.loads(text)
            values["model"]["vocab"] = [[entry, round(score, 6)] for entry, score in values["model"]["vocab"]]
            text = json.dumps(values)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of embeddings of a model, even if lines of `vocab.txt` are empty."""
        return max(self.backend.get_vocab().values()) + 1

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of the special tokens, in the order of `frame.special_tokens`."""
        return tuple(map(self.id, self.frame.special_tokens))

    @cached_property
    def joiner(self) -> Joiner:
        """Joins parts of text with this vocabulary's special tokens."""
        names = (self.frame.first, self.frame.between, self.frame.last)
        first, between, last = (np.array([self.id(name) for name in some], dtype=np.int64) for some in names)
        return Joiner(self.frame, first, between, last, self.unknown_id)

    @property
    def unknown_id(self) -> int:
        return self.id(self.frame.unknown)

    @property
    def pad_id(self) -> int:
        """The id at padded places, which attention masks; the unknown token's if the frame has no pad token."""
        return self.id(self.frame.pad or self.frame.unknown)

    @property
    def mask_id(self) -> int:
        if self.frame.mask is None:
            raise UserError("the tokenizer has no mask token, so no word can be masked; take a model that has one")
        return self.id(self.frame.mask)

    @cached_property
    def is_special(self) -> NDArray[np.bool_]:
        """Whether each id is a special token's (V,)."""
        return np.isin(np.arange(self.vocab_size), self.special_ids)

    @cached_property
    def is_marked(self) -> NDArray[np.bool_]:
        """Whether the token of each id is marked as the begin, the end or the continuation of a word (V,).

        Where a space marks the begin of a word, punctuation and ideographs begin words as well, as in ALBERT's code:
        they have no space before them, and a word would include the full stop after it.
        """
        marker, numbers = self.frame.word_marker, range(self.vocab_size)
        marked = np.array([marker.marks(self.token(number)) for number in numbers])
        return marked | [marker.on == "first" and stands_alone(self.spellings[number]) for number in numbers]

    @cached_property
    def spellings(self) -> list[str]:
        """The text of each token, without the marker of words; bytes that are no character are U+FFFD (V,)."""
        if self.kind == "bytes":
            texts = (self.backend.decode([number], skip_special_tokens=False) for number in range(self.vocab_size))
            return [text.removeprefix(" ") for text in texts]
        return [self.frame.word_marker.strip(self.token(number)) for number in range(self.vocab_size)]

    def shown(self, number: int) -> str:
        """A token for a reader: one of bytes is shown as the text that they are, with the marker of words."""
        token, text, marker = self.token(number), self.spellings[number], self.frame.word_marker
        if self.kind != "bytes" or not text.strip() or REPLACEMENT in text:
            return token
        return marker.text + text if marker.marks(token) else text

    def spell(self, ids: NDArray[Any]) -> str:
        """The words of tokens, with a space between two words and no other clean-up."""
        if self.kind == "bytes":
            return self.backend.decode(ids.tolist(), skip_special_tokens=False).strip()
        return self.frame.word_marker.spell([self.token(number) for number in ids.tolist()])

    @cached_property
    def space(self) -> str:
        """What has to stand before a word that is encoded alone, to be the word inside a text: a space, or nothing."""
        first = self.encode(["a"])[0][:1]
        inside = self.frame.word_marker.on != "first" or any(self.is_marked[first])
        return "" if inside else " "

    def continues(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Which tokens of a sequence continue the word of the token before them; special tokens belong to no word."""
        special = self.is_special[ids]
        special[1:] |= special[:-1].copy()
        return self.frame.word_marker.continues(self.is_marked[ids]) & ~special

    def frames(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Which tokens of sequences are those that the frame puts around and between parts (BERT: `[CLS]`, `[SEP]`)."""
        return np.isin(ids, np.concatenate([self.joiner.first, self.joiner.between, self.joiner.last]))

    def id(self, token: str) -> int:
        """The id of a token; an error if the vocabulary lacks it."""
        number = self.backend.token_to_id(token)
        if number is None:
            raise UserError(f"token {token!r} is not in the vocabulary")
        return number

    def token(self, number: int) -> str:
        return self.backend.id_to_token(number) or ""

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Token ids of each text; `special` adds the special tokens of a sequence of one part."""
        texts = [valid_text(text) for text in texts]
        if self.new_words is None:
            ids = [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            ids = [found.ids for found in self.encode_aligned(texts)]
        return [self.joiner.join(found).tokens.tolist() for found in ids] if special else ids

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        """Tokens with their character offsets, without special tokens."""
        texts = [valid_text(text) for text in texts]
        found = self.backend.encode_batch(texts, add_special_tokens=False)
        folds = self._folds_repeats
        return [Aligned(text, e, self._with_new_words(text, e), folds) for text, e in zip(texts, found, strict=True)]

    @cached_property
    def _folds_repeats(self) -> bool:
        return folds_repeats(self.backend.normalizer)

    def opened(self) -> Tokenizer:
        """This tokenizer with an open vocabulary where its encoder reads characters, else as it is."""
        if not self.spells:
            return self
        opened = copy.copy(self)  # with the tables that were computed
        object.__setattr__(opened, "new_words", NewWords())
        return opened

    def _with_new_words(self, text: str, found: Encoding) -> list[int]:
        """The ids of a text, where unknown words have ids of their own if the vocabulary is open."""
        if self.new_words is None or self.unknown_id not in found.ids:
            return found.ids
        ids = found.ids
        for place, (begin, end) in enumerate(found.offsets):
            word = self.normalized(text[begin:end])
            if ids[place] == self.unknown_id and word not in ("", self.frame.unknown):
                ids[place] = self.vocab_size + self.new_words.number(word)
        return ids

    @cached_property
    def _characters(self) -> Characters:
        return spell_vocabulary([self.token(number) for number in range(self.vocab_size)], self.frame)

    def characters(self, ids: NDArray[Any]) -> Characters:
        """The characters of tokens (T, C), also of new words."""
        is_new = ids >= self.vocab_size
        found = self._characters[np.where(is_new, 0, ids)]
        if self.new_words is not None and is_new.any():
            found[is_new] = [self.new_words.rows[number] for number in ids[is_new] - self.vocab_size]
        return found

    def known(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Ids in which new words are the unknown token again."""
        return np.where(ids < self.vocab_size, ids, self.unknown_id).astype(ids.dtype)

    def for_tasks(self) -> Tokenizer:
        """This tokenizer with the special tokens of tasks, which OpenAI GPT gets after its pre-training."""
        if self.frame.size(1):
            return self
        marks = replace(GPT, unknown=self.frame.unknown, word_marker=self.frame.word_marker)
        return replace(self, backend=word_bpe.with_frame(self.backend, marks), frame=marks)

    def normalized(self, text: str) -> str:
        """The text after the tokenizer's normalisation: cleaned and, if uncased, lower-cased."""
        return self.backend.normalizer.normalize_str(text) if self.backend.normalizer is not None else text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens; the space of the first word is dropped."""
        return self.backend.decode(list(ids)).removeprefix(" ")


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    cased: bool = False,
    jamo: bool = False,
    normalise: Normalisation = OWN,
    morphemes: Bordered | None = None,
    min_count: int = 2,
) -> Tokenizer:
    """Train a WordPiece vocabulary (BERT)."""
    backend = wordpiece.train(
        repeatable(texts),
        vocab_size,
        cased=cased,
        jamo=jamo,
        normalise=normalise,
        morphemes=morphemes,
        min_count=min_count,
    )
    return Tokenizer(backend, lowercase=not cased, frame=WORDPIECE)


def train_byte_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    cased: bool = True,
    normalise: Normalisation = OWN,
    morphemes: Bordered | None = None,
) -> Tokenizer:
    """Train a byte-level BPE vocabulary (RoBERTa)."""
    backend = byte_bpe.train(repeatable(texts), vocab_size, cased=cased, normalise=normalise, morphemes=morphemes)
    return Tokenizer(backend, lowercase=not cased, settings={"add_prefix_space": True}, frame=ROBERTA)


def train_unigram(
    texts: Iterable[str],
    vocab_size: int,
    *,
    cased: bool = False,
    normalise: Normalisation = OWN,
    morphemes: Bordered | None = None,
) -> Tokenizer:
    """Train a Unigram vocabulary (ALBERT)."""
    backend = unigram.train(repeatable(texts), vocab_size, cased=cased, normalise=normalise, morphemes=morphemes)
    return Tokenizer(backend, lowercase=not cased, settings={"keep_accents": cased}, frame=ALBERT)


def train_words(
    texts: Iterable[str], vocab_size: int, *, cased: bool = True, normalise: Normalisation = OWN
) -> Tokenizer:
    """Train a vocabulary of whole words (ELMo)."""
    backend = words.train(repeatable(texts), vocab_size, cased=cased, normalise=normalise)
    return Tokenizer(backend, lowercase=not cased, frame=WORDS)


def train_word_bpe(
    texts: Iterable[str], vocab_size: int, *, cased: bool = False, normalise: Normalisation = OWN
) -> Tokenizer:
    """Train a BPE vocabulary with marked ends of words (OpenAI GPT)."""
    backend = word_bpe.train(repeatable(texts), vocab_size, cased=cased, normalise=normalise)
    return Tokenizer(backend, lowercase=not cased, frame=GPT_TEXT)


def repeatable(texts: Iterable[str]) -> Iterable[str]:
    """Refuse texts that can be iterated only once: characters are counted first, then words."""
    if iter(texts) is texts:
        raise TypeError("a vocabulary is trained in several passes over the texts: give a list, not an iterator")
    return texts
