"""Which drives a store has, and which of them can be trusted.

Whenever drives join, are left out or return, the store begins a new *set*, with a higher number than all earlier
sets. The number is written to each drive of the set, and then to a file of the data folder, which makes it current. A
drive with a lower number was left out of a set: it is *stale*.

Always holds:

- Nothing is accepted before the number of its set is current. So a drive that isn't stale has missed nothing. What a
  stale drive has may meanwhile have been deleted, replaced or stored again on another drive, so all of it is voided
  when the drive returns. That is enough to keep deleted blocks deleted.
- No drive is left out without an operator's decision, or while the folder's file is missing: then only the drives
  themselves can show which of them is stale, and only if all are present.
- A stale drive is never used alone, and a blank drive never replaces one that held blocks.

It doesn't open, format or write drives: `plan` is pure, and the store executes it.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import ConfigError, Corrupt, ForeignDrive, StorageError
from kvstore.limits import DRIVES_MAX
from kvstore.synced_files import replace_file
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kvstore.wire.record import Superblock

__all__ = ["SET_NAME", "DriveSet", "Plan", "count_drives", "not_usable", "plan", "read_set", "write_set"]

SET_NAME: Final = "kvstore.drives"

log = logging.getLogger(__name__)


class DriveSet(NamedTuple):
    """The folder's file: the current set."""

    store_uuid: bytes
    number: int
    drives: int


class Plan(NamedTuple):
    """What to do with the present drives, by number."""

    known: list[int]  # take as they are
    stale: list[int]  # void, then take
    blank: list[int]  # format, then take
    drives: int  # how many the store has, those left out included
    set_number: int
    begins: bool  # whether this is a new set


def read_set(data: Path) -> DriveSet | None:
    """Read the folder's file; None, and a warning in the log, if there is none or it is damaged.

    It is trusted as a whole or not at all: a set number that is too high would void every drive.
    """
    try:
        text = (data / SET_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s in %s can't be read: %s.", SET_NAME, data, error.strerror)
        return None
    try:
        said = json.loads(text)
        found = DriveSet(bytes.fromhex(said["store"]), int(said["set"]), int(said["drives"]))
    except (ValueError, KeyError, TypeError):
        found = None
    if found is None or _text(found) != text:
        log.warning(
            "%s in %s is damaged, or of an older version: the drives are asked which of them were in use last.",
            SET_NAME,
            data,
        )
        return None
    return found


def write_set(data: Path, drive_set: DriveSet) -> None:
    """Make a set current, durably. Its number must be on all its drives already."""
    try:
        replace_file(data / SET_NAME, _text(drive_set))
    except OSError as error:
        raise StorageError(f"The data folder {data} cannot be written: {error.strerror}.") from error


def _text(drive_set: DriveSet) -> bytes:
    said = {"store": drive_set.store_uuid.hex(), "set": drive_set.number, "drives": drive_set.drives}
    return json.dumps({**said, "crc32c": crc32c(json.dumps(said).encode())}).encode()


def plan(
    found: Mapping[int, Superblock | StorageError | None],
    drive_set: DriveSet | None,
    *,
    indexes: Collection[int] = (),
    without: Collection[int] = (),
) -> Plan:
    """Decide which drives to open. `found`: what each link leads to, None: blank; `indexes`: the existing indexes."""
    formatted = _formatted(found, without)
    drives = count_drives(found, drive_set, indexes)
    if drives > DRIVES_MAX:
        raise ConfigError(f"A store has at most {DRIVES_MAX} drives; this one would have {drives}.")
    _refuse_to_leave_out(without, drive_set, drives)
    for number in range(drives):
        if number not in without:
            error = _fault(number, found, formatted, drive_set, indexes)
            if error is not None:
                raise not_usable(number, error, alone=drives == 1 or drive_set is None)
    base = drive_set.number if drive_set else max((one.set_number for one in formatted.values()), default=0)
    stale = [number for number, one in formatted.items() if one.set_number < base]
    known = [number for number, one in formatted.items() if one.set_number >= base]
    if not known and (formatted or without):
        raise StorageError(
            "None of the drives that were in use last is present; the others may be out of date, and are voided"
            " when they return together with one of those."
        )
    blank = [number for number in sorted(found) if found[number] is None and number not in without]
    highest = max([base, *(one.set_number for one in formatted.values())])
    whole = len(known) == drives and drive_set is not None
    same = all((one.set_number, one.set_drives) == (base, drives) for one in formatted.values())
    begins = not (whole and same)
    return Plan(known, stale, blank, drives, highest + 1 if begins else base, begins)


def count_drives(
    found: Mapping[int, Superblock | StorageError | None],
    drive_set: DriveSet | None,
    indexes: Collection[int] = (),
) -> int:
    """Return how many drives the store has. The file decides: a drive may be of a set that never became current."""
    if drive_set is not None:
        said = [drive_set.drives]
    else:
        formatted = (one for one in found.values() if one is not None and not isinstance(one, StorageError))
        said = [one.set_drives for one in formatted]
    return max([*said, *(number + 1 for number in (*found, *indexes))], default=0)


def not_usable(number: int, error: StorageError, *, alone: bool) -> StorageError:
    """Return the same kind of error, which names the drive and how to open without it, if that is possible."""
    how = "" if alone else f" To go on without it: --without-drive {number}"
    return type(error)(f"Drive {number} cannot be used. {error}{how}")


def _formatted(
    found: Mapping[int, Superblock | StorageError | None], without: Collection[int]
) -> dict[int, Superblock]:
    return {
        number: one
        for number, one in sorted(found.items())
        if one is not None and not isinstance(one, StorageError) and number not in without
    }


def _refuse_to_leave_out(without: Collection[int], drive_set: DriveSet | None, drives: int) -> None:
    for number in without:
        if not 0 <= number < drives:
            raise ConfigError(f"There is no drive {number} to leave out: the store has {drives}.")
        if drive_set is None:
            raise ConfigError(
                f"Drive {number} cannot be left out: the folder has lost {SET_NAME}, which says which drives were in"
                " use last. Start once with all of them."
            )


def _fault(
    number: int,
    found: Mapping[int, Superblock | StorageError | None],
    formatted: Mapping[int, Superblock],
    drive_set: DriveSet | None,
    indexes: Collection[int],
) -> StorageError | None:
    """Return what is wrong with a drive that should be here."""
    if number not in found:
        return StorageError(
            f"It is missing: the folder has no drive-{number}.kv. Restore it, or remove index-{number} and give"
            f" a new one."
        )
    outcome = found[number]
    if outcome is None and number in indexes:
        return Corrupt(
            f"It is blank, but the folder has its index. Restore the drive, or remove index-{number} to replace"
            f" it with a new one."
        )
    if outcome is None or isinstance(outcome, StorageError):
        return outcome
    store_uuid = drive_set.store_uuid if drive_set else next(iter(formatted.values())).store_uuid
    if outcome.store_uuid != store_uuid:
        ours, its = store_uuid.hex()[:12], outcome.store_uuid.hex()[:12]
        return ForeignDrive(f"It belongs to the store {its}, and this is {ours}; it was left unchanged.")
    if outcome.drive_index != number:
        return ForeignDrive(f"It is drive {outcome.drive_index} of this store, under the wrong name.")
    return None
