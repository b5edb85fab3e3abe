"""Read SentencePiece's model file, `spiece.model`: a protocol buffer with pieces, scores and a table of characters."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bertsmith.errors import UserError
from bertsmith.protobuf import Damaged, fields, messages, numbers

UNIGRAM = 1  # of `model_type`; the others are BPE, words and characters
Kind = Literal["normal", "unknown", "control", "user-defined", "unused", "byte"]
KINDS: tuple[Kind, ...] = ("normal", "unknown", "control", "user-defined", "unused", "byte")


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its score is the logarithm of its probability."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class SentencePiece:
    """The content of a model file that tokens depend on."""

    pieces: tuple[Piece, ...]
    unknown: int
    byte_fallback: bool
    character_map: bytes  # a trie with replacements of characters, for `normalizers.Precompiled`


def read_spiece(path: Path) -> SentencePiece:
    """Read a file with a Unigram model; any other is refused."""
    try:
        data = path.read_bytes()
        pieces = tuple(map(_piece, messages(data, 1)))
        trainer = numbers(b"".join(messages(data, 2)))
        character_map = b"".join(messages(b"".join(messages(data, 3)), 2))
    except (Damaged, UnicodeDecodeError, struct.error, IndexError):
        raise UserError(f"{path} is damaged, or is not a model of SentencePiece") from None
    if not pieces:
        raise UserError(f"{path} is not a model of SentencePiece: it has no pieces")
    if (kind := trainer.get(3, UNIGRAM)) != UNIGRAM:
        raise UserError(f"{path} is a model of type {kind}; only Unigram (1), which ALBERT has, is read")
    unknown = next((number for number, piece in enumerate(pieces) if piece.kind == "unknown"), trainer.get(40, 0))
    return SentencePiece(pieces, unknown, bool(trainer.get(35, 0)), character_map)


def _piece(data: bytes) -> Piece:
    values = dict(fields(data))
    (score,) = struct.unpack("<f", struct.pack("<I", values.get(2, 0)))
    return Piece(values[1].decode("utf-8"), score, KINDS[values.get(3, 1) - 1])
