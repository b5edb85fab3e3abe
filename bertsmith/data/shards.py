"""A corpus on disk: memory-mapped shards of token ids with sentence and document boundaries.

A shard is a safetensors file (a JSON header, then the arrays) that any reader of that format opens:
`tokens` (n,), `sentences` (s + 1,) the token at which each sentence starts, `documents` (d + 1,) the sentence at which
each document starts. `corpus.json` names the shards with their counts and checksums, and the tokenizer lies beside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bertsmith.config import from_dict, read_json, to_dict
from bertsmith.errors import UserError

MANIFEST = "corpus.json"
VERSION = 1
_DTYPES = {"U16": np.uint16, "U32": np.uint32, "I64": np.int64}


@dataclass(frozen=True)
class ShardFacts:
    """One shard's line in the manifest."""

    name: str
    documents: int
    sentences: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a corpus folder holds."""

    version: int
    tokenizer: str  # hash
    vocab_size: int
    dtype: str
    documents: int
    sentences: int
    tokens: int
    shards: tuple[ShardFacts, ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """The arrays of one shard, mapped into memory: nothing is read until it is used."""

    path: Path

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length))
            except ValueError:
                raise UserError(f"{self.path} has a damaged header; build the corpus again") from None
        arrays = {}
        for name in ("tokens", "sentences", "documents"):
            begin, end = header[name]["data_offsets"]
            dtype = _DTYPES[header[name]["dtype"]]
            if 8 + length + end > size:
                raise UserError(f"{self.path} is shorter than its header says; build the corpus again")
            mapped = np.memmap(self.path, dtype, "r", 8 + length + begin, tuple(header[name]["shape"]))
            arrays[name] = mapped.view(np.ndarray)  # slices of a plain array are cheaper
        return arrays

    @property
    def tokens(self) -> NDArray[Any]:
        return self.arrays["tokens"]

    @property
    def sentences(self) -> NDArray[Any]:
        return self.arrays["sentences"]

    @property
    def documents(self) -> NDArray[Any]:
        return self.arrays["documents"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """An opened corpus folder."""

    folder: Path
    manifest: Manifest
    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a corpus; files that are missing or of another size are refused by name."""
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            raise UserError(f"{folder} is not a corpus: no {MANIFEST}; `bertsmith corpus build` makes one")
        manifest = read_manifest(folder)
        shards = []
        for facts in manifest.shards:
            path = folder / facts.name
            if not path.exists():
                raise UserError(f"{path} is missing; build the corpus again")
            if path.stat().st_size != facts.bytes:
                raise UserError(f"{path} has {path.stat().st_size} bytes, not {facts.bytes}; build the corpus again")
            shards.append(Shard(path))
        return cls(folder, manifest, tuple(shards))

    def check_tokenizer(self, tokenizer_hash: str, where: object) -> None:
        """Refuse a tokenizer that is not the one that the shards were made with."""
        if tokenizer_hash != self.manifest.tokenizer:
            raise UserError(
                f"the tokenizer of {where} (hash {tokenizer_hash}) is not the one that {self.folder} was built with "
                f"({self.manifest.tokenizer}); build the corpus with it: bertsmith corpus build … --tokenizer {where}"
            )

    def verify(self) -> None:
        """Compare every shard with its checksum; a flipped byte is an error that names the file."""
        for facts in self.manifest.shards:
            if file_hash(self.folder / facts.name) != facts.sha256:
                raise UserError(f"{self.folder / facts.name} does not match its checksum; build the corpus again")

    @cached_property
    def first_documents(self) -> NDArray[np.int64]:
        """The number of the first document of each shard, and the count of all at the end."""
        return np.cumsum([0, *(facts.documents for facts in self.manifest.shards)])

    @cached_property
    def document_tokens(self) -> NDArray[np.int64]:
        """The number of tokens of every document."""
        return np.concatenate([np.diff(s.sentences[s.documents].astype(np.int64)) for s in self.shards])

    def document(self, number: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The tokens of a document and the places in them where its sentences start, the end included."""
        place = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        shard = self.shards[place]
        local = number - int(self.first_documents[place])
        begin, end = int(shard.documents[local]), int(shard.documents[local + 1])
        bounds = np.asarray(shard.sentences[begin : end + 1], dtype=np.int64)
        return shard.tokens[bounds[0] : bounds[-1]], bounds - bounds[0]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a corpus folder."""
    values = read_json(folder / MANIFEST)
    if values.get("version") != VERSION:
        raise UserError(
            f"{folder / MANIFEST}: version {values.get('version')!r}, not {VERSION}; build the corpus again"
        )
    return from_dict(Manifest, values, str(folder / MANIFEST))


def write_manifest(folder: Path, tokenizer: str, vocab_size: int, shards: Sequence[ShardFacts]) -> Manifest:
    """Write the manifest, the last file of a finished corpus."""
    totals = {name: sum(getattr(s, name) for s in shards) for name in ("documents", "sentences", "tokens")}
    manifest = Manifest(
        VERSION, tokenizer, vocab_size, token_dtype(vocab_size).__name__, **totals, shards=tuple(shards)
    )
    (folder / MANIFEST).write_text(json.dumps(to_dict(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest


@dataclass(frozen=True)
class Tokens:
    """Tokenised documents as three flat arrays: ids, the length of each sentence, the sentences of each document."""

    tokens: NDArray[Any]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[Tokens]) -> Tokens:
        columns = ("tokens", "sentences", "documents")
        return cls(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


def write_shard(path: Path, part: Tokens, vocab_size: int, tokenizer: str) -> ShardFacts:
    """Write tokenised documents as one shard."""
    arrays = {
        "tokens": part.tokens.astype(token_dtype(vocab_size)),
        "sentences": np.cumsum([0, *part.sentences], dtype=np.int64),
        "documents": np.cumsum([0, *part.documents], dtype=np.int64),
    }
    save_file(arrays, path, metadata={"tokenizer": tokenizer})  # one entry: the library shuffles several
    counts = (len(part.documents), len(part.sentences), len(part.tokens))
    return ShardFacts(path.name, *counts, path.stat().st_size, file_hash(path))


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds every id of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
