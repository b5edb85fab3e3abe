"""A corpus on disk: memory-mapped shards of token ids with sentence and document boundaries.

A shard is a safetensors file (a JSON header, then the arrays) that any reader of that format opens:
`tokens` (n,), `sentences` (s + 1,) the token at which each sentence starts, `documents` (d + 1,) the sentence at which
each document starts. `corpus.json` lists the shards with their counts and checksums; the tokenizer is in the same
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from bertsmith.config import from_dict, read_json, to_dict
from bertsmith.corpus.cleaning import CleanConfig
from bertsmith.corpus.readers import ReadErrors
from bertsmith.corpus.store import Store
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, new_folder

MANIFEST, PLAN, LENGTHS, SUFFIX = "corpus.json", "build.json", "documents.lengths", ".safetensors"
VERSION = 1
VERIFY_AT_ONCE = 256 << 20  # bytes; checksums of a larger corpus are compared in the background
CHECK_EVERY = 0.1  # seconds between two checks of the size of a shard that is in use
_DTYPES = {"U16": np.uint16, "U32": np.uint32, "I64": np.int64}


@dataclass(frozen=True)
class ShardFacts:
    """One shard's entry in the manifest."""

    name: str
    documents: int
    sentences: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a corpus folder."""

    version: int
    tokenizer: str  # hash
    vocab_size: int
    dtype: str
    documents: int
    sentences: int
    tokens: int
    cleaning: dict[str, int]  # numbers of documents and paragraphs that were read and dropped
    shards: tuple[ShardFacts, ...]
    clean: CleanConfig | None = None  # how the text was cleaned; older folders lack this field and the next ones
    unknown: int | None = None  # number of unknown tokens
    lengths_sha256: str = ""


@dataclass(frozen=True, eq=False)
class Shard:
    """The arrays of one shard, memory-mapped: nothing is read until it is used."""

    path: Path

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        return _map(self.path, ("tokens", "sentences", "documents"))

    @cached_property
    def tokens(self) -> NDArray[Any]:
        return self.arrays["tokens"]

    @cached_property
    def sentences(self) -> NDArray[Any]:
        return self.arrays["sentences"]

    @cached_property
    def documents(self) -> NDArray[Any]:
        return self.arrays["documents"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus folder."""

    folder: Path
    manifest: Manifest
    shards: tuple[Shard, ...]
    faults: list[str] = field(default_factory=list)  # errors that the comparison of checksums has found so far
    checked: dict[int, float] = field(default_factory=dict)  # when the size of each shard was last checked

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a corpus; a missing, truncated or changed file is an error that names it."""
        folder = _fetch(Store(str(folder)))
        if not (folder / MANIFEST).exists():
            unfinished = (folder / PLAN).exists()
            fix = (
                "run `bertsmith corpus build` again to finish it"
                if unfinished
                else "`bertsmith corpus build` makes one"
            )
            raise UserError(f"{folder} is not a {'finished ' if unfinished else ''}corpus: no {MANIFEST}; {fix}")
        manifest = read_manifest(folder)
        shards = []
        for facts in manifest.shards:
            path = folder / facts.name
            if not path.exists():
                raise UserError(f"{path} is missing; build the corpus again")
            if path.stat().st_size != facts.bytes:
                raise UserError(f"{path} has {path.stat().st_size} bytes, not {facts.bytes}; build the corpus again")
            shards.append(Shard(path))
        corpus = cls(folder, manifest, tuple(shards))
        corpus.check_lengths()
        if sum(facts.bytes for facts in manifest.shards) <= VERIFY_AT_ONCE:
            corpus.verify()
        else:
            Thread(target=corpus._verify_in_background, daemon=True).start()
        return corpus

    def check_tokenizer(self, tokenizer_hash: str, where: object) -> None:
        """Refuse a tokenizer that is not the one the shards were made with."""
        if tokenizer_hash != self.manifest.tokenizer:
            raise UserError(
                f"the tokenizer of {where} (hash {tokenizer_hash}) is not the one that {self.folder} was built with "
                f"({self.manifest.tokenizer}); build the corpus with it: bertsmith corpus build … --tokenizer {where}"
            )

    def _verify_in_background(self) -> None:
        try:
            self.verify()
        except UserError as error:
            self.faults.append(str(error))

    def check_lengths(self) -> None:
        """Refuse a damaged file of document lengths, which would change the training samples."""
        path, wanted = self.folder / LENGTHS, self.manifest.lengths_sha256
        if not path.is_file() or (wanted and file_hash(path) != wanted):
            what = "does not match its checksum" if path.is_file() else "is missing"
            raise UserError(f"{path} {what}; build the corpus again")
        if len(self.document_tokens) != self.manifest.documents or self.document_tokens.sum() != self.manifest.tokens:
            raise UserError(f"{path} does not belong to this {MANIFEST}; build the corpus again")

    def verify(self) -> None:
        """Compare every shard with its checksum; a flipped byte is an error that names the file."""
        for facts in self.manifest.shards:
            if file_hash(self.folder / facts.name) != facts.sha256:
                raise UserError(f"{self.folder / facts.name} does not match its checksum; build the corpus again")

    @cached_property
    def first_documents(self) -> list[int]:
        """The number of the first document of each shard, then the number of all documents."""
        return list(accumulate((facts.documents for facts in self.manifest.shards), initial=0))

    @cached_property
    def document_tokens(self) -> NDArray[np.uint32]:
        """The number of tokens of every document, from a separate file, so that no shard has to be opened."""
        return _map(self.folder / LENGTHS, ("lengths",))["lengths"]

    def refuse_faults(self) -> None:
        """Raise the first error that the comparison of checksums has found."""
        if self.faults:
            raise UserError(self.faults[0])

    def _refuse_truncated(self, number: int) -> None:
        """Refuse a shard that was truncated: the system kills a process that reads a mapped file beyond its end.

        The size is checked every tenth of a second; reading a shard truncated since then still ends in a bus error.
        """
        now = time.monotonic()
        if now - self.checked.get(number, -CHECK_EVERY) < CHECK_EVERY:
            return
        self.checked[number] = now
        facts = self.manifest.shards[number]
        size = (self.folder / facts.name).stat().st_size
        if size < facts.bytes:
            raise UserError(
                f"{self.folder / facts.name} was truncated to {size:,} of {facts.bytes:,} bytes; build the corpus again"
            )

    def place(self, number: int) -> tuple[NDArray[Any], NDArray[np.int64], int, int]:
        """Locate a document: its shard's tokens and sentence starts, its first sentence and the one after its last."""
        self.refuse_faults()
        shard_number = bisect_right(self.first_documents, number) - 1
        self._refuse_truncated(shard_number)
        shard = self.shards[shard_number]
        local = number - self.first_documents[shard_number]
        return shard.tokens, shard.sentences, int(shard.documents[local]), int(shard.documents[local + 1])

    def document(self, number: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The tokens of a document, and the places where its sentences start, then its length."""
        tokens, starts, begin, end = self.place(number)
        bounds = starts[begin : end + 1]
        return tokens[bounds[0] : bounds[-1]], bounds - bounds[0]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus folder."""
    values = read_json(folder / MANIFEST)
    if values.get("version") != VERSION:
        raise UserError(
            f"{folder / MANIFEST}: version {values.get('version')!r}, not {VERSION}; build the corpus again"
        )
    return from_dict(Manifest, values, str(folder / MANIFEST))


def write_manifest(
    store: Store,
    tokenizer: str,
    vocab_size: int,
    written: Sequence[WrittenShard],
    *,
    clean: CleanConfig | None = None,
) -> None:
    """Write the documents' lengths and the manifest, the last file of a finished corpus."""
    kept = [shard for shard in written if shard.facts.documents]
    lengths = save({"lengths": np.concatenate([shard.lengths for shard in kept])})
    store.write(LENGTHS, lengths)
    shards = [shard.facts for shard in kept]
    cleaning: Counter[str] = Counter()
    for shard in written:
        cleaning.update(shard.stats)
    totals = {name: sum(getattr(s, name) for s in shards) for name in ("documents", "sentences", "tokens")}
    facts = Manifest(
        VERSION,
        tokenizer,
        vocab_size,
        token_dtype(vocab_size).__name__,
        **totals,
        cleaning=dict(cleaning),
        shards=tuple(shards),
        clean=clean,
        unknown=sum(shard.unknown for shard in kept),
        lengths_sha256=hashlib.sha256(lengths).hexdigest(),
    )
    store.write(MANIFEST, (json.dumps(to_dict(facts), indent=2) + "\n").encode())


@dataclass(frozen=True)
class Tokens:
    """Tokenised documents as three flat arrays: ids, the length of each sentence, the sentences of each document."""

    tokens: NDArray[Any]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]


def shard_name(number: int) -> str:
    return f"{number:06}{SUFFIX}"


def pack_shard(
    part: Tokens, vocab_size: int, stats: dict[str, int], read_errors: ReadErrors, origin: str = ""
) -> bytes:
    """Tokenised documents as the bytes of a shard, with one metadata entry, since the library shuffles several."""
    arrays = {
        "tokens": part.tokens.astype(token_dtype(vocab_size)),
        "sentences": np.concatenate([[0], np.cumsum(part.sentences, dtype=np.int64)]),
        "documents": np.concatenate([[0], np.cumsum(part.documents, dtype=np.int64)]),
    }
    notes = {"origin": origin, "stats": dict(sorted(stats.items())), "trouble": to_dict(read_errors)}
    return save(arrays, {"bertsmith": json.dumps(notes)})


@dataclass(frozen=True)
class WrittenShard:
    """Facts about a shard that was written."""

    facts: ShardFacts
    lengths: NDArray[np.uint32]  # tokens of each document
    stats: dict[str, int]  # what was read and dropped
    read_errors: ReadErrors
    unknown: int = 0  # number of unknown tokens


def read_written(store: Store, name: str, unknown_id: int = -1) -> WrittenShard:
    """Read a written shard back for the manifest."""
    data = store.read_sealed(name)
    if data is None:
        raise UserError(f"{store.url}/{name} was damaged after it was written; look at the disk, then build again")
    header, notes = _header(data)
    tokens, sentences, documents = (header[n]["shape"][0] for n in ("tokens", "sentences", "documents"))
    facts = ShardFacts(name, documents - 1, sentences - 1, tokens, len(data), hashlib.sha256(data).hexdigest())
    arrays = load(data)
    lengths = np.diff(arrays["sentences"][arrays["documents"]]).astype(np.uint32)
    unknown = int(np.count_nonzero(arrays["tokens"] == unknown_id))
    return WrittenShard(facts, lengths, notes["stats"], ReadErrors(**notes["trouble"]), unknown)


def read_origin(store: Store, name: str) -> str | None:
    """The file that a written shard was made from; None if the shard is missing or damaged."""
    data = store.read_sealed(name)
    return None if data is None else str(_header(data)[1]["origin"])


def _header(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of a safetensors file, and our notes in it."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header, json.loads(header["__metadata__"]["bertsmith"])


def _map(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, memory-mapped."""
    mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)  # slices of a plain array are cheaper
    try:
        length = int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8 : 8 + length].tobytes())
        return {name: _array(mapped[8 + length :], header[name]) for name in names}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} has a damaged header; build the corpus again") from None


def _array(data: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    if end > len(data):
        raise ValueError("the file is shorter than its header says")
    return data[begin:end].view(_DTYPES[entry["dtype"]])


def _fetch(store: Store) -> Path:
    """The local folder of a corpus; a remote one is copied into a cache first."""
    if store.local is not None:
        return store.local
    manifest = store.read(MANIFEST) if store.exists(MANIFEST) else b""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "bertsmith" / "corpora" / hashlib.sha256(manifest).hexdigest()[:16]
    if manifest and not folder.exists():
        with new_folder(folder) as work:
            for name in store.names():
                (work / name).write_bytes(store.read(name))
    return folder


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds every id of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
