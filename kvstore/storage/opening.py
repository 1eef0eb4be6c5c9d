"""Opens the drives of a data folder: finds them, executes `drive_set.plan`, and opens each.

Always holds: a drive that can't be used stops the start, with an error that has its number and says how to start
without it. Drives opened so far are closed again, and no drive is formatted or voided unless all of them could be
read. A new set is current before anything is accepted.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kvstore.errors import StorageError
from kvstore.limits import DRIVES_MAX
from kvstore.storage.drive import Drive
from kvstore.storage.drive_set import DriveSet, not_usable, plan, read_set, write_set
from kvstore.storage.eviction.policies import POLICY_DEFAULT
from kvstore.storage.folder import index_path
from kvstore.storage.sealing import opened_keys
from kvstore.storage.superblock import (
    Membership,
    find_superblock,
    format_drive,
    renewed,
    write_superblock,
)
from kvstore.storage.volume import Volume
from kvstore.wire.record import Superblock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.storage.disk import Disk, Progress
    from kvstore.storage.drive_files import DriveSource
    from kvstore.storage.drive_set import Plan
    from kvstore.storage.folder import FolderLock
    from kvstore.storage.sealing import Keys, OpenKeys

__all__ = ["find_drives", "indexes_in", "open_drives"]

_UUID_BYTES: Final = 16
_SECRET_BYTES: Final = 32


def open_drives(
    data: Path,
    lock: FolderLock,
    source: DriveSource,
    *,
    clock: Clock,
    without: Collection[int] = (),
    progress: Progress | None = None,
    boot_id: str | None = None,
    policy: str = POLICY_DEFAULT,
    open_keys: OpenKeys | None = None,
) -> tuple[list[Drive], list[int], Keys | None]:
    """Open all drives except those in `without`.

    Return them in the order of their numbers, those left out, and the keys that `open_keys` has for the store's uuid.
    """
    with ExitStack() as undo:
        with ExitStack() as undo_links:
            undo_links.callback(source.take_back)
            disks, found = find_drives(source, undo, without)
            todo = plan(found, read_set(data), indexes=indexes_in(data), without=without)
            superblocks = {number: one for number, one in found.items() if isinstance(one, Superblock)}
            if todo.begins:
                superblocks = _begun(todo, disks, superblocks, clock, progress)
                store_uuid = next(iter(superblocks.values())).store_uuid
                write_set(data, DriveSet(store_uuid, todo.set_number, todo.drives))
            undo_links.pop_all()
        alone = todo.drives == 1
        keys = opened_keys(data, superblocks.values(), open_keys)
        if keys is not None:
            undo.callback(keys.close)
            keys.count_up()
        drives = []
        for number, superblock in sorted(superblocks.items()):
            with _named(number, alone=alone):
                drive = Drive.open(
                    Volume(disks[number], superblock, keys),
                    index_path(data, number),
                    lock.place(number),
                    clock=clock,
                    is_empty=number in todo.stale,
                    progress=progress,
                    boot_id=boot_id,
                    policy=policy,
                )
            undo.callback(_close_after_failure, drive)
            drives.append(drive)
        undo.pop_all()
    return drives, [number for number in range(todo.drives) if number not in superblocks], keys


def find_drives(
    source: DriveSource, undo: ExitStack, without: Collection[int] = ()
) -> tuple[dict[int, Disk], dict[int, Superblock | StorageError | None]]:
    """Open the disks that can be opened, to be closed by `undo`; return them, and each drive's superblock or error."""
    disks: dict[int, Disk] = {}
    found: dict[int, Superblock | StorageError | None] = {}
    for number in source.numbers():
        if number in without:
            continue
        try:
            disk = source.open(number)
            undo.callback(disk.close)
            disks[number] = disk
            found[number] = find_superblock(disk)
        except StorageError as error:
            found[number] = error
    return disks, found


def indexes_in(data: Path) -> list[int]:
    """Return the drives for which the folder has an index."""
    return [number for number in range(DRIVES_MAX) if index_path(data, number).exists()]


def _begun(
    todo: Plan,
    disks: dict[int, Disk],
    found: dict[int, Superblock],
    clock: Clock,
    progress: Progress | None,
) -> dict[int, Superblock]:
    """Put the number of a new set on all its drives; void stale ones, format new ones."""
    alone = todo.drives == 1
    begun = {}
    for number in (*todo.known, *todo.stale):
        superblock = renewed(found[number]) if number in todo.stale else found[number]
        begun[number] = superblock._replace(set_number=todo.set_number, set_drives=todo.drives)
        with _named(number, alone=alone):
            write_superblock(disks[number], begun[number])
    store_uuid, secret = os.urandom(_UUID_BYTES), os.urandom(_SECRET_BYTES)
    for superblock in begun.values():
        store_uuid, secret = superblock.store_uuid, superblock.secret
    membership = Membership(store_uuid, secret, todo.set_number, todo.drives)
    for number in todo.blank:
        with _named(number, alone=alone):
            begun[number] = format_drive(disks[number], number, membership, clock, progress)
    return begun


@contextmanager
def _named(number: int, *, alone: bool) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise not_usable(number, error, alone=alone) from error


def _close_after_failure(drive: Drive) -> None:
    with suppress(StorageError):  # the failure that led here is the one to report
        drive.close()
