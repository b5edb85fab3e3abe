"""Opening the files of a tokenizer folder: `tokenizer.json`, or a vocabulary in the form of the released models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import regular_file
from bertsmith.text import byte_bpe, unigram, word_bpe, wordpiece
from bertsmith.text.special_tokens import add_tokens

WHOLE = "tokenizer.json"
PIECES = unigram.PIECES
RELEASED = ("vocab.txt", byte_bpe.VOCAB, PIECES, unigram.DEBERTA_PIECES)


def open_backend(folder: Path, settings: Mapping[str, Any]) -> Backend:
    """Open `tokenizer.json`, or else the vocabulary in the form of the released models."""
    if (folder / WHOLE).exists():
        return _read_backend(regular_file(folder / WHOLE))
    for name in RELEASED:
        if (folder / name).exists():
            path = regular_file(folder / name)
            backend = _reader(path)(path, settings)
            add_tokens(backend, _added_tokens(folder, settings), folder)
            return backend
    raise UserError(f"{folder} holds no {WHOLE} and no {', '.join(RELEASED)}")


def _reader(path: Path) -> Callable[[Path, Mapping[str, Any]], Backend]:
    """The function that reads a file of the released models; two kinds of BPE have files of the same names."""
    if path.name != byte_bpe.VOCAB:
        return wordpiece.read if path.name == "vocab.txt" else unigram.read
    if not path.with_name(byte_bpe.MERGES).exists():
        raise UserError(f"{path} needs {byte_bpe.MERGES} beside it: a BPE vocabulary is used through its merges")
    return word_bpe.read if word_bpe.marks_ends(read_json(path)) else byte_bpe.read


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The tokens beyond the released vocabulary by their ids; older releases have them in a file of their own."""
    if isinstance(found := settings.get("added_tokens_decoder"), dict):
        return {int(number): token for number, token in found.items()}
    path = folder / "added_tokens.json"
    older = read_json(path) if path.exists() else {}
    return {int(number): {"content": token} for token, number in older.items()}


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer file: {error}") from None


def lowercases(backend: Backend) -> bool:
    """Whether the normaliser lower-cases, whatever `tokenizer_config.json` says."""
    return backend.normalizer is not None and backend.normalizer.normalize_str("A") == "a"
