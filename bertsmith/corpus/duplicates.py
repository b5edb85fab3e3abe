"""Duplicate documents and paragraphs, found through hashes on disk, so that memory stays bounded at any size.

The hashes of every block are written to a file. They are divided into buckets by their first bits, one bucket at a time
is sorted in memory, and of equal hashes the numbers in input order of all but the first are written to a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from bertsmith.corpus.cleaning import CleanConfig
from bertsmith.errors import UserError

BUCKET_ITEMS = 1 << 21  # hashes that are sorted in memory at a time: 32 MB with their numbers
Hashes = NDArray[np.uint64]
KINDS = ("documents", "paragraphs", "short", "near")
SIGNATURE, SHINGLE = 128, 5  # hashes per MinHash signature, words per shingle


@dataclass(frozen=True)
class Drops:
    """The documents and paragraphs of one block that are dropped, by their numbers in the block."""

    documents: frozenset[int] = frozenset()
    paragraphs: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class DropList:
    """The dropped items of all blocks: sorted numbers in input order, on disk, and the first number of each block."""

    lists: tuple[
        tuple[NDArray[np.int64], NDArray[np.int64]], ...
    ]  # (dropped, first number of each block) for each kind
    bands: int  # hashes per document for near duplicates

    def of(self, block: int) -> Drops:
        """The dropped items of one block."""
        documents, long, short, near = (_between(numbers, firsts, block) for numbers, firsts in self.lists)
        alike = (number // self.bands for number in near)
        return Drops(frozenset(documents) | frozenset(alike), frozenset(long) | frozenset(short))


def _between(numbers: NDArray[np.int64], firsts: NDArray[np.int64], block: int) -> list[int]:
    begin, end = np.searchsorted(numbers, firsts[block : block + 2])
    return (numbers[begin:end] - firsts[block]).tolist()


def text_hash(text: str) -> int:
    """A 64-bit BLAKE2 hash; among a billion texts a collision has a probability of 3 %."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hash_documents(documents: Iterable[Sequence[str]], config: CleanConfig) -> dict[str, Hashes]:
    """Hash a block's documents and paragraphs; an item that is not compared has the hash 0."""
    whole, long, short, near = [], [], [], []
    bands, rows = bands_for(config.near_duplicates)
    for document in documents:
        near += near_hashes(" ".join(document), bands, rows)
        whole.append(text_hash("\n".join(document)) if config.duplicate_documents else 0)
        for paragraph in document:
            is_long = len(paragraph) >= config.paragraph_length
            wanted = config.duplicate_paragraphs if is_long else config.boilerplate > 0
            value = text_hash(paragraph) if wanted else 0
            long.append(value if is_long else 0)
            short.append(0 if is_long else value)
    arrays = (np.array(values, dtype=np.uint64) for values in (whole, long, short, near))
    return dict(zip(KINDS, arrays, strict=True))


def bands_for(similarity: float) -> tuple[int, int]:
    """The bands and rows of a signature for which documents of this Jaccard similarity share a band; (0, 0) if off."""
    if not similarity:
        return 0, 0
    try:
        from datasketch import MinHashLSH
    except ImportError:
        raise UserError("clean.near_duplicates needs datasketch: pip install 'bertsmith[near]'") from None
    index = MinHashLSH(similarity, SIGNATURE)
    return index.b, index.r


def near_hashes(text: str, bands: int, rows: int) -> list[int]:
    """A hash for each band of a text's MinHash signature over shingles of words."""
    if not bands:
        return []
    from datasketch import MinHash

    words = text.lower().split()
    shingles = {" ".join(words[i : i + SHINGLE]).encode() for i in range(max(1, len(words) - SHINGLE + 1))}
    signature = MinHash(SIGNATURE)
    signature.update_batch(sorted(shingles))
    values = np.asarray(signature.hashvalues, dtype=np.uint64)
    parts = (values[i * rows : (i + 1) * rows].tobytes() + bytes([i]) for i in range(bands))
    return [int.from_bytes(hashlib.blake2b(part, digest_size=8).digest(), "little") for part in parts]


def find_drops(files: Sequence[Path], config: CleanConfig, folder: Path) -> DropList:
    """Find what to drop, from the hash files of all blocks in input order."""
    often = max(2, config.boilerplate)
    return DropList(
        (
            _repeats(files, "documents", folder, keep_first=True, at_least=2),
            _repeats(files, "paragraphs", folder, keep_first=True, at_least=2),
            _repeats(files, "short", folder, keep_first=False, at_least=often),
            _repeats(files, "near", folder, keep_first=True, at_least=2),
        ),
        bands_for(config.near_duplicates)[0],
    )


def _repeats(
    files: Sequence[Path], kind: str, folder: Path, *, keep_first: bool, at_least: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the hashes that occur `at_least` times (without the first, if kept); each file's first number."""
    firsts = np.cumsum([0, *(len(load_file(path)[kind]) for path in files)], dtype=np.int64)
    buckets = 1 << max(0, (int(firsts[-1]) // BUCKET_ITEMS).bit_length())
    _write_buckets(files, kind, folder, firsts, buckets)
    found = folder / f"{kind}.drops"
    with found.open("wb") as file:
        for number in range(buckets):
            path = folder / f"{kind}-{number:05}.bucket"
            items = np.fromfile(path, dtype=np.uint64).reshape(-1, 2)  # hash, number in input order
            path.unlink()
            _repeated(items, keep_first, at_least).tofile(file)
    if not found.stat().st_size:
        return np.zeros(0, dtype=np.int64), firsts
    numbers = np.memmap(found, dtype=np.int64, mode="r+")
    numbers.sort()
    return numbers, firsts


def _repeated(items: NDArray[np.uint64], keep_first: bool, at_least: int) -> NDArray[np.int64]:
    """The numbers of the items whose hash occurs at least `at_least` times."""
    if not len(items):
        return np.zeros(0, dtype=np.int64)
    items = items[np.lexsort((items[:, 1], items[:, 0]))]
    starts = np.flatnonzero(np.r_[True, items[1:, 0] != items[:-1, 0]])
    sizes = np.diff(np.r_[starts, len(items)])
    often = np.repeat(sizes >= at_least, sizes)
    if keep_first:
        often[starts] = False
    return items[often, 1].astype(np.int64)


def _write_buckets(files: Sequence[Path], kind: str, folder: Path, firsts: NDArray[np.int64], buckets: int) -> None:
    """Divide the hashes of all files into bucket files; a hash of 0 is not compared."""
    shift = np.uint64(64 - (buckets.bit_length() - 1))
    paths = [folder / f"{kind}-{number:05}.bucket" for number in range(buckets)]
    for path in paths:
        path.write_bytes(b"")
    for path, first in zip(files, firsts[:-1], strict=True):
        hashes = load_file(path)[kind]
        items = np.stack([hashes, np.arange(first, first + len(hashes), dtype=np.uint64)], axis=1)
        items = items[hashes != 0]
        bucket = items[:, 0] >> shift if buckets > 1 else np.zeros(len(items), dtype=np.uint64)
        order = np.argsort(bucket, kind="stable")
        items, bucket = items[order], bucket[order]
        for number in np.unique(bucket):
            with paths[int(number)].open("ab") as file:
                items[bucket == number].tofile(file)
