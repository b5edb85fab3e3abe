"""Random numbers as a pure function of a key and a counter.

Nothing here has state, so the numbers do not depend on workers, ranks, restarts or the order of calls. All arithmetic
is on 32-bit words.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

WORD = 0xFFFFFFFF
BLOCK = 4096  # entries of a permutation that are drawn at once
Words = NDArray[np.uint64]
Half = Any  # a whole number under 2**32, or an array of uint32


def mix(x: Half) -> Half:
    """Scramble 32-bit words (the finalizer of MurmurHash3: every input bit reaches every output bit)."""
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def key(*parts: ArrayLike) -> Words:
    """Hash several numbers to one word, `key(seed, epoch, index)`; the result has the shape of the parts."""
    state: Half = 0x9E3779B9
    for part in parts:
        low, high = _halves(part)
        state = mix(state ^ mix(low + 0x7F4A7C15 & WORD))
        state = mix(state + mix(high ^ 0x165667B1) & WORD)
    return np.asarray(state, dtype=np.uint64)


def _halves(part: ArrayLike) -> tuple[Half, Half]:
    """The lower and upper 32 bits, as numbers for one number, as arrays (whose products wrap around) for many."""
    value = np.asarray(part).astype(np.uint64, copy=False)
    if not value.ndim:
        return int(value) & WORD, int(value) >> 32
    high = 0 if not value.size or value.max() <= WORD else (value >> np.uint64(32)).astype(np.uint32)
    return value.astype(np.uint32), high


def uniform(*parts: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each key."""
    return key(*parts).astype(np.float64) / 4294967296.0


def below(limit: ArrayLike, *parts: ArrayLike) -> NDArray[np.int64]:
    """Whole numbers in [0, limit), one for each key."""
    wide = (key(*parts) << np.uint64(16)) | (key(*parts, 1) >> np.uint64(16))
    return (wide % np.asarray(limit, dtype=np.uint64)).astype(np.int64)


def permute(index: ArrayLike, size: int, *parts: ArrayLike) -> NDArray[np.int64]:
    """The place of each index in a keyed permutation of range(size), without storing the permutation.

    A balanced Feistel network over the next even number of bits; values past the end are permuted again
    until they are inside (cycle walking).
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    x = np.array(index, dtype=np.uint64, ndmin=1)
    outside = np.ones(x.shape, dtype=bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & low
        for turn in range(4):
            left, right = right, left ^ (key(*parts, turn, right) & low)
        x[outside] = (left << half) | right
        outside = x >= np.uint64(size)
    return x.astype(np.int64).reshape(np.shape(index))


def in_epochs(begin: int, end: int, size: int, seed: int, stream: int) -> NDArray[np.int64]:
    """The entries `begin` to `end` of the concatenation of all epochs, each a shuffled range(size)."""
    parts = []
    while begin < end:
        epoch, place = divmod(begin, size)
        block, offset = divmod(place, BLOCK)
        part = _block(block, size, seed, epoch, stream)[offset : offset + end - begin]
        parts.append(part)
        begin += len(part)
    return np.concatenate(parts)


@lru_cache(maxsize=4)
def _block(number: int, size: int, *parts: int) -> NDArray[np.int64]:
    """A block of an epoch's permutation: drawing many entries takes little longer than drawing one."""
    return permute(np.arange(number * BLOCK, min(size, (number + 1) * BLOCK)), size, *parts)


def seed(*parts: int) -> int:
    """A seed for torch's own generators (dropout, weights)."""
    return int(key(*parts)) << 31 | int(key(*parts, 1)) >> 1
