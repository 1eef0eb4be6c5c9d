"""Calls over the fabric: the three that batches of blocks need, without gRPC's half millisecond.

A client puts a call into one of its places in the node's memory, followed by the flag; the node answers with an 8-byte
word in the client's memory, preceded by bytes if the answer has any. The calls are `Fetch` and `Reserve` of
`kvstore.proto` and `Prefix` of `blocks.proto`, with the same meaning.

A place of the node holds one call: `head | metadata | rows`. Before all places is a page with their flags.

    head       crc32c of all that follows, length in bytes, generation, kind, flags, durability, bytes of metadata,
               blocks, ack word, lease_ms, expires_unix_ms, fingerprint
    metadata   of each header: bytes of its name, of its value, whether that is bytes; name; value. Then zeros, to 8
    rows       of a fetch:    key, length, ack word, its generation, target, target's key
               of parts:      the same, and of the block's bytes how many to skip and how many to send
               of a reserve:  key, length, ack word
               of one into erase domains: the same, and the domain; zeros: none was named
               of a prefix:   key

A place of the client holds one answer: `crc32c, length, generation, kind`, then rows (slot, already stored, generation,
payload, flag), for a prefix how many blocks are stored, why the next one is not (0: all are) and details, or an error
(bytes of its name, retry_after_ms; name; sentence). A prefix of blocks that are all in memory has no such bytes.

Where the connection is sealed (`kvstore.wire.seal`), a tag of 8 bytes follows a call or an answer; the length does not
count it.

What always holds: the n-th call of a place has the generation `first + n`, so a flag or answer of an earlier call is
never mistaken for a current one; a wrong checksum, length or generation is a ProtocolError, and nothing is done.
All numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvstore.errors import Overloaded, ProtocolError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    FABRIC_ANSWER_BYTES,
    FABRIC_CALL_BYTES,
    FABRIC_CALL_PLACES,
    PAGE_BYTES,
)
from kvstore.miss import Miss, MissReason
from kvstore.names import UNSAID
from kvstore.wire.status import error_named
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.errors import KvError

__all__ = [
    "AREA_BYTES",
    "LENGTH_END",
    "ROWS",
    "TAG_BYTES",
    "TELLS",
    "AnswerCode",
    "Call",
    "CallKind",
    "FetchRow",
    "Leased",
    "Metadata",
    "ReserveRow",
    "Rows",
    "call_offset",
    "count_bytes",
    "count_of",
    "error_bytes",
    "flag_offset",
    "header_bytes",
    "leases_bytes",
    "leases_of",
    "length_said",
    "metadata_of",
    "read_call",
    "rows_of_fetch",
    "rows_of_parts",
    "rows_of_reserve",
]

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

AREA_BYTES = PAGE_BYTES + FABRIC_CALL_PLACES * FABRIC_CALL_BYTES

_HEAD = struct.Struct("<IIQ4BIIII4xQ16s")  # as a compiler would lay it out; so are the rows
_HEADER = struct.Struct("<BHB")
_FETCH = struct.Struct("<32sIIQQQ")
_PART = struct.Struct("<32sIIQQQII")
_RESERVE = struct.Struct("<32sII")
_RESERVE_IN = struct.Struct("<32sII16s")
_PREFIX = struct.Struct("<32s")
_ANSWER = struct.Struct("<IIQB7x")
_LEASE = struct.Struct("<IIQQQ")
_ERROR = struct.Struct("<HI")
_COUNT = struct.Struct("<IB")
_CRC_BYTES = 4
TAG_BYTES = 8
LENGTH_END = 8
_ROWS, _REFUSED, _COUNTED = 1, 2, 4  # kinds of answers that have bytes

assert _HEAD.size + BATCH_BLOCKS_MAX * max(_FETCH.size, _RESERVE_IN.size) + TAG_BYTES < FABRIC_CALL_BYTES
assert _ANSWER.size + BATCH_BLOCKS_MAX * _LEASE.size + TAG_BYTES <= FABRIC_ANSWER_BYTES


class CallKind(enum.IntEnum):
    """Which call it is."""

    FETCH = 1
    RESERVE = 2
    FETCH_PARTS = 3  # only for a node that has announced that it sends parts
    RESERVE_IN_DOMAINS = 4  # for blocks that name their domains
    PREFIX = 5  # only for a node that has announced that it answers these

    @property
    def reserves(self) -> bool:
        """Whether it requests slots rather than blocks."""
        return self in (CallKind.RESERVE, CallKind.RESERVE_IN_DOMAINS)

    @property
    def name_in_proto(self) -> str:
        """The call over gRPC that means the same."""
        if self is CallKind.PREFIX:
            return "Prefix"
        return "Reserve" if self.reserves else "Fetch"


ROWS = 4  # flag of a call: its client accepts locations of single blocks in memory that it has mapped
TELLS = 1  # flag of a call: its metadata must be processed before it is answered


class AnswerCode(enum.IntEnum):
    """The code in the word of an answer."""

    DONE = 1
    BYTES = 2  # the answer's bytes are in the client's place


_ROW_OF = {
    CallKind.FETCH: _FETCH,
    CallKind.RESERVE: _RESERVE,
    CallKind.FETCH_PARTS: _PART,
    CallKind.RESERVE_IN_DOMAINS: _RESERVE_IN,
    CallKind.PREFIX: _PREFIX,
}


class FetchRow(NamedTuple):
    """A requested block, and its destination."""

    key: bytes
    length: int
    ack_word: int
    ack_generation: int
    target: int
    target_key: int
    skip: int = 0
    part: int = 0  # this many bytes of the block, after the first `skip`; 0: all


class ReserveRow(NamedTuple):
    """A block that is to be put."""

    key: bytes
    length: int
    ack_word: int
    domain: bytes = UNSAID


class Leased(NamedTuple):
    """The result for a block: a slot, or that it is stored already."""

    slot: int
    already_stored: bool
    generation: int
    payload: int
    flag: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call, without its rows."""

    generation: int
    kind: CallKind
    ack_word: int
    fingerprint: bytes
    metadata: Metadata = ()
    flags: int = 0
    durability: int = 0
    lease_ms: int = 0
    expires_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """The blocks of a call, in the list of its kind; the other lists are empty."""

    fetch: Sequence[FetchRow] = ()
    reserve: Sequence[ReserveRow] = ()
    keys: Sequence[bytes] = ()  # of a prefix

    def __len__(self) -> int:
        return len(self.fetch) + len(self.reserve) + len(self.keys)


def flag_offset(place: int) -> int:
    """The offset of a place's flag from the start of the node's area."""
    return place * 8


def call_offset(place: int) -> int:
    """The offset of a place."""
    return PAGE_BYTES + place * FABRIC_CALL_BYTES


# --- calls


def rows_of_fetch(rows: Iterable[FetchRow | tuple[bytes, int, int, int, int, int]]) -> bytes:
    """The blocks of a fetch, each the first six fields of a `FetchRow`."""
    pack = _FETCH.pack
    return b"".join([pack(*row[:6]) for row in rows])


def rows_of_parts(rows: Iterable[FetchRow]) -> bytes:
    """The parts of blocks of a fetch."""
    return b"".join([_PART.pack(*row) for row in rows])


def rows_of_reserve(rows: Iterable[ReserveRow], *, in_domains: bool = False) -> bytes:
    """The blocks of a reserve."""
    if in_domains:
        return b"".join([_RESERVE_IN.pack(*row) for row in rows])
    return b"".join([_RESERVE.pack(*row[:3]) for row in rows])


def read_call(data: bytes, generation: int) -> tuple[Call, Rows]:
    """Parse a call; ProtocolError if it is not a call, or not the expected one."""
    _check(data, generation, _HEAD.size)
    (
        _,
        _,
        _,
        kind,
        flags,
        durability,
        _,
        metadata_bytes,
        blocks,
        ack_word,
        lease_ms,
        expires_unix_ms,
        fingerprint,
    ) = _HEAD.unpack_from(data)
    rows_at = _HEAD.size + metadata_bytes
    row = _ROW_OF.get(kind)
    if row is None:
        raise ProtocolError(f"There is no call {kind} over the fabric.")
    if blocks > BATCH_BLOCKS_MAX:
        raise ProtocolError(f"A call over the fabric takes {BATCH_BLOCKS_MAX} blocks, not {blocks}.")
    if len(data) - rows_at != blocks * row.size:
        raise ProtocolError(f"The length of a call over the fabric does not match its {blocks} blocks.")
    call = Call(
        generation,
        CallKind(kind),
        ack_word,
        fingerprint,
        metadata_of(data[_HEAD.size : rows_at]),
        flags,
        durability,
        lease_ms,
        expires_unix_ms,
    )
    unpacked = row.iter_unpack(memoryview(data)[rows_at:])
    if call.kind is CallKind.PREFIX:
        return call, Rows(keys=[key for (key,) in unpacked])
    if not call.kind.reserves:
        return call, Rows(fetch=[FetchRow(*fields) for fields in unpacked])
    if call.kind is CallKind.RESERVE:
        return call, Rows(reserve=[ReserveRow(*fields) for fields in unpacked])
    return call, Rows(
        reserve=[
            ReserveRow(key, length, word, domain if any(domain) else UNSAID)
            for key, length, word, domain in unpacked
        ]
    )


def header_bytes(metadata: Metadata) -> bytes:
    """The headers of a call."""
    return b"".join([_header_bytes(header) for header in metadata])


def _header_bytes(header: tuple[str, str | bytes]) -> bytes:
    name, value = header[0].encode(), header[1]
    data = value if isinstance(value, bytes) else value.encode()
    return _HEADER.pack(len(name), len(data), isinstance(value, bytes)) + name + data


def metadata_of(data: bytes) -> Metadata:
    """The headers in a call."""
    headers: list[tuple[str, str | bytes]] = []
    at = 0
    while len(data) - at >= _HEADER.size:
        name_bytes, value_bytes, binary = _HEADER.unpack_from(data, at)
        if not name_bytes:
            break
        at += _HEADER.size
        name, value = data[at : at + name_bytes], data[at + name_bytes : at + name_bytes + value_bytes]
        at += name_bytes + value_bytes
        if at > len(data):
            raise ProtocolError("The metadata of a call over the fabric is truncated.")
        headers.append(
            (name.decode("ascii", "replace"), value if binary else value.decode("ascii", "replace"))
        )
    return tuple(headers)


# --- answers


def leases_bytes(generation: int, leases: Sequence[Leased]) -> bytes:
    """The answer to a reserve."""
    rows = [_LEASE.pack(*lease) for lease in leases]
    length = _ANSWER.size + len(rows) * _LEASE.size
    assert rows
    return _summed(_ANSWER.pack(0, length, generation, _ROWS) + b"".join(rows))


def count_bytes(generation: int, blocks: int, miss: Miss | None) -> bytes:
    """The answer to a prefix: how many blocks are stored, and why the next one is not."""
    room = FABRIC_ANSWER_BYTES - TAG_BYTES - _ANSWER.size - _COUNT.size
    reason, detail = (0, b"") if miss is None else (miss.reason, miss.detail.encode()[:room])
    length = _ANSWER.size + _COUNT.size + len(detail)
    return _summed(_ANSWER.pack(0, length, generation, _COUNTED) + _COUNT.pack(blocks, reason) + detail)


def error_bytes(generation: int, error: KvError) -> bytes:
    """The answer to a call that was refused."""
    name = type(error).__name__.encode()
    room = FABRIC_ANSWER_BYTES - TAG_BYTES - _ANSWER.size - _ERROR.size - len(name)
    sentence = str(error).encode()[:room]
    retry_after_ms = error.retry_after_ms if isinstance(error, Overloaded) else 0
    length = _ANSWER.size + _ERROR.size + len(name) + len(sentence)
    head = _ANSWER.pack(0, length, generation, _REFUSED) + _ERROR.pack(len(name), retry_after_ms)
    return _summed(head + name + sentence)


def leases_of(data: bytes, generation: int) -> list[Leased]:
    """Parse the answer to a reserve: return the leases, or raise the error."""
    if _kind_of(data, generation) != _ROWS:
        raise ProtocolError("An answer over the fabric has no leases.")
    if (len(data) - _ANSWER.size) % _LEASE.size:
        raise ProtocolError("An answer over the fabric ends in the middle of a lease.")
    rows = _LEASE.iter_unpack(memoryview(data)[_ANSWER.size :])
    return [Leased(slot, bool(stored), *rest) for slot, stored, *rest in rows]


def count_of(data: bytes, generation: int) -> tuple[int, Miss | None]:
    """Parse the answer to a prefix: return the number of blocks and the next one's miss, or raise the error."""
    if _kind_of(data, generation) != _COUNTED or len(data) < _ANSWER.size + _COUNT.size:
        raise ProtocolError("An answer over the fabric lacks the number of stored blocks.")
    blocks, reason = _COUNT.unpack_from(data, _ANSWER.size)
    detail = data[_ANSWER.size + _COUNT.size :].decode("utf-8", "replace")
    return blocks, Miss(MissReason(reason), detail) if reason else None


def _kind_of(data: bytes, generation: int) -> int:
    """Check an answer; return its kind, or raise the error that it has."""
    _check(data, generation, _ANSWER.size)
    kind = int(_ANSWER.unpack_from(data)[3])
    if kind != _REFUSED:
        return kind
    at = _ANSWER.size + _ERROR.size
    if len(data) < at:
        raise ProtocolError("An error in an answer over the fabric is truncated.")
    name_bytes, retry_after_ms = _ERROR.unpack_from(data, _ANSWER.size)
    name = data[at : at + name_bytes].decode("ascii", "replace")
    raise error_named(name, data[at + name_bytes :].decode("utf-8", "replace"), retry_after_ms)


# --- both


def _summed(data: bytes) -> bytes:
    return crc32c(data[_CRC_BYTES:]).to_bytes(_CRC_BYTES, "little") + data[_CRC_BYTES:]


def length_said(start: bytes) -> int:
    """The length that a call or an answer states in its first `LENGTH_END` bytes; 0 if that is impossible."""
    length = int.from_bytes(start[_CRC_BYTES:], "little")
    return length if length <= FABRIC_CALL_BYTES else 0


def _check(data: bytes, generation: int, least_bytes: int) -> None:
    """Refuse bytes that are damaged, or not the expected call or answer."""
    if len(data) < least_bytes or length_said(data[:LENGTH_END]) != len(data):
        raise ProtocolError("A fabric message does not have the length it states.")
    if crc32c(data[_CRC_BYTES:]) != int.from_bytes(data[:_CRC_BYTES], "little"):
        raise ProtocolError("A fabric message fails its checksum.")
    if int.from_bytes(data[LENGTH_END : LENGTH_END + 8], "little") != generation:
        raise ProtocolError("A fabric message does not belong to this call.")
