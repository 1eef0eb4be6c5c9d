"""Acknowledgement words: 8 bytes that a node puts into a client's memory to report a block's progress.

A word is `generation << 8 | code`. The generation is the lease's (for a put) or one of the client's own
(for a fetch), so a word of an earlier use is never mistaken for a current one. Codes of a put only rise: a watch
that waits for WRITTEN sees LANDED on the way and ends at the first code that is not below WRITTEN.

A failed put's code is the same error at both ends, with its own sentence; the node's sentence, which has more details,
is requested by gRPC (`kvstore.client.failures`).
"""

from __future__ import annotations

import enum
from typing import Final

from kvstore.durability import Durability
from kvstore.errors import (
    BeingErased,
    Corrupt,
    DomainRequired,
    Expired,
    KeyTaken,
    KvError,
    LeaseExpired,
    NoSpace,
    QuotaExceeded,
    ReadOnly,
    StorageError,
)
from kvstore.limits import GENERATION_MAX
from kvstore.miss import Miss, MissReason

__all__ = ["AckCode", "ack_word", "code_of_error", "code_of_miss", "error_of_code", "miss_of_code"]

_CODE_BITS = 8
_MISS = 0x80


@enum.unique
class AckCode(enum.IntEnum):
    """Codes of a put, then of a fetch. A fetch's miss is `0x80 | reason`."""

    LANDED = Durability.LANDED
    WRITTEN = Durability.WRITTEN
    SYNCED = Durability.SYNCED
    LEASE_EXPIRED = 0x40
    NO_SPACE = 0x41
    READ_ONLY = 0x42
    STORAGE_FAILED = 0x43
    QUOTA_EXCEEDED = 0x44
    KEY_TAKEN = 0x45
    EXPIRED = 0x46
    DIFFERS = 0x47
    DOMAIN_REQUIRED = 0x48
    BEING_ERASED = 0x49
    SCATTERED = 0x7D  # never sent by a node: a client's core has copied the block into its pieces
    CANCELLED = 0x7E  # nothing more of it will be written
    SERVED = 0x7F


_ERRORS: Final[dict[int, tuple[type[KvError], str]]] = {
    AckCode.LEASE_EXPIRED: (
        LeaseExpired,
        "The lease of the slot ended before the block landed; reserve it again.",
    ),
    AckCode.NO_SPACE: (NoSpace, "The node's drives have no extent free for the block."),
    AckCode.QUOTA_EXCEEDED: (
        QuotaExceeded,
        "The tenant's quota of bytes is used up, and none of its blocks may be evicted.",
    ),
    AckCode.READ_ONLY: (ReadOnly, "The node's drive failed and is read-only."),
    AckCode.KEY_TAKEN: (KeyTaken, ""),  # it names the key
    AckCode.DIFFERS: (
        Corrupt,
        "The bytes that arrived at the node are not those that were sent; they were not stored.",
    ),
    AckCode.EXPIRED: (Expired, "The block's time to live ended before it was put."),
    AckCode.DOMAIN_REQUIRED: (DomainRequired, str(DomainRequired())),
    AckCode.BEING_ERASED: (BeingErased, str(BeingErased())),
    AckCode.STORAGE_FAILED: (
        StorageError,
        "The node could not store the block; its log says why.",
    ),  # any other
}


def ack_word(generation: int, code: int) -> int:
    """The word to put."""
    assert 0 < generation <= GENERATION_MAX
    assert 0 < code < 1 << _CODE_BITS
    return generation << _CODE_BITS | code


def code_of_error(error: KvError) -> AckCode:
    """The code of a put's failure."""
    for code, (kind, _) in _ERRORS.items():
        if isinstance(error, kind):
            return AckCode(code)
    return AckCode.STORAGE_FAILED


def error_of_code(code: int, key: bytes) -> KvError | None:
    """The error that the final code of a put of this key stands for; None: it is as durable as the code says."""
    if code in (AckCode.LANDED, AckCode.WRITTEN, AckCode.SYNCED):
        return None
    known = _ERRORS.get(code)
    if known is None:
        return StorageError(f"The node did not store the block, for an unknown reason (code {code}).")
    kind, sentence = known
    return KeyTaken.of(key, "other bytes or another layout") if kind is KeyTaken else kind(sentence)


def code_of_miss(reason: MissReason) -> int:
    """The code of a fetch's miss."""
    return _MISS | reason


def miss_of_code(code: int) -> Miss | None:
    """The miss that a fetch's code stands for; None: the bytes are in the client's memory."""
    if code in (AckCode.SERVED, AckCode.SCATTERED):
        return None
    if code == AckCode.CANCELLED:
        return Miss(MissReason.NODE_AWAY, "it did not arrive by the deadline, and was cancelled")
    return Miss(MissReason(code & ~_MISS))
