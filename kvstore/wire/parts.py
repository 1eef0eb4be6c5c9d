"""The messages of the service Batches without copies of chunks: protobuf's own encoding.

The generated classes copy a chunk two or three times on its way into a message and out of it, which costs more than
sending it. Here a message is joined once from bytes in memory, and read as views into the received bytes.

Always holds: the generated classes read what is made here, and the other way round; unknown fields are skipped;
bytes that are not a message are a ProtocolError, and nothing after the end of a message is read. A message has at most
`MESSAGE_FIELDS_MAX` fields, and a part of one `PART_FIELDS_MAX`. The parts of a message of puts are read one by one, as
they are taken: a thousand at once would delay others by milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

from kvstore.errors import ProtocolError
from kvstore.limits import MESSAGE_FIELDS_MAX, PART_FIELDS_MAX, VARINT_BYTES_MAX
from kvstore.wire import batches_pb2 as pb
from kvstore.wire import kvstore_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["GotPart", "PutMessage", "encoded_get", "encoded_put", "got_parts", "parse_put"]

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5  # kinds of fields
_KIND_BITS = 3
_SEVEN_BITS, _MORE = 0x7F, 0x80  # of each byte of a varint
_PART_OF_GETS, _NUMBER, _MISS, _CHUNK_GOT = 1, 1, 2, 3  # fields
_TENANT, _DURABILITY, _EXPIRES, _PART_OF_PUTS, _NAME, _CHUNK_PUT = 1, 2, 3, 4, 1, 2


class GotPart(NamedTuple):
    """A part of a get's answer: more of a block, or its miss."""

    number: int
    miss: kvstore_pb2.GetMiss | None
    chunk: memoryview


class PutMessage(NamedTuple):
    """A part of a put's request."""

    tenant: str
    durability: int
    expires_unix_ms: int
    unread: list[memoryview]  # its parts

    @property
    def named(self) -> int:
        """How many blocks begin."""
        return sum(map(_has_name, self.unread))

    def parts(self) -> Iterator[tuple[kvstore_pb2.BlockName | None, memoryview]]:
        """Read its parts: each is a name, if a block begins, and bytes."""
        return map(_put_part, self.unread)


def encoded_get(parts: Sequence[tuple[int, memoryview | bytes]]) -> bytes:
    """Encode a GetBatchResponse with these chunks, each with its block's number."""
    pieces: list[bytes | memoryview] = []
    for number, chunk in parts:
        head = b"\x08" + _varint(number) + b"\x1a" + _varint(len(chunk))
        pieces += (b"\x0a" + _varint(len(head) + len(chunk)) + head, chunk)
    return b"".join(pieces)


def encoded_put(
    head: pb.PutBatchRequest, parts: Sequence[tuple[kvstore_pb2.BlockName | None, memoryview | bytes]]
) -> bytes:
    """Encode a PutBatchRequest: its head, then these parts."""
    pieces: list[bytes | memoryview] = [head.SerializeToString()]
    for name, chunk in parts:
        named = b"" if name is None else name.SerializeToString()
        part = b"" if name is None else b"\x0a" + _varint(len(named)) + named
        part += b"\x12" + _varint(len(chunk))
        pieces += (b"\x22" + _varint(len(part) + len(chunk)) + part, chunk)
    return b"".join(pieces)


def got_parts(message: bytes) -> Iterator[GotPart]:
    """Read a GetBatchResponse."""
    for field, part in _fields(memoryview(message), MESSAGE_FIELDS_MAX):
        if field == _PART_OF_GETS:
            number, miss, chunk = 0, None, memoryview(b"")
            for inner, value in _fields(_bytes(part), PART_FIELDS_MAX):
                if inner == _NUMBER and isinstance(value, int):
                    number = value
                elif inner == _MISS:
                    miss = kvstore_pb2.GetMiss()
                    _merge(miss, _bytes(value))
                elif inner == _CHUNK_GOT:
                    chunk = _bytes(value)
            yield GotPart(number, miss, chunk)


def parse_put(message: bytes) -> PutMessage:
    """Read a PutBatchRequest, without its parts."""
    parts: list[memoryview] = []
    tenant, durability, expires_unix_ms = "", 0, 0
    for field, value in _fields(memoryview(message), MESSAGE_FIELDS_MAX):
        if field == _PART_OF_PUTS:
            parts.append(_bytes(value))
        elif field == _TENANT:
            tenant = _text(_bytes(value))
        elif field == _DURABILITY and isinstance(value, int):
            durability = value
        elif field == _EXPIRES and isinstance(value, int):
            expires_unix_ms = value
    return PutMessage(tenant, durability, expires_unix_ms, parts)


def _put_part(part: memoryview) -> tuple[kvstore_pb2.BlockName | None, memoryview]:
    name, chunk = None, memoryview(b"")
    for field, value in _fields(part, PART_FIELDS_MAX):
        if field == _NAME:
            name = name or kvstore_pb2.BlockName()
            _merge(name, _bytes(value))
        elif field == _CHUNK_PUT:
            chunk = _bytes(value)
    return name, chunk


def _has_name(part: memoryview) -> bool:
    """Whether a part has a name, which nearly always comes first, or not at all."""
    if not part or part[0] == _NAME << _KIND_BITS | _LENGTH:
        return len(part) > 0
    return any(field == _NAME for field, _ in _fields(part, PART_FIELDS_MAX))


def _merge(message: kvstore_pb2.BlockName | kvstore_pb2.GetMiss, view: memoryview) -> None:
    try:
        message.MergeFromString(bytes(view))
    except DecodeError as error:
        raise ProtocolError("A message of a stream of blocks is invalid.") from error


def _text(view: memoryview) -> str:
    try:
        return bytes(view).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("A tenant's name is not text.") from error


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ProtocolError("A message of a stream of blocks has a number in place of bytes.")
    return value


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > _SEVEN_BITS:
        encoded.append(number & _SEVEN_BITS | _MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _fields(view: memoryview, fields_max: int) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message by number: integers as they are, bytes as views."""
    at, end = 0, len(view)
    for _ in range(fields_max):
        if at >= end:
            return
        tag, at = _read_varint(view, at)
        field, kind = tag >> _KIND_BITS, tag & (1 << _KIND_BITS) - 1
        if kind == _VARINT:
            number, at = _read_varint(view, at)
            yield field, number
            continue
        if kind == _LENGTH:
            length, at = _read_varint(view, at)
        elif kind in (_FIXED_64, _FIXED_32):
            length = 8 if kind == _FIXED_64 else 4
        else:
            raise ProtocolError("A message of a stream of blocks has a field of an unknown type.")
        if length > end - at:
            raise ProtocolError("A message of a stream of blocks is truncated.")
        yield field, view[at : at + length]
        at += length
    if at < end:
        raise ProtocolError(f"A message of a stream of blocks has more than {fields_max} fields.")


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < _MORE:  # nearly all of them
        return view[at], at + 1
    number = 0
    for count, byte in enumerate(view[at : at + VARINT_BYTES_MAX]):
        number |= (byte & _SEVEN_BITS) << 7 * count
        if byte < _MORE:
            return number & (1 << 64) - 1, at + count + 1
    raise ProtocolError("A message of a stream of blocks is truncated.")
