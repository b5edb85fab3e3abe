"""TensorFlow's checkpoint files, read and written without TensorFlow. What the tensors mean is not known here.

A checkpoint `PREFIX` is a sorted table, `PREFIX.index`, and the tensors' bytes, `PREFIX.data-00000-of-00001` and so on.
The table's values are protocol buffers: under the empty key a header, under a tensor's name its type, shape, place and
CRC32C.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.formats.sorted_table import Damaged, checksum, read_table, read_varint, varint, write_table

TYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 9: "int64", 10: "bool"}
TYPES |= {14: "bfloat16", 17: "uint16", 19: "float16", 22: "uint32", 23: "uint64"}
NUMBERS = {name: number for number, name in TYPES.items()}
MAX_RANK = 32  # dimensions; numpy has no more than 64
Box = tuple[tuple[int, int], ...]  # the start and the end in each dimension


@dataclass(frozen=True)
class Entry:
    """What the index says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int
    crc32c: int  # masked, as it is stored
    parts: tuple[tuple[Box, Entry], ...] = ()  # of a partitioned variable, which has no bytes of its own


def index_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".index")


def data_file(prefix: Path, shard: int = 0, shards: int = 1) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05}-of-{shards:05}")


def read_index(prefix: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint by its name; the index is checked as a whole, the data only for its length."""
    path = index_file(prefix)
    try:
        rows = read_table(path.read_bytes())
        if not rows or rows[0][0] != b"":
            raise Damaged("has no header, so it is not the index of a checkpoint")
        shards = _read_header(rows[0][1])
        entries = {key: _read_entry(value, prefix, shards) for key, value in rows[1:]}
        return _join_parts(entries)
    except Damaged as reason:
        raise UserError(f"{path} {reason}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def read_tensor(name: str, entry: Entry) -> NDArray[Any]:
    """The values of a tensor, its checksum compared; bfloat16, which numpy has no type for, as float32."""
    if entry.dtype not in NUMBERS:
        raise UserError(f"{entry.file}: {name} is of {entry.dtype}, which is not read; only numbers are")
    dtype = np.dtype("float32" if entry.dtype == "bfloat16" else entry.dtype).newbyteorder("<")
    if entry.parts:
        whole = np.empty(entry.shape, dtype)
        for where, part in entry.parts:
            whole[tuple(slice(*bounds) for bounds in where)] = read_tensor(name, part)
        return whole
    try:  # plain reading: a file cut short while it is mapped into memory would end the process
        data = np.fromfile(entry.file, np.uint8, entry.size, offset=entry.offset)
    except OSError as error:
        raise UserError(f"{entry.file} cannot be read: {error.strerror or error}") from None
    if len(data) != entry.size:
        raise UserError(f"{entry.file} is cut short: {name} is not whole")
    if checksum(data) != entry.crc32c:
        raise UserError(f"{entry.file} is damaged: the bytes of {name} do not match their checksum")
    if entry.dtype == "bfloat16":  # the upper half of a float32
        data = (data.view("<u2").astype("<u4") << 16).view(np.uint8)
    return data.view(dtype).reshape(entry.shape)


def read_bundle(prefix: Path, wanted: Iterable[str] | None = None) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a checkpoint one by one; all that are numbers, where `wanted` names none."""
    entries = read_index(prefix)
    for name in [n for n, e in entries.items() if e.dtype in NUMBERS] if wanted is None else wanted:
        if name not in entries:
            raise UserError(f"{index_file(prefix)} has no tensor {name!r}")
        yield name, read_tensor(name, entries[name])


def write_bundle(prefix: Path, tensors: Mapping[str, NDArray[Any]] | Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Write a checkpoint of one data file, tensor by tensor; its index comes last, when all the data is on the disk."""
    index, data = index_file(prefix), data_file(prefix)
    for path in (index, data):
        if path.exists():
            raise UserError(f"{path} is there already; choose another name or remove it")
    entries: dict[bytes, bytes] = {}
    with new_file(index) as new_index, new_file(data) as new_data:  # the inner one takes its name first
        with new_data.open("wb") as file:
            for name, array in tensors.items() if isinstance(tensors, Mapping) else tensors:
                if not name or name.encode() in entries or array.dtype.name not in NUMBERS:
                    raise ValueError(
                        f"cannot write tensor {name!r} of type {array.dtype}: no name, twice, or no number"
                    )
                entries[name.encode()] = _write_tensor(file, array)
        header = b"\x08\x01\x1a\x02\x08\x01"  # one shard, little-endian, version 1
        new_index.write_bytes(write_table([(b"", header), *sorted(entries.items())]))


# Protocol buffers: a field is a number that says which and in what form, and a value.


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: their numbers and their values, as integers or bytes."""
    place = 0
    while place < len(data):
        tag, place = read_varint(data, place)
        if tag & 7 == 0:
            value, place = read_varint(data, place)
            yield tag >> 3, (value & (1 << 64) - 1) - (value >> 63 & 1) * (1 << 64)
            continue
        size, place = read_varint(data, place) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, -1), place)
        if size < 0 or place + size > len(data):
            raise Damaged("is damaged: a value in it is no message")
        content = data[place : place + size]
        yield tag >> 3, content if tag & 7 == 2 else int.from_bytes(content, "little")
        place += size


def _numbers(data: bytes) -> dict[int, int]:
    """The fields of a message that are numbers."""
    return {field: value for field, value in _fields(data) if isinstance(value, int)}


def _messages(data: bytes, wanted: int) -> list[bytes]:
    """The messages inside a message that stand under one field."""
    return [value for field, value in _fields(data) if field == wanted and isinstance(value, bytes)]


def _read_header(data: bytes) -> int:
    """The number of data files."""
    header, version = _numbers(data), _numbers(b"".join(_messages(data, 3)))
    if header.get(2):
        raise Damaged("is of a big-endian machine, which is not supported")
    if version.get(2, 0) > 1:
        raise Damaged(f"asks for a reader of version {version[2]}; this one knows version 1")
    if not 1 <= header.get(1, 0) <= 99_999:
        raise Damaged(f"is damaged: it claims {header.get(1, 0)} data files")
    return header[1]


def _read_entry(data: bytes, prefix: Path, shards: int) -> Entry:
    """The entry of a tensor, refused where it cannot be true."""
    values = _numbers(data)
    number, shard, offset, size = (values.get(field, 0) for field in (1, 3, 4, 5))
    shape = tuple(_numbers(dim).get(1, 0) for dim in _messages(b"".join(_messages(data, 2)), 2))
    dtype = TYPES.get(number, "strings" if number == 7 else f"type {number}")
    if not 0 <= shard < shards or offset < 0 or size < 0 or len(shape) > MAX_RANK or min(shape, default=0) < 0:
        raise Damaged("is damaged: a tensor has no possible place or shape")
    file = data_file(prefix, shard, shards)
    entry = Entry(dtype, shape, file, offset, size, values.get(6, 0))
    if slices := _messages(data, 7):  # its bytes are under keys of their own
        return replace(entry, parts=tuple((_read_slice(value, shape), entry) for value in slices))
    width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize if dtype in NUMBERS else 0
    if width and (size != width * math.prod(shape) or max(shape, default=0) > 1 << 31):
        raise Damaged(f"is damaged: {size} bytes are not a tensor of {dtype} and shape {shape}")
    if not file.is_file():
        raise Damaged(f"names {file.name}, which is missing beside it")
    if offset + size > file.stat().st_size:
        raise Damaged(f"asks for {offset + size} bytes of {file.name}, which is cut short: {file.stat().st_size} bytes")
    return entry


def _read_slice(data: bytes, shape: tuple[int, ...]) -> Box:
    """What a slice covers; a dimension without a length is whole."""
    extents = [_numbers(extent) for extent in _messages(data, 1)]
    if len(extents) != len(shape):
        raise Damaged("is damaged: a part of a variable has other dimensions than the variable")
    starts = [extent.get(1, 0) for extent in extents]
    ends = [start + extent.get(2, size) for start, extent, size in zip(starts, extents, shape, strict=True)]
    return tuple(zip(starts, ends, strict=True))


def _join_parts(entries: Mapping[bytes, Entry]) -> dict[str, Entry]:
    """Give the partitioned variables their parts.

    The key of a part is a zero byte, the variable's name, 0 and 1, and the slice's numbers in a code that sorts as they
    do: so the sorted keys and the sorted slices belong together, and nothing has to be decoded.
    """
    joined: dict[str, Entry] = {}
    for key, entry in entries.items():
        if key.startswith(b"\0"):
            continue
        name = key.decode("utf-8", "backslashreplace")
        if entry.parts:
            start = b"\0" + key.replace(b"\xff", b"\xff\0") + b"\0\x01"
            parts = [part for other, part in entries.items() if other.startswith(start)]
            boxes = sorted(box for box, _ in entry.parts)
            shapes = [tuple(end - begin for begin, end in box) for box in boxes]
            fit = [(part.dtype, part.shape, part.parts) for part in parts] == [(entry.dtype, s, ()) for s in shapes]
            if not fit or not _fills(boxes, entry.shape):
                raise Damaged(f"lacks parts of the partitioned variable {name}")
            entry = replace(entry, parts=tuple(zip(boxes, parts, strict=True)))
        joined[name] = entry
    return joined


def _fills(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether parts make up the whole; TensorFlow divides a variable along one dimension."""
    divided = [axis for axis in range(len(shape)) if len({box[axis] for box in boxes}) > 1] or [0]
    ends = [box[divided[0]] for box in boxes]
    chained = all(first[1] == second[0] for first, second in pairwise(ends))
    whole = all(box[axis] == (0, shape[axis]) for axis in range(len(shape)) if axis != divided[0] for box in boxes)
    return bool(shape) and whole and chained and (ends[0][0], ends[-1][1]) == (0, shape[divided[0]])


def _write_tensor(file: Any, array: NDArray[Any]) -> bytes:
    """Append a tensor to the data file; gives its entry."""
    values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = values.reshape(-1).view(np.uint8)
    offset = file.tell()
    file.write(data)
    dims = b"".join(b"\x12" + varint(len(size) + 1) + b"\x08" + size for size in map(varint, array.shape))
    entry = b"\x08" + varint(NUMBERS[array.dtype.name]) + b"\x12" + varint(len(dims)) + dims
    return entry + b"\x20" + varint(offset) + b"\x28" + varint(len(data)) + b"\x35" + struct.pack("<I", checksum(data))
