"""Add words to a vocabulary: WordPiece entries after the old ones, with embeddings for the new rows of a model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from bertsmith.config import write_json
from bertsmith.corpus.readers import Documents
from bertsmith.errors import UserError
from bertsmith.folders import new_folder, writes
from bertsmith.formats.hub import find_model
from bertsmith.progress import progress_bar, say
from bertsmith.text.opening import RELEASED, WHOLE
from bertsmith.text.safe import SafeTexts
from bertsmith.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from bertsmith.formats.family import Family
    from bertsmith.model.config import EncoderConfig

VOCABULARY_TENSORS = ("encoder.embeddings.tokens.weight", "masked_lm.decoder.bias", "causal_lm.decoder.bias")
MIN_COUNT = 5  # the least number of occurrences of a word that is taken from a text
MOST_WORDS = 2_000_000  # distinct words in memory; beyond it, words that were seen once are dropped


@writes()
def extend(
    source: str | Path,
    out: str | Path,
    *,
    words: Sequence[str] = (),
    texts: Sequence[str | Path] = (),
    count: int = 1000,
    field: str = "text",
    encoding: str = "",
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Add whole words to a tokenizer, or to a model and its tokenizer, and write them as a new folder.

    `words` are added as they are given; from `texts` the `count` words that save the most tokens are added. Old ids do
    not change. WordPiece takes the longest entry that a word begins with, so a longer word that begins with a new one
    is split after it. A word that the pre-tokenizer splits, or that is an entry already, is skipped. `field`,
    `encoding` and `skip_bad` are those of `train_tokenizer`.
    """
    if not words and not texts:
        raise UserError("no words given: name a file with --words, or texts to take them from with --from")
    folder, is_model = find_tokenizer(source)
    tokenizer = Tokenizer.load(folder)
    vocabulary = _Vocabulary.of(tokenizer, folder)
    safe = SafeTexts()
    words = [safe.text(word, "the given words") for word in words]
    safe.say()
    with new_folder(out) as work:
        given, passed_over = vocabulary.choose(words)
        found = []
        if texts:
            documents = Documents.of(texts, field, encoding, skip_bad)
            found = vocabulary.most_useful(documents, count, given)
        new = [*given, *found]
        if not new:
            reason = f"; skipped: {_list(passed_over)}" if passed_over else ""
            raise UserError(f"nothing new to add to the vocabulary of {folder}{reason}")
        extended = vocabulary.extended(new)
        if is_model:
            _extend_models(folder, work, tokenizer, extended, new, vocabulary.end)
        else:
            extended.save(work)
    if passed_over:
        say(f"note: skipped {len(passed_over)} of the given words: {_list(passed_over)}")
    return {
        "model" if is_model else "tokenizer": str(out),
        "added": len(new),
        "entries": extended.vocab_size,
        "first_id": vocabulary.end,
        "words": new,
        "passed_over": passed_over,
        "hash": extended.hash,
    }


def read_words(path: str | Path) -> list[str]:
    """Return the words of a file, one per line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise UserError(f"{path} holds no words; write one a line")
    return found


def find_tokenizer(source: str | Path) -> tuple[Path, bool]:
    """Return the folder to extend, and whether it holds a model or only a tokenizer."""
    path = Path(source)
    has_tokenizer = any((path / name).exists() for name in (WHOLE, *RELEASED))
    if has_tokenizer and not (path / "config.json").exists():
        return path, False
    return find_model(source), True


@dataclass(frozen=True, eq=False)
class _Vocabulary:
    """A WordPiece vocabulary that new entries are added to."""

    tokenizer: Tokenizer
    values: dict[str, Any]  # the content of tokenizer.json
    entries: dict[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path) -> _Vocabulary:
        values = json.loads(tokenizer.backend.to_str())
        kind = values["model"].get("type", "unknown")
        if kind != "WordPiece":
            raise UserError(
                f"{folder} has a {kind} tokenizer; only WordPiece can be extended, where an entry is found by its "
                f"letters alone and needs no merge rule or score"
            )
        return cls(tokenizer, values, tokenizer.backend.get_vocab())

    @property
    def end(self) -> int:
        """The first id that is free."""
        return max(self.entries.values()) + 1

    def choose(self, words: Iterable[str]) -> tuple[list[str], list[str]]:
        """The words that can be added, normalised, each once; and those that cannot, as they were given."""
        new: dict[str, None] = {}
        passed_over = []
        for word in words:
            if len(word.split()) != 1:
                raise UserError(f"{word!r} is not one word: an entry of the vocabulary holds no spaces")
            entry = self.entry(word.strip())
            if entry is None:
                passed_over.append(word)
            else:
                new[entry] = None
        return list(new), passed_over

    def entry(self, word: str) -> str | None:
        """The entry that a word would get; nothing if it has one, or is not whole when the model sees it."""
        parts = self.parts(word)
        added = (token["content"] for token in self.values["added_tokens"])  # these are split off from words
        if len(parts) != 1 or parts[0] in self.entries or any(token in word for token in added):
            return None
        return parts[0] if len(parts[0]) <= self.values["model"]["max_input_chars_per_word"] else None

    def parts(self, word: str) -> list[str]:
        """The words that the model sees: normalised, and cut by the pre-tokenizer."""
        normalizer, pre_tokenizer = self.tokenizer.backend.normalizer, self.tokenizer.backend.pre_tokenizer
        text = normalizer.normalize_str(word) if normalizer else word
        return [part for part, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else text.split()

    def most_useful(self, documents: Documents, count: int, taken: Iterable[str]) -> list[str]:
        """The words of texts that would save the most tokens: how often they occur × (their pieces − 1)."""
        if count < 1:
            raise UserError(f"--count {count} is too small; at least 1")
        counts: Counter[str] = Counter()
        for written, number in _count_words(documents).items():
            for part in self.parts(written):
                counts[part] += number
        known = {*self.entries, *taken}
        often = sorted(word for word, number in counts.items() if number >= MIN_COUNT and word not in known)
        often = [word for word in often if self.entry(word) == word]
        saved = {word: counts[word] * (self.pieces(word) - 1) for word in often}
        return sorted(often, key=lambda word: (-saved[word], word))[:count]

    def pieces(self, word: str) -> int:
        """How many pieces a word has now; an unknown word counts as split into its letters."""
        ids = self.tokenizer.encode([word])[0]
        return max(2, len(word)) if self.tokenizer.unknown_id in ids else len(ids)

    def extended(self, new: Sequence[str]) -> Tokenizer:
        """The tokenizer with new entries at the end; special and added tokens do not change."""
        vocab = {**self.entries, **{word: self.end + i for i, word in enumerate(new)}}
        # Added tokens have to be entries of the model as well: the library would give others new ids after all entries.
        values = {**self.values, "model": {**self.values["model"], "vocab": vocab}}
        backend = Backend.from_str(json.dumps(values, ensure_ascii=False))
        if any(backend.token_to_id(token) != number for token, number in vocab.items()):
            raise RuntimeError("the ids of the vocabulary have changed")
        return replace(self.tokenizer, backend=backend)


def _count_words(documents: Documents) -> Counter[str]:
    """Count the words of documents, separated by white space."""
    counts: Counter[str] = Counter()
    with progress_bar("counting words", documents.num_bytes) as advance:
        for document in documents:
            for paragraph in document:
                counts.update(paragraph.split())
            if len(counts) > MOST_WORDS:
                counts = Counter({word: number for word, number in counts.items() if number > 1})
            advance(documents.reading.bytes_read, "")
    for warning in documents.read_errors.warnings():
        say(f"warning: {warning}")
    return counts


def _extend_models(
    folder: Path, work: Path, old: Tokenizer, extended: Tokenizer, new: Sequence[str], start: int
) -> None:
    """Write a model with its extended tokenizer, and the models in folders inside its own."""
    from bertsmith.formats.hf import inner_folders

    for name in ("", *inner_folders(folder)):
        (work / name).mkdir(exist_ok=True)
        config = _extend_model(folder / name, work / name, old, new, start)
        extended.save(work / name, old.length_within(config.max_positions), config.num_segments)


def _extend_model(folder: Path, out: Path, old: Tokenizer, new: Sequence[str], start: int) -> EncoderConfig:
    """Write the weights and configuration of a model with rows for new entries; nothing else changes.

    Returns the configuration of its encoder.
    """
    from bertsmith.formats import hf
    from bertsmith.formats.families.table import family_of
    from bertsmith.formats.saved_config import CONFIG, read_config
    from bertsmith.formats.weights import WEIGHTS, read_weights, write_weights

    config = hf.load_folder(folder).model.encoder.config  # a folder that cannot be opened is refused
    if config.reads_characters:
        raise UserError(f"{folder} reads every word by its characters, so no words have to be added to it")
    family, old_rows = family_of(config), config.vocab_size
    names, pieces = _vocabulary_names(family), old.encode(new)
    tensors = read_weights(folder)
    for key in tensors:
        if key.endswith(names):
            tensors[key] = _with_rows(tensors[key], pieces, start)
    write_weights(out / WEIGHTS, tensors)
    values = {**read_config(folder), **family.fields["vocab_size"].write(max(old_rows, start + len(new)))}
    write_json(out / CONFIG, values)
    if (folder / hf.NOTES).exists():
        shutil.copyfile(folder / hf.NOTES, out / hf.NOTES)
    return config


def _vocabulary_names(family: Family) -> tuple[str, ...]:
    """The saved names, without the encoder's prefix, of the tensors that have a row for every entry."""
    from bertsmith.formats.storage import as_stored

    tables = [family.encoder, *(output.names for output in family.outputs.values())]
    rows = [as_stored(table[ours]) for table in tables for ours in VOCABULARY_TENSORS if ours in table]
    return tuple(name.removeprefix(family.prefix) for row in rows for name in (*row.names, *row.tied))


def _with_rows(old: Tensor, pieces: Sequence[Sequence[int]], start: int) -> Tensor:
    """Return a matrix (V, H) or bias (V,) whose rows from `start` on are the means of the rows of the pieces."""
    import torch

    means = torch.stack([old[torch.tensor(ids)].float().mean(0) for ids in pieces]).to(old.dtype)  # (N, H) or (N,)
    return torch.cat([old[:start], means, old[start + len(pieces) :]])


def _list(words: Sequence[str]) -> str:
    return ", ".join(words[:5]) + (", …" if len(words) > 5 else "")
