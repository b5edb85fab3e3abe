"""Read and write TensorFlow's checkpoint files without TensorFlow. This module does not know what the tensors mean.

A checkpoint `PREFIX` consists of a sorted table, `PREFIX.index`, and of files with the tensors' bytes,
`PREFIX.data-00000-of-00001` and so on. The values of the table are protocol buffers: the empty key has a header, the
name of a tensor its type, shape, offset and CRC32C.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.formats.sorted_table import checksum, read_table, write_table
from bertsmith.protobuf import Damaged, messages, numbers, varint

TYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 9: "int64", 10: "bool"}
TYPES |= {14: "bfloat16", 17: "uint16", 19: "float16", 22: "uint32", 23: "uint64"}
NUMBERS = {name: number for number, name in TYPES.items()}
MAX_RANK = 32  # dimensions; numpy has no more than 64
Box = tuple[tuple[int, int], ...]  # the start and the end in each dimension


@dataclass(frozen=True)
class Entry:
    """The entry of a tensor in the index."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int
    crc32c: int  # masked, as in the file
    parts: tuple[tuple[Box, Entry], ...] = ()  # of a partitioned variable, whose own entry has no bytes


def index_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".index")


def data_file(prefix: Path, shard: int = 0, shards: int = 1) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05}-of-{shards:05}")


def read_index(prefix: Path) -> dict[str, Entry]:
    """Return the entries of all tensors by name; the whole index is checked, the data files only for their size."""
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
    """Return the values of a tensor after comparing its checksum; bfloat16, which numpy lacks, becomes float32."""
    if entry.dtype not in NUMBERS:
        raise UserError(f"{entry.file}: {name} is of {entry.dtype}, which is not read; only numbers are")
    dtype = np.dtype("float32" if entry.dtype == "bfloat16" else entry.dtype).newbyteorder("<")
    if entry.parts:
        whole = np.empty(entry.shape, dtype)
        for where, part in entry.parts:
            whole[tuple(slice(*bounds) for bounds in where)] = read_tensor(name, part)
        return whole
    try:  # not memory-mapped: a file that is truncated while it is mapped would kill the process
        data = np.fromfile(entry.file, np.uint8, entry.size, offset=entry.offset)
    except OSError as error:
        raise UserError(f"{entry.file} cannot be read: {error.strerror or error}") from None
    if len(data) != entry.size:
        raise UserError(f"{entry.file} is truncated: {name} is incomplete")
    if checksum(data) != entry.crc32c:
        raise UserError(f"{entry.file} is damaged: the bytes of {name} do not match their checksum")
    if entry.dtype == "bfloat16":  # the upper half of a float32
        data = (data.view("<u2").astype("<u4") << 16).view(np.uint8)
    return data.view(dtype).reshape(entry.shape)


def write_bundle(prefix: Path, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Write a checkpoint with one data file, tensor by tensor; the index is written last, after all data is on disk."""
    index, data = index_file(prefix), data_file(prefix)
    for path in (index, data):
        if path.exists():
            raise UserError(f"{path} exists already; choose another name or remove it")
    entries: dict[bytes, bytes] = {}
    with new_file(index) as new_index, new_file(data) as new_data:  # the data file is renamed first
        with new_data.open("wb") as file:
            for name, array in tensors:
                if not name or name.encode() in entries or array.dtype.name not in NUMBERS:
                    raise ValueError(
                        f"cannot write tensor {name!r} of type {array.dtype}: no name, a duplicate, or not numeric"
                    )
                entries[name.encode()] = _write_tensor(file, array)
        header = b"\x08\x01\x1a\x02\x08\x01"  # one shard, little-endian, version 1
        new_index.write_bytes(write_table([(b"", header), *sorted(entries.items())]))


def _read_header(data: bytes) -> int:
    """Return the number of data files."""
    header, version = numbers(data), numbers(b"".join(messages(data, 3)))
    if header.get(2):
        raise Damaged("was written on a big-endian machine, which is not supported")
    if version.get(2, 0) > 1:
        raise Damaged(f"needs a reader of version {version[2]}; this one reads version 1")
    if not 1 <= header.get(1, 0) <= 99_999:
        raise Damaged(f"is damaged: it claims {header.get(1, 0)} data files")
    return header[1]


def _read_entry(data: bytes, prefix: Path, shards: int) -> Entry:
    """Return the entry of a tensor; an impossible one is refused."""
    values = numbers(data)
    number, shard, offset, size = (values.get(field, 0) for field in (1, 3, 4, 5))
    shape = tuple(numbers(dim).get(1, 0) for dim in messages(b"".join(messages(data, 2)), 2))
    dtype = TYPES.get(number, "strings" if number == 7 else f"type {number}")
    if not 0 <= shard < shards or offset < 0 or size < 0 or len(shape) > MAX_RANK or min(shape, default=0) < 0:
        raise Damaged("is damaged: a tensor has an impossible offset or shape")
    file = data_file(prefix, shard, shards)
    entry = Entry(dtype, shape, file, offset, size, values.get(6, 0))
    if slices := messages(data, 7):  # the parts have keys of their own
        return replace(entry, parts=tuple((_read_slice(value, shape), entry) for value in slices))
    width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize if dtype in NUMBERS else 0
    if width and (size != width * math.prod(shape) or max(shape, default=0) > 1 << 31):
        raise Damaged(f"is damaged: {size} bytes are not a tensor of {dtype} and shape {shape}")
    if not file.is_file():
        raise Damaged(f"names {file.name}, which is missing beside it")
    if offset + size > file.stat().st_size:
        raise Damaged(f"needs {offset + size} bytes of {file.name}, which is truncated to {file.stat().st_size} bytes")
    return entry


def _read_slice(data: bytes, shape: tuple[int, ...]) -> Box:
    """Return the box of a slice; a dimension without a length is complete."""
    extents = [numbers(extent) for extent in messages(data, 1)]
    if len(extents) != len(shape):
        raise Damaged("is damaged: a part of a variable and the variable have different numbers of dimensions")
    starts = [extent.get(1, 0) for extent in extents]
    ends = [start + extent.get(2, size) for start, extent, size in zip(starts, extents, shape, strict=True)]
    return tuple(zip(starts, ends, strict=True))


def _join_parts(entries: Mapping[bytes, Entry]) -> dict[str, Entry]:
    """Attach the parts of partitioned variables to their entries.

    The key of a part is a zero byte, the variable's name, 0 and 1, and the numbers of the slice in a code that keeps
    their order. Sorted keys therefore match sorted slices, and nothing has to be decoded.
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
    """Whether the parts cover the variable; TensorFlow splits a variable along one dimension."""
    divided = [axis for axis in range(len(shape)) if len({box[axis] for box in boxes}) > 1] or [0]
    ends = [box[divided[0]] for box in boxes]
    chained = all(first[1] == second[0] for first, second in pairwise(ends))
    whole = all(box[axis] == (0, shape[axis]) for axis in range(len(shape)) if axis != divided[0] for box in boxes)
    return bool(shape) and whole and chained and (ends[0][0], ends[-1][1]) == (0, shape[divided[0]])


def _write_tensor(file: Any, array: NDArray[Any]) -> bytes:
    """Append a tensor to the data file and return its entry."""
    values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = values.reshape(-1).view(np.uint8)
    offset = file.tell()
    file.write(data)
    dims = b"".join(b"\x12" + varint(len(size) + 1) + b"\x08" + size for size in map(varint, array.shape))
    entry = b"\x08" + varint(NUMBERS[array.dtype.name]) + b"\x12" + varint(len(dims)) + dims
    return entry + b"\x20" + varint(offset) + b"\x28" + varint(len(data)) + b"\x35" + struct.pack("<I", checksum(data))
