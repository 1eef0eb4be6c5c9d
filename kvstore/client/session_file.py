"""The file format of an exported session (`docs/sessions.md`, "Export and import"), written and read as streams.

What always holds: what was read has passed its checks, and `read_end` has seen the whole file: no byte was changed,
none is missing and none follows. One block at a time is in memory; a length is believed only if a block can have it.

It names no tenant, no user and no session, and no node's secret goes into it. It knows no client.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from kvstore.errors import SessionFileError
from kvstore.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    FINGERPRINT_BYTES,
    KEY_BYTES,
    SESSION_BLOCKS_MAX,
    SESSION_TURNS_MAX,
)
from kvstore.wire.manifest import Turn
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Content", "Reader", "Writer"]

_MAGIC: Final = b"tkvsess\x01"
_END: Final = b"tkv end\x01"
_HEAD: Final = struct.Struct(f"<8s{FINGERPRINT_BYTES}sII")  # blocks, turns
_TURN: Final = struct.Struct("<IIQ")
_BLOCK: Final = struct.Struct("<III")  # which one of the session it is first, bytes, CRC32C of them
_CRC: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 32


class Content(NamedTuple):
    """A session's blocks and turns."""

    fingerprint: bytes  # of the layout of its blocks
    turns: Sequence[Turn]
    keys: Sequence[bytes]

    def places(self) -> list[int]:
        """The first position of each different block: these are in the file, in this order."""
        first: dict[bytes, int] = {}
        for at, key in enumerate(self.keys):
            first.setdefault(key, at)
        return list(first.values())


class Writer:
    """Writes a file: the content, then each block, then the end."""

    def __init__(self, file: BinaryIO, content: Content) -> None:
        self._file = file
        self._digest = blake2b(digest_size=_DIGEST_BYTES, person=b"tkv session file")
        turns = b"".join(_TURN.pack(*turn) for turn in content.turns)
        head = _HEAD.pack(_MAGIC, content.fingerprint, len(content.keys), len(content.turns))
        self._write_checked(head)
        self._write_checked(turns + b"".join(content.keys))

    def block(self, place: int, payload: bytes) -> None:
        """Write a block."""
        self._write_checked(_BLOCK.pack(place, len(payload), crc32c(payload)))
        self._write(payload)

    def end(self) -> None:
        """Write the end, without which the file is invalid."""
        self._write(_END)
        self._file.write(self._digest.digest())

    def _write_checked(self, part: bytes) -> None:
        self._write(part + _CRC.pack(crc32c(part)))

    def _write(self, part: bytes) -> None:
        self._digest.update(part)
        self._file.write(part)


class Reader:
    """Reads a file: the content at once, then the blocks, then the end. SessionFileError if it is incomplete."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake2b(digest_size=_DIGEST_BYTES, person=b"tkv session file")
        magic, fingerprint, blocks, turns = _HEAD.unpack(self._read_checked(_HEAD.size, "the header"))
        if magic != _MAGIC:
            raise SessionFileError("The file is not an exported session, or one of a newer version.")
        if not blocks <= SESSION_BLOCKS_MAX or not turns <= SESSION_TURNS_MAX:
            raise SessionFileError(f"A session can't have {blocks} blocks and {turns} turns.")
        turns_bytes = turns * _TURN.size
        listed = self._read_checked(turns_bytes + blocks * KEY_BYTES, "the list of blocks")
        self.content = Content(
            fingerprint,
            [Turn._make(one) for one in _TURN.iter_unpack(listed[:turns_bytes])],
            [listed[at : at + KEY_BYTES] for at in range(turns_bytes, len(listed), KEY_BYTES)],
        )
        firsts = [turn.first_block for turn in self.content.turns]
        if (
            (firsts[:1] or [0]) != [0]
            or sorted({*firsts, blocks}) != [*firsts, blocks]
            or (blocks > 0) != (turns > 0)
        ):
            raise SessionFileError("The turns of the session in the file are not in order.")

    def blocks(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and payload of each block."""
        for place in self.content.places():
            number, length, crc = _BLOCK.unpack(self._read_checked(_BLOCK.size, f"block {place}"))
            if number != place or not BLOCK_BYTES_MIN <= length <= BLOCK_BYTES_MAX:
                raise SessionFileError(f"Block {place} of the session is not in its place in the file.")
            payload = self._read(length, f"block {place}")
            if crc32c(payload) != crc:
                raise SessionFileError(
                    f"Block {place} of the session has a wrong checksum: the file was changed."
                )
            yield self.content.keys[place], payload

    def read_end(self) -> None:
        """Check that the file ends here and was not changed."""
        if self._read(len(_END), "the end mark") != _END:
            raise SessionFileError("The file has no valid end mark: it was changed.")
        digest = self._digest.digest()
        if self._read(_DIGEST_BYTES, "the end mark") != digest:
            raise SessionFileError("The file has a wrong digest: it was changed.")
        if self._file.read(1):
            raise SessionFileError("The file has data after the end of the session.")

    def _read_checked(self, length: int, what: str) -> bytes:
        part = self._read(length, what)
        (crc,) = _CRC.unpack(self._read(_CRC.size, what))
        if crc32c(part) != crc:
            raise SessionFileError(
                f"The file is not an exported session, or was changed: {what} has a wrong checksum."
            )
        return part

    def _read(self, length: int, what: str) -> bytes:
        parts = []
        left = length
        while left:
            part = self._file.read(left)  # a pipe may return less than requested
            if not part:
                raise SessionFileError(f"The file is truncated: it ends within {what}.")
            parts.append(part)
            left -= len(part)
        whole = b"".join(parts)
        self._digest.update(whole)
        return whole
