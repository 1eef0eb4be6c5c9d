"""The pages of a new keyring: a header, and a key for the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import PAGE_BYTES
from kvstore.sealing.slots import (
    HEADER_PAGES,
    NO_NAME,
    SLOTS_PER_PAGE,
    Header,
    Kind,
    Root,
    Slot,
    State,
    fresh_id,
    fresh_key,
    pack_header,
    pack_slot,
    root_associated,
    wrapped,
)
from nic_offload import aead

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.sealing.master_key import Master

__all__ = ["new_image"]


def new_image(master: Master, store_uuid: bytes, clock: Clock) -> bytes:
    """The pages of a new keyring."""
    root_id, root, store = fresh_id(), fresh_key(), fresh_key()
    try:
        now_ms = clock.wall_ms()
        blob = master.wrap(root_associated(store_uuid, root_id), root)
        header = pack_header(Header(store_uuid, 1, now_ms, master.id, Root(root_id, blob), SLOTS_PER_PAGE))
        slot = Slot(State.LIVE, Kind.STORE, fresh_id(), NO_NAME, NO_NAME, now_ms, root_id)
        first = pack_slot(wrapped(slot, store, root, store_uuid, 0))
    finally:
        aead.wipe(root)
        aead.wipe(store)
    return header.ljust(PAGE_BYTES, b"\0") * HEADER_PAGES + first + pack_slot(None) * (SLOTS_PER_PAGE - 1)
