"""Protocol buffers as far as SentencePiece models need them: the fields of a message, by their numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Value = int | float | bytes


def read_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message in their order: integers, floats of 4 or 8 bytes, and the bytes of anything else.

    >>> list(read_fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
    [(1, 150), (2, b'hi')]
    """
    place = 0
    while place < len(data):
        key, place = read_varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = read_varint(data, place)
            yield number, value
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            yield number, struct.unpack("<f" if size == 4 else "<d", take(data, place, size))[0]
            place += size
        elif kind == BYTES:
            size, place = read_varint(data, place)
            yield number, take(data, place, size)
            place += size
        else:
            raise ValueError(f"the byte {place} begins a field of the unknown type {kind}")


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """An integer of 7 bits per byte, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = take(data, place, 1)[0]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError(f"the integer before byte {place} is longer than 64 bits")


def take(data: bytes, place: int, size: int) -> bytes:
    if size > len(data) - place:
        raise ValueError(f"it ends inside a field, at byte {len(data)}")
    return data[place : place + size]
