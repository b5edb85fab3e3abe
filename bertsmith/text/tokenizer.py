"""WordPiece: training, encoding, saving. The work is done by the `tokenizers` library.

A tokenizer folder holds `tokenizer.json` (all that it does), `vocab.txt` (the original's form) and
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

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import regular_file
from bertsmith.text.alphabet import alphabet, inner_pieces
from bertsmith.text.offsets import Aligned
from bertsmith.text.safe import safe_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD = 100  # characters; a longer word is [UNK], as in `transformers`
_LONG_WORD = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{MAX_WORD + 1},}}")  # without spaces and signs
FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
TOKEN_FIELDS = {token: f"{token[1:-1].lower()}_token" for token in SPECIAL_TOKENS}  # which may give them other names
KEPT = (  # of tokenizer_config.json: what we do not use and `transformers` does
    *TOKEN_FIELDS.values(),
    *("bos_token", "eos_token", "additional_special_tokens", "extra_special_tokens"),
    *("padding_side", "truncation_side", "clean_up_tokenization_spaces"),
)


def normalizer(cased: bool = False, jamo: bool = False) -> normalizers.Normalizer:
    """The original's clean-up: control characters, spaces around CJK, and for uncased: lower case, no accents.

    Taking accents off decomposes every character, and the original leaves Hangul so, as jamo. Here it is composed
    again; `jamo=True` keeps the original behaviour, for vocabularies that were trained with it.
    """
    bert = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=not cased, lowercase=not cased
    )
    return bert if jamo and not cased else normalizers.Sequence([bert, normalizers.NFC()])


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Turns text into token ids and back."""

    backend: Backend
    lowercase: bool
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the tokenizer_config.json that it was opened with

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Open a tokenizer folder, or a model folder that holds one."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such folder: {folder}; `bertsmith tokenizer train TEXT --out {folder}` makes one")
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", FILES[2]):  # older releases had a file for the names of the tokens
            settings |= read_json(folder / name) if (folder / name).exists() else {}
        if (folder / "tokenizer.json").exists():
            backend = _read_backend(regular_file(folder / "tokenizer.json"))
        elif (folder / "vocab.txt").exists():
            backend = _from_vocab(regular_file(folder / "vocab.txt"), settings)
        else:
            raise UserError(f"{folder} holds no tokenizer.json and no vocab.txt")
        backend.no_padding()
        backend.no_truncation()
        missing = [name for name in _names(settings).values() if backend.token_to_id(name) is None]
        if missing:
            raise UserError(f"{folder}: the vocabulary lacks {', '.join(missing)}, which BERT needs")
        return cls(backend, _lowercases(backend), settings)

    def save(self, folder: str | Path, max_length: int | None = None) -> None:
        """Write the three files of a tokenizer folder; `max_length` is for other programs, which cut texts by it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files(max_length).items():
            (folder / name).write_bytes(data)

    def files(self, max_length: int | None = None) -> dict[str, bytes]:
        """The files of a tokenizer folder, by name; in `vocab.txt` an id that no token has is an empty line."""
        tokens = {number: token for token, number in self.backend.get_vocab().items()}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "do_lower_case": self.lowercase,
            "model_max_length": max_length or self.settings.get("model_max_length") or 512,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **{name: token for token, name in TOKEN_FIELDS.items()},
            **{name: self.settings[name] for name in KEPT if self.settings.get(name) is not None},
        }
        texts = (
            self.backend.to_str(pretty=True),
            "".join(f"{tokens.get(number, '')}\n" for number in range(self.vocab_size)),
            json.dumps(settings, indent=2) + "\n",
        )
        return {name: text.encode("utf-8") for name, text in zip(FILES, texts, strict=True)}

    def length_within(self, positions: int) -> int:
        """Where other programs are to cut texts: as the folder said, and at most at the last position of a model."""
        said = self.settings.get("model_max_length")
        return min(int(said), positions) if isinstance(said, (int, float)) and said > 0 else positions

    @cached_property
    def hash(self) -> str:
        """What tells two tokenizers apart: a digest of all that changes the tokens."""
        return hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()[:16]

    @cached_property
    def vocab_size(self) -> int:
        """The largest id and one: a model has as many embeddings, also where lines of `vocab.txt` are empty."""
        return max(self.backend.get_vocab().values()) + 1

    @cached_property
    def _names(self) -> dict[str, str]:
        return _names(self.settings)

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of `[PAD] [UNK] [CLS] [SEP] [MASK]`, in this order."""
        return tuple(self.id(t) for t in SPECIAL_TOKENS)

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """The ids of the pieces that go on with a word: `##…`."""
        return tuple(sorted(i for token, i in self.backend.get_vocab().items() if token.startswith("##")))

    def id(self, token: str) -> int:
        """The id of a token that is known to be there; special ones go by BERT's names for them."""
        number = self.backend.token_to_id(self._names.get(token, token))
        if number is None:
            raise UserError(f"token {token!r} is not in the vocabulary")
        return number

    def token(self, number: int) -> str:
        return self.backend.id_to_token(number) or ""

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Token ids of each text; `special` adds `[CLS]` and `[SEP]`."""
        return [
            e.ids for e in self.backend.encode_batch_fast([safe_text(t) for t in texts], add_special_tokens=special)
        ]

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        """Tokens with their character offsets, without special tokens."""
        texts = [safe_text(text) for text in texts]
        found = self.backend.encode_batch(texts, add_special_tokens=False)
        return [Aligned(text, encoding) for text, encoding in zip(texts, found, strict=True)]

    def normalized(self, text: str) -> str:
        """The text as it is looked up in the vocabulary: cleaned and, where the tokenizer does so, in lower case."""
        return self.backend.normalizer.normalize_str(text) if self.backend.normalizer is not None else text

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids))


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, *, cased: bool = False, jamo: bool = False, min_count: int = 2
) -> Tokenizer:
    """Train a WordPiece vocabulary; `texts` is gone through twice, first for its characters, then for its words.

    The pieces of the alphabet (see `alphabet`) are at most half of the vocabulary. They get their ids before training,
    in the order of the characters: the library would number them in the order of a hash table and break ties by that,
    and the same text has to give the same vocabulary.
    """
    if iter(texts) is texts:
        raise TypeError("train_wordpiece goes through the texts twice: give a list, not an iterator")
    if vocab_size < 2 * len(SPECIAL_TOKENS):
        raise UserError(f"--vocab-size {vocab_size} is too small; 8000 suits a few megabytes of text, 30000 many")
    if cased and jamo:
        raise UserError("--jamo is for uncased vocabularies: with --cased Hangul is never taken apart; leave one out")
    backend = _backend(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=MAX_WORD), normalizer(cased, jamo))
    room = max(vocab_size // 2, min(128, vocab_size - len(SPECIAL_TOKENS)))
    characters = alphabet(texts, backend, vocab_size, room)
    if not characters:
        raise UserError("the text holds no words: nothing to train a vocabulary on")
    inner = inner_pieces(characters, backend)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=[*SPECIAL_TOKENS, *characters, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    backend.train_from_iterator(_short_words(texts), trainer)
    trained = models.WordPiece(backend.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=MAX_WORD)
    return Tokenizer(_with_special_tokens(_backend(trained, backend.normalizer), _names({})), lowercase=not cased)


def _short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts with their longest words cut: training takes the square of a word's length (base64, DNA)."""
    for text in texts:
        yield _LONG_WORD.sub(lambda found: " ".join(re.findall(f".{{1,{MAX_WORD}}}", found[0])), text)


def _backend(model: models.Model, normal: normalizers.Normalizer) -> Backend:
    backend = Backend(model)
    backend.normalizer = normal
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _names(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a tokenizer's settings call the special tokens; some write a token with all of its properties."""
    given = {token: settings.get(field) for token, field in TOKEN_FIELDS.items()}
    told = {token: name.get("content") if isinstance(name, dict) else name for token, name in given.items()}
    return {token: name if isinstance(name, str) and name else token for token, name in told.items()}


def _with_special_tokens(backend: Backend, names: Mapping[str, str]) -> Backend:
    """Mark the special tokens, and put `[CLS]` and `[SEP]` around texts and pairs."""
    backend.add_special_tokens([t for t in names.values() if backend.token_to_id(t) is not None])
    ids = {names[t]: backend.token_to_id(names[t]) for t in ("[CLS]", "[SEP]")}
    if None not in ids.values():
        first, last = ids
        backend.post_processor = processors.TemplateProcessing(
            single=[f"{first}:0", "$A:0", f"{last}:0"],
            pair=[f"{first}:0", "$A:0", f"{last}:0", "$B:1", f"{last}:1"],
            special_tokens=list(ids.items()),
        )
    return backend


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer file: {error}") from None


def _lowercases(backend: Backend) -> bool:
    """Whether texts lose their capitals: what is done, whatever `tokenizer_config.json` says of it."""
    return backend.normalizer is not None and backend.normalizer.normalize_str("A") == "a"


def _from_vocab(path: Path, settings: dict[str, Any]) -> Backend:
    """A folder as it was released: `vocab.txt` alone, with the original normalisation."""
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
    names = _names(settings)
    model = models.WordPiece(vocab, unk_token=names["[UNK]"], max_input_chars_per_word=MAX_WORD)
    return _with_special_tokens(_backend(model, normal), names)
