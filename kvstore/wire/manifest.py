"""The codec of sessions and chunks, whose payloads `docs/record-format.md` describes.

It is pure. Bad bytes are None, never an exception: a recovery finds what a crash left.

Always holds: a manifest from `parse_manifest` packs to the same bytes, and its turns follow each other without a gap
from block 0 to the last; a chunk's key is derived from its keys, so equal chunks of a tenant, or of a user, are one.

It doesn't check CRCs, or whether the named blocks and chunks exist.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvstore.limits import (
    KEY_BYTES,
    SESSION_BLOCKS_MAX,
    SESSION_BYTES,
    SESSION_CHUNK_BLOCKS,
    SESSION_CHUNKS_MAX,
    SESSION_LABEL_BYTES_MAX,
    SESSION_TURNS_CACHED,
    SESSION_TURNS_MAX,
    USER_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CHUNK_PAYLOAD_BYTES",
    "Manifest",
    "Turn",
    "chunk_key",
    "cut_turns",
    "follow_each_other",
    "label_of",
    "pack_manifest",
    "parse_manifest",
    "session_key",
    "split_keys",
]

_FIXED = struct.Struct("<16s16sIIII")
_TURN = struct.Struct("<IIQ")
_EXPIRES = struct.Struct("<Q")
_PROTECTED = struct.Struct("<QI")  # when it expires, then how many blocks
_ORDERED = struct.Struct("<QIQ")  # the same, then the epoch
CHUNK_PAYLOAD_BYTES = SESSION_CHUNK_BLOCKS * KEY_BYTES

assert struct.calcsize("<16s16s") == USER_BYTES + SESSION_BYTES


class Turn(NamedTuple):
    """A turn of a session: it has the blocks from its first one to the next turn's."""

    first_block: int
    tokens: int  # the tokens whose KV its blocks hold
    at_ms: int  # when it began, since 1970


class Manifest(NamedTuple):
    """A session: its user, its full chunks by their keys, the block keys after them, its turns, its label."""

    user: bytes
    session: bytes
    chunks: tuple[bytes, ...]
    tail: tuple[bytes, ...]
    turns: tuple[Turn, ...] = ()
    label: bytes = b""
    expires_ms: int = 0  # 0: never
    protected: int = 0  # how many of its first blocks are protected from eviction
    epoch: int = 0  # that of the cluster's node that ordered it

    @property
    def blocks(self) -> int:
        """How many blocks it names."""
        return len(self.chunks) * SESSION_CHUNK_BLOCKS + len(self.tail)


def session_key(user: bytes, session: bytes) -> bytes:
    """The key of a session's record."""
    return blake2b(user + session, digest_size=KEY_BYTES, person=b"tkv session").digest()


def chunk_key(payload: bytes, user: bytes = b"") -> bytes:
    """The key of a chunk's record: of a user's own chunk, or of one that the users of a tenant share, in the clear."""
    return blake2b(payload + user, digest_size=KEY_BYTES, person=b"tkv chunk").digest()


def split_keys(joined: bytes) -> tuple[bytes, ...]:
    """Split concatenated keys."""
    return tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))


def cut_turns(turns: Sequence[Turn], blocks: int, left: int) -> tuple[Turn, ...]:
    """The turns of the first `left` of this many blocks.

    A turn that loses blocks keeps a proportional number of tokens, rounded down: exact if all its blocks have the same
    number, and never too many if only its last one had fewer.
    """
    kept = [turn for turn in turns if turn.first_block < left]
    end = turns[len(kept)].first_block if len(kept) < len(turns) else blocks
    if kept and end > left:
        last = kept[-1]
        kept[-1] = last._replace(tokens=last.tokens * (left - last.first_block) // (end - last.first_block))
    return tuple(kept)


def pack_manifest(manifest: Manifest) -> bytes:
    """Encode a session's payload."""
    counts = map(len, (manifest.chunks, manifest.tail, manifest.turns, manifest.label))
    fixed = _FIXED.pack(manifest.user, manifest.session, *counts)
    turns = (_TURN.pack(*turn) for turn in manifest.turns)
    if manifest.epoch:
        last = _ORDERED.pack(manifest.expires_ms, manifest.protected, manifest.epoch)
    elif manifest.protected:
        last = _PROTECTED.pack(manifest.expires_ms, manifest.protected)
    else:
        last = _EXPIRES.pack(manifest.expires_ms) if manifest.expires_ms else b""
    return b"".join((fixed, *manifest.chunks, *manifest.tail, *turns, manifest.label, last))


def label_of(payload: bytes) -> bytes:
    """The label of a packed session, without reading the rest; undefined if the payload is damaged."""
    if len(payload) < _FIXED.size:
        return b""
    _, _, chunks, tail, turns, label = _FIXED.unpack_from(payload)
    at = _FIXED.size + (chunks + tail) * KEY_BYTES + turns * _TURN.size
    return payload[at : at + label]


def parse_manifest(payload: bytes, label_bytes_max: int = SESSION_LABEL_BYTES_MAX) -> Manifest | None:
    """Read a session's payload; None if it is invalid. An index may have longer labels."""
    if len(payload) < _FIXED.size:
        return None
    user, session, chunks, tail, turns, label = _FIXED.unpack_from(payload)
    if chunks > SESSION_CHUNKS_MAX or tail >= SESSION_CHUNK_BLOCKS:
        return None
    if turns > SESSION_TURNS_MAX or label > label_bytes_max:
        return None
    turns_at = _FIXED.size + (chunks + tail) * KEY_BYTES
    label_at = turns_at + turns * _TURN.size
    last_at = label_at + label
    last = _parse_last(payload[last_at:])
    if last is None or len(payload) < last_at:
        return None
    keys = split_keys(payload[_FIXED.size : turns_at])
    read = _read_turns(payload[turns_at:label_at], chunks * SESSION_CHUNK_BLOCKS + tail)
    if read is None:
        return None
    return Manifest(user, session, keys[:chunks], keys[chunks:], read, payload[label_at:last_at], *last)


@lru_cache(SESSION_TURNS_CACHED)  # a step of a session reads the same turns several times
def _read_turns(packed: bytes, blocks: int) -> tuple[Turn, ...] | None:
    """The turns of a session with this many blocks; None if they don't follow each other."""
    read = tuple(map(Turn._make, _TURN.iter_unpack(packed)))
    return read if follow_each_other(read, blocks) else None


def _parse_last(data: bytes) -> tuple[int, int, int] | None:
    """Read what follows the label: the session's expiry, its protected blocks, its epoch; None if invalid."""
    if not data:
        return 0, 0, 0
    if len(data) == _EXPIRES.size:
        (expires_ms,) = _EXPIRES.unpack(data)
        return (expires_ms, 0, 0) if expires_ms else None
    if len(data) == _PROTECTED.size:
        expires_ms, protected = _PROTECTED.unpack(data)
        return (expires_ms, protected, 0) if 0 < protected <= SESSION_BLOCKS_MAX else None
    if len(data) == _ORDERED.size:
        expires_ms, protected, epoch = _ORDERED.unpack(data)
        return (expires_ms, protected, epoch) if epoch and protected <= SESSION_BLOCKS_MAX else None
    return None


def follow_each_other(turns: Sequence[Turn], blocks: int) -> bool:
    """Whether there is a turn for every block, and a block in every turn."""
    firsts = [turn.first_block for turn in turns]
    if not firsts:
        return blocks == 0
    return firsts[0] == 0 and all(one < two for one, two in pairwise([*firsts, blocks]))
