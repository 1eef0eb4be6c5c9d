"""Slots of a keyring, checked in batches by the C core (`wrapped_keys.c`).

What it doesn't do: interpret a slot; `kvstore.sealing.slots` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload import aead
from nic_offload._core import ffi, lib

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CLEAR_BYTES", "SLOT_BYTES", "STORE_BYTES", "are_authentic", "are_whole", "domain_tags"]

SLOT_BYTES: int = lib.TK_SLOT
CLEAR_BYTES: int = lib.TK_SLOT_CLEAR
STORE_BYTES: int = lib.TK_SLOT_STORE


def are_whole(slots: Buffer) -> bytearray:
    """Whether the CRC32C of each slot is right: 1 or 0."""
    view = ffi.from_buffer(slots)
    assert len(view) % SLOT_BYTES == 0, len(view)
    whole = bytearray(len(view) // SLOT_BYTES)
    lib.tk_slots_whole(view, len(whole), ffi.from_buffer(whole))
    return whole


def domain_tags(domains: Buffer) -> bytearray:
    """The tags that keys of these domains' blocks have, each as a u64."""
    view = ffi.from_buffer(domains)
    count, rest = divmod(len(view), lib.TK_DOMAIN_BYTES)
    assert not rest, len(view)
    tags = bytearray(8 * count)
    lib.tk_domain_tags(view, count, ffi.from_buffer("uint64_t[]", tags))
    return tags


def are_authentic(key: Buffer, store: bytes, slots: Buffer, which: Buffer) -> bytearray:
    """Whether this key wraps the key in each of some of these slots: 1 or 0.

    `which` has two u32 for each: its position among them, and its number in the keyring.
    """
    keyed, view = ffi.from_buffer(key), ffi.from_buffer(slots)
    asked = ffi.from_buffer("struct tk_slot_at[]", which)
    assert (len(keyed), len(store)) == (aead.KEY_BYTES, STORE_BYTES)
    authentic = bytearray(len(asked))
    count = len(view) // SLOT_BYTES
    answers = ffi.from_buffer(authentic)
    aead.check(lib.tk_slots_authentic(keyed, store, view, count, asked, len(asked), answers))
    return authentic
