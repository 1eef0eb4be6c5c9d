"""Calls over the fabric as `nic_offload/caller.c` writes them, made in Python."""

from __future__ import annotations

from kvstore.wire.fabric_call import _HEAD, CALL_BYTES, Call, _summed, header_bytes

__all__ = ["call_bytes"]

_ALIGN = 8


def call_bytes(call: Call, blocks: int, rows: bytes) -> bytes | None:
    """The whole of it; None if it is too long for a place."""
    metadata = header_bytes(call.metadata)
    metadata += bytes(-len(metadata) % _ALIGN)
    length = _HEAD.size + len(metadata) + len(rows)
    if length > CALL_BYTES:
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
