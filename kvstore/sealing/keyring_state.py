"""The part of a keyring's file that is readable without any key: its header, and the owners and number of its keys.

What always holds: of two slots with the same key, as an interrupted rotation of the master key leaves them, the one
that the header's root key wraps counts. What it doesn't do: write, or unwrap more than the root key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import Corrupt, WrongMasterKey
from kvstore.limits import PAGE_BYTES, SECTOR_BYTES
from kvstore.sealing.keyring_file import FolderFile
from kvstore.sealing.slot_table import SlotTable
from kvstore.sealing.slots import (
    HEADER_PAGES,
    SLOTS_PER_PAGE,
    Header,
    Kind,
    Slot,
    State,
    parse_header,
    root_associated,
)
from kvstore.wire.record import KeyringMark

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvstore.sealing.keyring_file import KeyringFile
    from kvstore.sealing.master_key import Master

__all__ = [
    "Found",
    "KeyringStatus",
    "TenantKey",
    "found_in",
    "header_of",
    "header_sectors",
    "read_root",
    "read_status",
    "status_of",
    "unwrapped_root",
    "why_not_the_drives",
]


class KeyringStatus(NamedTuple):
    """The part of a keyring's state that needs no key."""

    store_uuid: bytes
    master_id: str
    made_ms: int
    size_bytes: int
    free: int
    live: int  # keys of all kinds
    erased: int
    damaged: int
    tenants: tuple[tuple[bytes, int], ...]  # each with the version of its key
    rotating: tuple[bytes, ...]  # tenants with an unfinished rotation
    copies_on_write: str | None  # the kind of file system, if it keeps overwritten data
    mark: KeyringMark | None  # the mark that drives store; None if it has no store key


class TenantKey(NamedTuple):
    """A tenant's key, and where it is."""

    number: int
    slot: Slot


def read_status(path: Path) -> KeyringStatus:
    """The state of a keyring without its master key, even while a node has it open."""
    file = FolderFile(path, locks=False)
    try:
        header = header_of(file)
        count = header.slots or (file.pages - HEADER_PAGES) * SLOTS_PER_PAGE
        slots = SlotTable(file, count, are_marked=bool(header.slots))
        found = found_in(slots, header.root.id)
        return status_of(
            file, header, slots, found.tenants, None if found.store is None else found.store[1].id
        )
    finally:
        file.close()


def header_sectors(file: KeyringFile) -> list[bytes]:
    """Both copies of the header."""
    return [file.read(copy, 1)[:SECTOR_BYTES] for copy in range(HEADER_PAGES)]


def header_of(file: KeyringFile) -> Header:
    """The current copy of the header; Corrupt if no copy is valid."""
    if file.pages <= HEADER_PAGES:
        raise Corrupt("The keyring was truncated; it was left unchanged.")
    return parse_header(header_sectors(file))


def unwrapped_root(header: Header, master: Master) -> memoryview:
    """The root key, which the caller must wipe; WrongMasterKey if another master key wraps it."""
    if header.master_id != master.id:
        raise WrongMasterKey(
            f"The keyring is sealed with master key {header.master_id}, and the given one is {master.id}."
        )
    try:
        return master.unwrap(root_associated(header.store_uuid, header.root.id), header.root.wrapped)
    except WrongMasterKey:
        raise WrongMasterKey(
            f"Master key {master.id} doesn't open the keyring: it was replaced by another of this name, or no"
            " longer allows the version that was used, or the keyring was changed."
        ) from None


def read_root(path: Path, master: Master) -> memoryview:
    """The root key of a keyring that a node may have open; the caller must wipe it."""
    file = FolderFile(path, locks=False)
    try:
        return unwrapped_root(header_of(file), master)
    finally:
        file.close()


class Found(NamedTuple):
    """The loaded keys that a root key wraps."""

    store: tuple[int, Slot] | None
    tenants: dict[bytes, list[TenantKey]]  # live ones by version
    gone: dict[bytes, TenantKey]
    twins: list[int]  # slots of the same keys, wrapped by another root key: an interrupted rotation


def found_in(slots: SlotTable, root_id: bytes) -> Found:
    """The keys of tenants and of the store."""
    store: tuple[int, Slot] | None = None
    live: dict[bytes, list[TenantKey]] = {}
    gone: dict[bytes, TenantKey] = {}
    ids: set[bytes] = set()
    others: list[TenantKey] = []
    for number in slots.others:
        if slots.is_damaged(number):
            continue
        slot = slots.read(number)
        if slot is None:
            continue
        if slot.state == State.GONE:
            gone[slot.tenant] = TenantKey(number, slot)
        elif slot.wrapped_by != root_id:
            others.append(TenantKey(number, slot))
        else:
            ids.add(slot.id)
            if slot.kind == Kind.STORE:
                store = number, slot
            else:
                live.setdefault(slot.tenant, []).append(TenantKey(number, slot))
    for keys in live.values():
        keys.sort(key=lambda key: key.slot.version)
    return Found(store, live, gone, [number for number, slot in others if slot.id in ids])


def why_not_the_drives(keyring: KeyringMark | None, drives: Iterable[KeyringMark]) -> str | None:
    """A sentence why this isn't the keyring that the drives were last used with; None if it may be."""
    for mark in drives:
        if keyring is None:
            how = "has no store key"
        elif mark.id != keyring.id:
            how = f"has the id {keyring.id.hex()}, and the store's records are encrypted with {mark.id.hex()}"
        elif mark.sequence > keyring.sequence:
            how = f"is an older copy: it was changed {keyring.sequence} times, and the drives know of {mark.sequence}"
        else:
            continue
        return (
            f"The keyring {how}: restore the newest copy, or continue with this one and give up the blocks that it"
            " has no keys for (`kvstore keys accept-keyring`)."
        )
    return None


def status_of(
    file: KeyringFile,
    header: Header,
    slots: SlotTable,
    tenants: Mapping[bytes, Sequence[TenantKey]],
    store_key_id: bytes | None,
) -> KeyringStatus:
    """The state of an open file."""
    free, live, gone, damaged = slots.counts()
    return KeyringStatus(
        store_uuid=header.store_uuid,
        master_id=header.master_id,
        made_ms=header.made_ms,
        size_bytes=file.pages * PAGE_BYTES,
        free=free,
        live=live,
        erased=gone,
        damaged=damaged,
        tenants=tuple((tenant, keys[-1].slot.version) for tenant, keys in sorted(tenants.items())),
        rotating=tuple(tenant for tenant, keys in sorted(tenants.items()) if len(keys) > 1),
        copies_on_write=file.copies_on_write if isinstance(file, FolderFile) else None,
        mark=None if store_key_id is None else KeyringMark(store_key_id, header.sequence),
    )
