"""The codec of sessions and chunks, the payloads of which `docs/record-format.md` has.

It is pure. Bad bytes are None, never an exception: a recovery meets what a crash left.

Always holds: what `parse_manifest` gives packs to the same bytes; a chunk's key is made of its keys, so equal
chunks of a tenant are one.

It doesn't check CRCs, nor whether the blocks and chunks that are named exist.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

from kvstore.limits import (
    KEY_BYTES,
    SESSION_BYTES,
    SESSION_CHUNK_BLOCKS,
    SESSION_CHUNKS_MAX,
    USER_BYTES,
)

__all__ = [
    "CHUNK_PAYLOAD_BYTES",
    "Manifest",
    "chunk_key",
    "pack_manifest",
    "parse_manifest",
    "session_key",
    "split_keys",
]

_FIXED = struct.Struct("<16s16sII")
CHUNK_PAYLOAD_BYTES = SESSION_CHUNK_BLOCKS * KEY_BYTES

assert struct.calcsize("<16s16s") == USER_BYTES + SESSION_BYTES


class Manifest(NamedTuple):
    """A session: whose it is, its whole chunks by their keys, and the block keys behind them."""

    user: bytes
    session: bytes
    chunks: tuple[bytes, ...]
    tail: tuple[bytes, ...]

    @property
    def blocks(self) -> int:
        """How many blocks it names."""
        return len(self.chunks) * SESSION_CHUNK_BLOCKS + len(self.tail)


def session_key(user: bytes, session: bytes) -> bytes:
    """The key of a session's record."""
    return blake2b(user + session, digest_size=KEY_BYTES, person=b"tkv session").digest()


def chunk_key(payload: bytes) -> bytes:
    """The key of a chunk's record."""
    return blake2b(payload, digest_size=KEY_BYTES, person=b"tkv chunk").digest()


def split_keys(joined: bytes) -> tuple[bytes, ...]:
    """Take keys apart that stand one behind the other."""
    return tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))


def pack_manifest(manifest: Manifest) -> bytes:
    """Give a session's payload."""
    fixed = _FIXED.pack(manifest.user, manifest.session, len(manifest.chunks), len(manifest.tail))
    return b"".join((fixed, *manifest.chunks, *manifest.tail))


def parse_manifest(payload: bytes) -> Manifest | None:
    """Read a session's payload; None if it is none."""
    if len(payload) < _FIXED.size:
        return None
    user, session, chunks, tail = _FIXED.unpack_from(payload)
    if chunks > SESSION_CHUNKS_MAX or tail >= SESSION_CHUNK_BLOCKS:
        return None
    if len(payload) != _FIXED.size + (chunks + tail) * KEY_BYTES:
        return None
    keys = split_keys(payload[_FIXED.size :])
    return Manifest(user, session, keys[:chunks], keys[chunks:])
