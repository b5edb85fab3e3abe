"""LevelDB's sorted table, the format of a TensorFlow checkpoint's index: bytes to rows and back.

A table consists of blocks of sorted keys with values, a block with the offsets of these blocks, and a footer. A key is
stored as the suffix that it adds to the key before it. The CRC32C of a block is compared before its content is used.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.protobuf import Damaged, read_varint, varint

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER, TRAILER = 48, 5  # bytes: two block handles and the magic number; the compression and a checksum
RAW, SNAPPY = 0, 1
BLOCK_SIZE, RESTART = 256 << 10, 16  # TensorFlow's: bytes of a block, keys between two restart points


def checksum(data: bytes | NDArray[np.uint8]) -> int:
    """Return the CRC32C of bytes, masked as in LevelDB, since a CRC of data that contains its own CRC is weak."""
    crc = library("google_crc32c").value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def library(name: str) -> Any:
    """Import a library that only this format needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"TensorFlow checkpoints need {name}, which is missing: pip install 'bertsmith[tf1]'") from None


def read_table(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return all rows of a table. Its blocks must fill the file, so that a checksum covers every byte."""
    if len(data) < FOOTER or data[-len(MAGIC) :] != MAGIC:
        raise Damaged("is truncated, or is not the index of a checkpoint: it does not end with the magic number")
    footer = data[-FOOTER:]
    meta, place = _read_place(footer, 0)
    index, _ = _read_place(footer, place)
    if footer != _footer(meta, index):
        raise Damaged("is damaged: its footer is invalid")
    places = [_read_place(value, 0)[0] for _, value in _rows(_read_block(data, index))]
    rows: list[tuple[bytes, bytes]] = []
    end = 0
    for number, (offset, size) in enumerate([*places, meta, index]):
        if offset != end:
            raise Damaged(f"is damaged: a block begins at byte {offset}, the one before ends at {end}")
        end = offset + size + TRAILER
        block = _rows(_read_block(data, (offset, size)))
        rows.extend(block if number < len(places) else [])
    if end != len(data) - FOOTER:
        raise Damaged(f"is damaged: its blocks end at byte {end}, its footer begins at {len(data) - FOOTER}")
    if any(first[0] >= second[0] for first, second in pairwise(rows)):
        raise Damaged("is damaged: its names are not sorted")
    return rows


def _read_block(data: bytes, place: tuple[int, int]) -> bytes:
    """Return the uncompressed content of a block after comparing its checksum."""
    offset, size = place
    block, trailer = data[offset : offset + size], data[offset + size : offset + size + TRAILER]
    if offset + size + TRAILER > len(data) - FOOTER:
        raise Damaged(f"is damaged or truncated: it has no block of {size} bytes at byte {offset}")
    kind, crc = struct.unpack("<BI", trailer)
    if checksum(block + trailer[:1]) != crc:
        raise Damaged(f"is damaged: the block at byte {offset} does not match its checksum")
    if kind not in (RAW, SNAPPY):
        raise Damaged(f"has a block with compression {kind}; only none (0) and snappy (1) are supported")
    return _unpack(block) if kind == SNAPPY else block


def _unpack(block: bytes) -> bytes:
    snappy = library("cramjam").snappy
    try:
        if snappy.decompress_raw_len(block) > 64 * len(block):  # a copy of 64 bytes takes three bytes
            raise Damaged("is damaged: a block claims a size that snappy cannot reach")
        return bytes(snappy.decompress_raw(block))
    except library("cramjam").DecompressionError as error:
        raise Damaged(f"is damaged: {error}") from None


def _rows(block: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of a block; a key is stored as the length of a shared prefix, and a suffix."""
    count = struct.unpack("<I", block[-4:])[0] if len(block) >= 4 else 0
    end = len(block) - 4 * (count + 1)
    if count < 1 or end < 0:
        raise Damaged("is damaged: a block has no restart points")
    restarts = set(struct.unpack(f"<{count}I", block[end:-4]))
    rows, key, place = [], b"", 0
    while place < end:
        restart = place in restarts
        restarts.discard(place)
        shared, place = read_varint(block, place)
        added, place = read_varint(block, place)
        length, place = read_varint(block, place)
        if shared > len(key) or (restart and shared) or place + added + length > end:
            raise Damaged("is damaged: a name in a block does not fit")
        key = key[:shared] + block[place : place + added]
        place += added + length
        rows.append((key, block[place - length : place]))
    if restarts - {0}:
        raise Damaged("is damaged: a restart point of a block is not the start of a name")
    return rows


def write_table(rows: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a table of sorted rows, uncompressed, as TensorFlow writes it."""
    data, index, first, size = b"", [], 0, 0
    for number, (key, value) in enumerate(rows):
        size += len(key) + len(value)
        if size >= BLOCK_SIZE or number == len(rows) - 1:
            block = _pack(rows[first : number + 1], RESTART)
            index.append((key, varint(len(data)) + varint(len(block) - TRAILER)))
            data, first, size = data + block, number + 1, 0
    meta, names = _pack([], RESTART), _pack(index, 1)
    places = (len(data), len(meta) - TRAILER), (len(data) + len(meta), len(names) - TRAILER)
    return data + meta + names + _footer(*places)


def _pack(rows: Sequence[tuple[bytes, bytes]], restart: int) -> bytes:
    """Return the bytes of a block with its trailer."""
    block, restarts, last = bytearray(), [], b""
    for number, (key, value) in enumerate(rows):
        if number % restart == 0:
            restarts.append(len(block))
            last = b""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, key, strict=False)))
        block += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    content = bytes(block) + struct.pack(f"<{len(restarts) + 1}IB", *restarts, len(restarts), RAW)
    return content + struct.pack("<I", checksum(content))


def _footer(meta: tuple[int, int], index: tuple[int, int]) -> bytes:
    places = b"".join(varint(number) for number in (*meta, *index))
    return places.ljust(FOOTER - len(MAGIC), b"\0") + MAGIC


def _read_place(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Read the offset and the size of a block; also return the position after them."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at
