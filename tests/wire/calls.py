"""Calls over the fabric as `nic_offload/caller.c` writes them, made in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import FABRIC_ANSWER_BYTES, FABRIC_CALL_BYTES, FABRIC_CALL_PLACES
from kvstore.wire.fabric_call import _HEAD, Call, _summed, header_bytes

if TYPE_CHECKING:
    from kvstore.client.link import Link

__all__ = ["call_bytes", "due_generation"]

_ALIGN = 8
_GENERATION_AT = 8


def due_generation(link: Link, place: int) -> int:
    """The generation of the next call in a place whose last call was answered, read from the client's memory."""
    assert link.calls is not None
    at = (
        link.calls._start
        + FABRIC_CALL_PLACES * FABRIC_ANSWER_BYTES
        + place * FABRIC_CALL_BYTES
        + _GENERATION_AT
    )
    last = int.from_bytes(link._memory[at : at + 8], "little")
    return last + 1 if last else link.calls._area.first_generation


def call_bytes(call: Call, blocks: int, rows: bytes) -> bytes | None:
    """The bytes of a call; None if it is too long for a place."""
    metadata = header_bytes(call.metadata)
    metadata += bytes(-len(metadata) % _ALIGN)
    length = _HEAD.size + len(metadata) + len(rows)
    if length > FABRIC_CALL_BYTES:
        return None
    head = _HEAD.pack(
        0,
        length,
        call.generation,
        call.kind,
        call.flags,
        call.durability,
        0,
        len(metadata),
        blocks,
        call.ack_word,
        call.lease_ms,
        call.expires_unix_ms,
        call.fingerprint,
    )
    return _summed(b"".join((head, metadata, rows)))
