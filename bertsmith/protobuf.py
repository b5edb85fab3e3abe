"""Protocol buffers without their library: a field is a tag, with its number and wire type, and a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Damaged(Exception):
    """Why the bytes of a file are not valid; the caller, who knows the name of the file, raises a UserError with it."""


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Read a number with seven bits per byte, low bits first; also return the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        number |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return number, place
    raise Damaged("is damaged: a number in it has no end")


def varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: their numbers and values, as integers or bytes."""
    place = 0
    while place < len(data):
        tag, place = read_varint(data, place)
        if tag & 7 == 0:
            value, place = read_varint(data, place)
            yield tag >> 3, (value & (1 << 64) - 1) - (value >> 63 & 1) * (1 << 64)
            continue
        size, place = read_varint(data, place) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, -1), place)
        if size < 0 or place + size > len(data):
            raise Damaged("is damaged: a value in it is not a protocol buffer")
        content = data[place : place + size]
        yield tag >> 3, content if tag & 7 == 2 else int.from_bytes(content, "little")
        place += size


def numbers(data: bytes) -> dict[int, int]:
    """Return the numeric fields of a message."""
    return {field: value for field, value in fields(data) if isinstance(value, int)}


def messages(data: bytes, wanted: int) -> list[bytes]:
    """Return the messages that one field of a message holds."""
    return [value for field, value in fields(data) if field == wanted and isinstance(value, bytes)]
