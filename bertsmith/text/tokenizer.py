"""WordPiece tokenizers: training, encoding, saving, on top of the `tokenizers` library.

A tokenizer folder holds `tokenizer.json` (the whole tokenizer), `vocab.txt` (the form of the released BERT models) and
`tokenizer_config.json` (so that `transformers` opens the folder and gives the same tokens).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import regular_file
from bertsmith.text.alphabet import alphabet, inner_pieces
from bertsmith.text.frame import WORDPIECE, Frame, Joiner, wordpiece_frame
from bertsmith.text.offsets import Aligned
from bertsmith.text.safe import safe_text

MAX_WORD = 100  # characters; a longer word is [UNK], as in `transformers`
_LONG_WORD = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{MAX_WORD + 1},}}")  # without spaces and ASCII punctuation
FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
TOKEN_FIELDS = {  # the frame's names and those of tokenizer_config.json, which may rename special tokens
    "pad": "pad_token",
    "unknown": "unk_token",
    "first": "cls_token",
    "last": "sep_token",
    "mask": "mask_token",
}
KEPT = (  # fields of tokenizer_config.json that are written back as they were read, for `transformers`
    *TOKEN_FIELDS.values(),
    *("bos_token", "eos_token", "additional_special_tokens", "extra_special_tokens"),
    *("padding_side", "truncation_side", "clean_up_tokenization_spaces"),
)


def normalizer(cased: bool = False, jamo: bool = False) -> normalizers.Normalizer:
    """BERT's clean-up: drop control characters, put spaces around CJK, and if uncased, lower-case and strip accents.

    Stripping accents decomposes every character, and the released code leaves Hangul decomposed, as jamo. Here it is
    composed again; `jamo=True` keeps the released behaviour, for vocabularies that were trained with it.
    """
    bert = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=not cased, lowercase=not cased
    )
    return bert if jamo and not cased else normalizers.Sequence([bert, normalizers.NFC()])


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Turns text into token ids and back; its frame defines how parts of text become a sequence."""

    backend: Backend
    lowercase: bool
    settings: Mapping[str, Any] = field(default_factory=dict)  # the tokenizer_config.json that it was opened with
    frame: Frame = WORDPIECE

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Open a tokenizer folder, or a model folder with a tokenizer in it."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such folder: {folder}; `bertsmith tokenizer train TEXT --out {folder}` makes one")
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", FILES[2]):  # older releases name special tokens in a file of their own
            settings |= read_json(folder / name) if (folder / name).exists() else {}
        if (folder / "tokenizer.json").exists():
            backend = _read_backend(regular_file(folder / "tokenizer.json"))
        elif (folder / "vocab.txt").exists():
            backend = _from_vocab(regular_file(folder / "vocab.txt"), settings)
        else:
            raise UserError(f"{folder} holds no tokenizer.json and no vocab.txt")
        backend.no_padding()
        backend.no_truncation()
        frame = _frame(settings)
        if missing := [name for name in frame.special_tokens if backend.token_to_id(name) is None]:
            raise UserError(f"{folder}: the vocabulary lacks {', '.join(missing)}, which BERT needs")
        return cls(backend, _lowercases(backend), settings, frame)

    def save(self, folder: str | Path, max_length: int | None = None) -> None:
        """Write the three files of a tokenizer folder; `max_length` is where other programs truncate texts."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files(max_length).items():
            (folder / name).write_bytes(data)

    def files(self, max_length: int | None = None) -> dict[str, bytes]:
        """The files of a tokenizer folder, by name; in `vocab.txt` an id without a token is an empty line."""
        tokens = {number: token for token, number in self.backend.get_vocab().items()}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "do_lower_case": self.lowercase,
            "model_max_length": max_length or self.settings.get("model_max_length") or 512,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **_token_fields(self.frame),
            **{name: self.settings[name] for name in KEPT if self.settings.get(name) is not None},
        }
        texts = (
            self.backend.to_str(pretty=True),
            "".join(f"{tokens.get(number, '')}\n" for number in range(self.vocab_size)),
            json.dumps(settings, indent=2) + "\n",
        )
        return {name: text.encode("utf-8") for name, text in zip(FILES, texts, strict=True)}

    def length_within(self, positions: int) -> int:
        """The length at which other programs truncate texts: the folder's own, but at most a model's positions."""
        length = self.settings.get("model_max_length")
        return min(int(length), positions) if isinstance(length, (int, float)) and length > 0 else positions

    @cached_property
    def hash(self) -> str:
        """A digest of everything that changes the tokens, by which two tokenizers are compared."""
        return hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()[:16]

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
        return Joiner(self.frame, *(np.array([self.id(name) for name in some], dtype=np.int64) for some in names))

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
        """Whether the token of each id carries the marker by which pieces of words are recognised (V,)."""
        return np.array([self.frame.word_marker.marks(self.token(number)) for number in range(self.vocab_size)])

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
        found = self.backend.encode_batch_fast([safe_text(text) for text in texts], add_special_tokens=False)
        return [self.joiner.join(e.ids).tokens.tolist() if special else e.ids for e in found]

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        """Tokens with their character offsets, without special tokens."""
        texts = [safe_text(text) for text in texts]
        found = self.backend.encode_batch(texts, add_special_tokens=False)
        return [Aligned(text, encoding) for text, encoding in zip(texts, found, strict=True)]

    def normalized(self, text: str) -> str:
        """The text after the tokenizer's normalisation: cleaned and, if uncased, lower-cased."""
        return self.backend.normalizer.normalize_str(text) if self.backend.normalizer is not None else text

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids))


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, *, cased: bool = False, jamo: bool = False, min_count: int = 2
) -> Tokenizer:
    """Train a WordPiece vocabulary; `texts` is iterated twice, first to count characters, then to count words.

    The entries of the alphabet (see `alphabet`) are at most half of the vocabulary. They get their ids before training,
    in the order of the characters: the library would number them in the order of a hash table and break ties by these
    numbers, but the same text has to give the same vocabulary.
    """
    if iter(texts) is texts:
        raise TypeError("train_wordpiece iterates the texts twice: give a list, not an iterator")
    if vocab_size < 2 * len(WORDPIECE.special_tokens):
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 30000 many")
    if cased and jamo:
        raise UserError(
            "--jamo is for uncased vocabularies: with --cased Hangul is never decomposed; give only one of them"
        )
    backend = _backend(_wordpiece(), normalizer(cased, jamo))
    room = max(vocab_size // 2, min(128, vocab_size - len(WORDPIECE.special_tokens)))
    characters = alphabet(texts, backend, vocab_size, room)
    if not characters:
        raise UserError("the text has no words, so there is nothing to train a vocabulary on")
    inner = inner_pieces(characters, backend)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=[*WORDPIECE.special_tokens, *characters, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    backend.train_from_iterator(_short_words(texts), trainer)
    trained = _backend(_wordpiece(backend.get_vocab()), backend.normalizer)
    return Tokenizer(_with_special_tokens(trained, WORDPIECE), lowercase=not cased)


def _short_words(texts: Iterable[str]) -> Iterator[str]:
    """Cut the longest words (base64, DNA) of texts: the time of training grows with the square of a word's length."""
    for text in texts:
        yield _LONG_WORD.sub(lambda found: " ".join(re.findall(f".{{1,{MAX_WORD}}}", found[0])), text)


def _wordpiece(vocab: dict[str, int] | None = None, unknown: str = WORDPIECE.unknown) -> models.Model:
    return models.WordPiece(vocab or {}, unk_token=unknown, max_input_chars_per_word=MAX_WORD)


def _backend(model: models.Model, normal: normalizers.Normalizer) -> Backend:
    backend = Backend(model)
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=WORDPIECE.word_marker.text)
    return backend


def _frame(settings: Mapping[str, Any]) -> Frame:
    """BERT's frame with the token names in a tokenizer's settings, where a token is a name or an object."""
    written = {name: settings.get(key) for name, key in TOKEN_FIELDS.items()}
    names = {name: token.get("content") if isinstance(token, dict) else token for name, token in written.items()}
    return wordpiece_frame(**{name: token for name, token in names.items() if isinstance(token, str) and token})


def _token_fields(frame: Frame) -> dict[str, str]:
    """The names of the special tokens by their fields in `tokenizer_config.json`."""
    tokens = {"first": frame.first[0], "last": frame.last[0], "unknown": frame.unknown}
    tokens |= {name: token for name, token in (("pad", frame.pad), ("mask", frame.mask)) if token is not None}
    return {key: tokens[name] for name, key in TOKEN_FIELDS.items() if name in tokens}


def _with_special_tokens(backend: Backend, frame: Frame) -> Backend:
    """Register the special tokens, and set the library's template for texts and pairs."""
    backend.add_special_tokens([name for name in frame.special_tokens if backend.token_to_id(name) is not None])
    ids = {name: backend.token_to_id(name) for name in (*frame.first, *frame.between, *frame.last)}
    if None not in ids.values():
        single, pair = ([f"{name}:{i}" for name, i in frame.arrange(parts)] for parts in (["$A"], ["$A", "$B"]))
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(ids.items())
        )
    return backend


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer file: {error}") from None


def _lowercases(backend: Backend) -> bool:
    """Whether the normaliser lower-cases, whatever `tokenizer_config.json` says."""
    return backend.normalizer is not None and backend.normalizer.normalize_str("A") == "a"


def _from_vocab(path: Path, settings: dict[str, Any]) -> Backend:
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
    frame = _frame(settings)
    return _with_special_tokens(_backend(_wordpiece(vocab, frame.unknown), normal), frame)
