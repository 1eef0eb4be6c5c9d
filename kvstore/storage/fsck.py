"""Checks a data folder that no node has open, drive by drive, and repairs the indexes.

For each drive it builds a second index, as a start without an index would, and compares it with the folder's own, in
the order of names, so memory doesn't grow with the drive.

Always holds: without `repair` it writes nothing but those second indexes, which are removed. With `repair` a drive
first gets a new epoch and roll, then the second index replaces the first; a crash at any moment leaves the index
either whole or to be rebuilt. On a drive only the superblock and the roll are ever written. An index isn't replaced
while there are records on its drive whose keys in the keyring are damaged, since the new one would lose them.

It doesn't repair records: a damaged payload stays damaged, and is a miss. It doesn't read drives that were left out
when the store was last open: everything on them is voided when they return.
"""

from __future__ import annotations

import shutil
from array import array
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from kvcli.progress import bars
from kvcli.running import Status
from kvstore.errors import ConfigError, Corrupt, StorageError
from kvstore.limits import BATCH_BLOCKS_MAX, HEADER_BYTES, PAGE_BYTES
from kvstore.storage.doubts import Doubts
from kvstore.storage.drive_files import FolderDrives
from kvstore.storage.drive_set import count_drives, read_set
from kvstore.storage.folder import FolderLock, index_path, kernel_boot_id
from kvstore.storage.index import Index
from kvstore.storage.index_check import check_free, check_index
from kvstore.storage.live_roll import Roll
from kvstore.storage.manifests import Manifests
from kvstore.storage.opening import find_drives
from kvstore.storage.overwriting import noted_generations
from kvstore.storage.recovery import extents_around, open_copy, rebuild
from kvstore.storage.sealing import opened_keys
from kvstore.storage.volume import Volume
from kvstore.synced_files import sync_folder
from kvstore.wire.record import SUPERBLOCK_COPIES, Flaw, Superblock, parse_superblock, record_bytes
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.storage.disk import Disk, Progress
    from kvstore.storage.drive_files import DriveSource
    from kvstore.storage.index import Entry, Name
    from kvstore.storage.manifests import Place
    from kvstore.storage.sealing import OpenKeys

__all__ = ["Report", "check", "run", "usable_drives"]

T = TypeVar("T")
N = TypeVar("N", bound="tuple[bytes, ...]")

_UNOPENED: Final = "records whose keys are damaged in the keyring"
_ERASED: Final = "records whose keys an interrupted erasure has destroyed"
_LEFT: Final = "records that the next start overwrites, after an interrupted erasure"
_DAMAGE: Final = {  # the damage, and whether a new index repairs it
    "damaged copies of the superblock": True,
    "damaged roll: deleted blocks may reappear": True,
    "unusable index": True,
    "blocks missing from the index": True,
    "blocks in the index and not on the drive": True,
    "blocks in the index with an older generation": True,
    "blocks in the index with other fields": True,
    "records that overlap in the index": True,
    "generations in the index without a block": True,
    "sessions that differ in the index": True,
    "wrong refcounts": True,
    "unusable drives": False,
    "payloads that fail their CRC": False,
    "payloads that cannot be read": False,
    _UNOPENED: False,
}
_NOTES: Final = (
    "blocks",
    "sessions",
    "chunks",
    "records of a killed process, which will be voided",
    "missing blocks of sessions",
    "drives that were left out, and will be voided",
    "blocks whose expiry a killed process had extended",
    _ERASED,
    _LEFT,
)


@dataclass
class Report:
    """The findings: the count of each kind of damage, with one example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    repaired: bool = False

    def add(self, what: str, example: str = "", count: int = 1) -> None:
        """Count something."""
        assert what in _DAMAGE or what in _NOTES
        self.counts[what] += count
        if example:
            self.examples.setdefault(what, example)

    def include(self, other: Report) -> None:
        """Add the findings of one drive."""
        self.counts.update(other.counts)
        for what, example in other.examples.items():
            self.examples.setdefault(what, example)
        self.repaired = self.repaired or other.repaired

    @property
    def damage(self) -> list[str]:
        """The damage found."""
        return [what for what in _DAMAGE if self.counts[what]]

    @property
    def left(self) -> list[str]:
        """The remaining damage, after a repair if there was one."""
        return [what for what in self.damage if not (self.repaired and _DAMAGE[what])]

    def lines(self) -> list[str]:
        """Return a table for people."""
        shown = [*_NOTES, *self.damage]
        width = max(map(len, shown))
        return [
            f"{what:{width}}  {self.counts[what]:>10}  {self.examples.get(what, '')}".rstrip()
            for what in shown
        ]


def run(data: Path, *, repair: bool, payloads: bool, open_keys: OpenKeys | None = None) -> int:
    """Check a folder and print what was found; exit status 0 if nothing is wrong now, 3 otherwise."""
    try:
        with bars() as progress:
            report = check(data, repair=repair, payloads=payloads, progress=progress, open_keys=open_keys)
    except Corrupt as error:  # the only drive's superblock: nothing else can be checked
        print(f"{data}: damaged. {error}")  # noqa: T201 - what the command is for
        return Status.NO
    verdict = "repaired" if report.repaired else "nothing is wrong"
    if report.left:
        mendable = any(_DAMAGE[what] for what in report.left)
        verdict = (
            "damaged; --repair rebuilds the index" if mendable else "damaged; lost blocks will be misses"
        )
        if report.counts[_UNOPENED]:
            verdict = "damaged keyring; restore it, or give the records up (`kvstore keys accept-keyring`)"
    print("\n".join([*report.lines(), f"{data}: {verdict}"]))  # noqa: T201 - what the command is for
    return Status.NO if report.left else Status.DONE


def check(
    data: Path,
    *,
    repair: bool = False,
    payloads: bool = False,
    source: DriveSource | None = None,
    boot_id: str | None = None,
    progress: Progress | None = None,
    open_keys: OpenKeys | None = None,
) -> Report:
    """Check a folder; with `repair`, replace wrong indexes by ones made from the drives."""
    if not data.is_dir():
        raise ConfigError(f"There is no data folder {data}.")
    if source is None and not FolderDrives(data, None).linked():
        raise ConfigError(f"The folder {data} has no drive.")
    report = Report()
    with ExitStack() as last:
        lock = FolderLock(data)
        last.callback(lock.release)
        usable = usable_drives(data, source or FolderDrives(data, None), report, last)
        keys = opened_keys(data, [one[2] for one in usable], open_keys) if usable else None
        if keys is not None:
            last.callback(keys.close)
        drives = [
            _Checked(data, lock, number, Volume(disk, superblock, keys), progress, last)
            for number, disk, superblock in usable
        ]
        boot = boot_id or kernel_boot_id()
        for drive in drives:
            drive.compare(boot)
            drive.count([one.second for one in drives])
            if payloads:
                _check_payloads(drive, drive.report, progress)
        for drive in drives:
            if repair and not drive.unopened and any(_DAMAGE[what] for what in drive.report.damage):
                drive.swap(boot)
            report.include(drive.report)
    return report


def usable_drives(
    data: Path, source: DriveSource, report: Report, last: ExitStack
) -> list[tuple[int, Disk, Superblock]]:
    """Return the drives that an opening would trust; report the others. If there is none, raise what is wrong."""
    disks, found = find_drives(source, last)
    drive_set = read_set(data)
    count = count_drives(found, drive_set)
    usable = []
    for number in range(count):
        outcome = found.get(number, StorageError(f"The folder has no drive-{number}.kv."))
        if isinstance(outcome, Superblock):
            if drive_set is not None and outcome.set_number < drive_set.number:
                report.add("drives that were left out, and will be voided", f"drive {number}")
            else:
                usable.append((number, disks[number], outcome))
            continue
        error = outcome or Corrupt("It is blank: it was never formatted, or its formatting was interrupted.")
        if count == 1:
            raise error
        report.add("unusable drives", f"drive {number}: {error}")
    return usable


class _Checked:
    """One drive, and the index that was made from it."""

    def __init__(
        self,
        data: Path,
        lock: FolderLock,
        number: int,
        volume: Volume,
        progress: Progress | None,
        last: ExitStack,
    ) -> None:
        self.volume = volume
        self.report = Report()
        self._data = data
        self._number = number
        self._superblock = superblock = volume.superblock
        place = lock.place(number)
        self._note, self._begun = place.note, place.begun
        self._first_path = index_path(data, number)
        self._second_path = data / f"fsck-{number}"
        last.callback(shutil.rmtree, self._second_path, ignore_errors=True)
        self.second = Index.empty(self._second_path, superblock.capacity_bytes, sealed=volume.is_all_sealed)
        last.callback(self.second.abandon)
        self.unopened: set[int] = set()
        self.left: dict[int, int] = {}  # places that the next start overwrites
        self._highest = rebuild(volume, self.second, progress, self.unopened)
        if self.unopened:
            self.report.add(_UNOPENED, f"drive {number}", len(self.unopened))
        self.doubts = Doubts(self.second)
        self.doubts.add_above(0)

    def compare(self, boot_id: str) -> None:
        """Compare the folder's index with the drive."""
        _check_drive(self.volume.disk, self._superblock, self.report)
        example = f"index-{self._number}"
        try:
            first = Index.trusted(self._first_path, self._superblock, boot_id, self._note, readonly=True)
        except Corrupt as doubt:
            self.report.add("unusable index", f"{example}: {doubt}")
            return
        try:
            self._believe(first, example)
            self.left = noted_generations(first)
            _compare(first, self, self.report)
        except StorageError as doubt:  # it can't be read to its end; the findings so far are valid
            self.report.add("unusable index", f"{example}: {doubt}")
        finally:
            first.abandon()

    def _believe(self, index: Index, example: str) -> None:
        try:
            if not index.is_sealed:
                check_index(index, self.volume)
            if not index.was_clean:
                _, extents = extents_around(index, self._superblock)
                check_free(self.volume, extents, self._begun)
        except Corrupt as doubt:
            self.report.add("unusable index", f"{example}: {doubt}")

    def count(self, everywhere: list[Index]) -> None:
        """Count what there is; a block that a session names may be on any drive."""
        manifests = Manifests(self.second)
        self.report.add("blocks", count=len(self.second))
        self.report.add("sessions", count=sum(1 for _ in manifests.all()))
        self.report.add("chunks", count=sum(1 for _ in manifests.all_chunks()))
        for name, _ in manifests.all_references():
            if all(index.lookup([name])[0] is None for index in everywhere):
                self.report.add("missing blocks of sessions", name[1].hex())

    def swap(self, boot_id: str) -> None:
        """Begin an epoch with the second index, on the drive first; then let it replace the first index."""
        volume = self.volume
        live, _ = extents_around(self.second, self._superblock)
        volume.skip_generations(self._highest)
        volume.begin_epoch(live)
        volume.end_epoch()
        self.second.close_clean(volume.superblock, boot_id)
        old = self._data / f"old-{self._number}"
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            self._first_path.rename(old)
        self._second_path.rename(self._first_path)
        sync_folder(self._data)
        shutil.rmtree(old, ignore_errors=True)
        self.report.repaired = True


def _check_drive(disk: Disk, superblock: Superblock, report: Report) -> None:
    for copy in range(SUPERBLOCK_COPIES):
        with suppress(StorageError):
            if parse_superblock(disk.read_at(copy * PAGE_BYTES, PAGE_BYTES)) == superblock:
                continue
        report.add("damaged copies of the superblock", f"copy {copy}")
    if Roll(disk, superblock).is_damaged:
        report.add("damaged roll: deleted blocks may reappear")


def _interrupted(
    volume: Volume, left: dict[int, int], ours: Entry | Place | None, drives: Entry | Place | None
) -> str:
    """Return what an interrupted erasure has left of a record; empty if that is not why index and drive differ."""
    if ours is None and drives is not None and left.get(drives.offset) == drives.generation:
        return _LEFT
    if ours is not None and drives is None:
        with suppress(StorageError):
            data = volume.disk.read_at(ours.offset, HEADER_BYTES)
            return _ERASED if volume.codec.parse(data, 0, ours.offset) is Flaw.NO_KEY else ""
    return ""


def _compare(first: Index, drive: _Checked, report: Report) -> None:
    second, volume, unopened, left = drive.second, drive.volume, drive.unopened, drive.left
    newest = int(first.generations()[-1:].sum())
    for name, ours, drives in _pairs(first, second):
        if why := _interrupted(volume, left, ours, drives):
            report.add(why, name[1].hex())
        elif ours is None or ours.offset not in unopened:
            _compare_block(name, ours, drives, report, newest=newest, clean=first.was_clean)
    try:
        extents_around(first, volume.superblock)
    except Corrupt as error:
        report.add("records that overlap in the index", str(error))
    theirs, mine = Manifests(first), Manifests(second)
    for session, ours_of, drives_of in _joined(theirs.all(), mine.all()):
        places = (None if one is None else one.place for one in (ours_of, drives_of))
        if why := _interrupted(volume, left, *places):
            report.add(why, session.session.hex())
        elif ours_of != drives_of and (ours_of is None or ours_of.place.offset not in unopened):
            newer = drives_of is not None and drives_of.place.generation > newest
            if not first.was_clean and (ours_of is None or newer):
                report.add("records of a killed process, which will be voided", session.session.hex())
            else:
                report.add("sessions that differ in the index", session.session.hex())
    _check_references(theirs, report)


def _compare_block(
    name: Name, ours: Entry | None, drives: Entry | None, report: Report, *, newest: int, clean: bool
) -> None:
    example = name[1].hex()
    if ours == drives:
        return
    if drives is None:
        report.add("blocks in the index and not on the drive", example)
    elif not clean and ours is not None and ours == drives._replace(expires_ms=ours.expires_ms):
        report.add("blocks whose expiry a killed process had extended", example)
    elif not clean and (ours is None or drives.generation > newest):
        report.add("records of a killed process, which will be voided", example)
    elif ours is None:
        report.add("blocks missing from the index", example)
    elif ours.generation < drives.generation:
        report.add("blocks in the index with an older generation", example)
    elif ours.generation > drives.generation:
        report.add("blocks in the index and not on the drive", example)
    else:
        report.add("blocks in the index with other fields", example)


def _check_references(manifests: Manifests, report: Report) -> None:
    wanted: Counter[Name] = Counter()
    naming: Counter[tuple[bytes, bytes]] = Counter()
    for session, stored in manifests.all():
        naming.update((session.tenant, chunk) for chunk in set(stored.manifest.chunks))
        wanted.update((session.tenant, key) for key in set(stored.manifest.tail))
    naming.update(manifests.all_owed())
    for tenant, chunk, _, count in manifests.all_chunks():
        wanted.update((tenant, key) for key in set(manifests.chunk_keys(tenant, chunk)))
        if naming.pop((tenant, chunk), 0) != count:
            report.add("wrong refcounts", chunk.hex())
    for name, count in manifests.all_references():
        if wanted.pop(name, 0) != count:
            report.add("wrong refcounts", name[1].hex())
    report.counts["wrong refcounts"] += len(wanted) + len(naming)


def _check_payloads(drive: _Checked, report: Report, progress: Progress | None) -> None:
    volume, index, doubts, left = drive.volume, drive.second, drive.doubts, drive.left
    whole = array("Q")  # believed once nothing is read from the index any more
    for number, ((_, key), entry) in enumerate(index.entries()):
        if progress is not None:
            progress("reading payloads", number, len(index))
        if left.get(entry.offset) == entry.generation:
            continue
        try:
            record = volume.disk.read_at(entry.offset, record_bytes(entry.length))
        except StorageError:
            report.add("payloads that cannot be read", key.hex())
            continue
        header, payload = open_copy(volume.codec, record, entry.offset)
        if isinstance(header, Flaw) or crc32c(payload) != entry.crc32c:
            report.add("payloads that fail their CRC", key.hex())
        else:
            whole.append(entry.generation)
    for first in range(0, len(whole), BATCH_BLOCKS_MAX):
        doubts.believe(whole[first : first + BATCH_BLOCKS_MAX])
    doubts.commit()


def _pairs(first: Index, second: Index) -> Iterator[tuple[Name, Entry | None, Entry | None]]:
    """Yield what both indexes have under each name that one of them has."""
    entries = first.entries()
    while some := list(islice(entries, BATCH_BLOCKS_MAX)):
        others = second.lookup([name for name, _ in some])
        yield from ((name, ours, drives) for (name, ours), drives in zip(some, others, strict=True))
    entries = second.entries()
    while some := list(islice(entries, BATCH_BLOCKS_MAX)):
        others = first.lookup([name for name, _ in some])
        yield from (
            (name, None, drives) for (name, drives), ours in zip(some, others, strict=True) if not ours
        )


def _joined(
    ours: Iterator[tuple[N, T]], drives: Iterator[tuple[N, T]]
) -> Iterator[tuple[N, T | None, T | None]]:
    """Merge two sorted sequences by name."""
    left, right = next(ours, None), next(drives, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left[0] < right[0]):
            assert left is not None
            yield left[0], left[1], None
            left = next(ours, None)
        elif left is None or right[0] < left[0]:
            yield right[0], None, right[1]
            right = next(drives, None)
        else:
            yield left[0], left[1], right[1]
            left, right = next(ours, None), next(drives, None)
