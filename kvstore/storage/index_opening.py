"""Opens the existing index of a drive, or rebuilds it, and begins an epoch.

Always holds: an index that is kept agrees with itself and with the drive, as far as the way it was closed requires a
check (`kvstore.storage.index_check`). Places that it still lists for overwriting are overwritten. Any doubt leads to a
scan, not to an error. The epoch is on the drive before it is in the index or in any note of the lock file.

It doesn't know the contents of an index (`kvstore.storage.index` does) or how to scan (`kvstore.storage.recovery`
does).
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import StorageError
from kvstore.storage.clear_labels import without_clear_labels
from kvstore.storage.doubts import Doubts
from kvstore.storage.folder import BegunNote, LentNote, SyncNote
from kvstore.storage.index import Index
from kvstore.storage.index_check import check_free, check_index
from kvstore.storage.manifests import Manifests
from kvstore.storage.overwriting import finish
from kvstore.storage.recovery import add_lent, check_manifests, extents_around, rebuild
from kvstore.storage.superblock import EPOCH_FORMATTED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.storage.disk import Progress
    from kvstore.storage.extents import Extents
    from kvstore.storage.folder import NotePlace
    from kvstore.storage.volume import Volume
    from nic_offload.lane import Ground

__all__ = ["OpenedIndex", "open_index"]

log = logging.getLogger(__name__)


def _half(doubt: StorageError) -> str:
    said = str(doubt).rstrip(".")
    return said[:1].lower() + said[1:]


@dataclass(frozen=True, slots=True)
class OpenedIndex:
    """An index that agrees with the drive, and what follows from it."""

    index: Index
    extents: Extents
    lives: NDArray[Any]  # of its blocks
    boot_id: str
    rebuilt: bool
    doubts: Doubts
    all_erased: bool  # everything erased is overwritten
    note_synced: Callable[[int], None]
    note_begun: Callable[[int], None]
    note_lent: Callable[[int, Ground | None], None]


def _checked(
    index: Index, lives: NDArray[Any], volume: Volume, notes: NotePlace, synced_generation: int
) -> tuple[NDArray[np.int64], Extents]:
    """Check an index against itself and the drive, as far as the way it was closed makes that necessary.

    Then settle what sessions owe; return the pages of all headers, and the free extents.
    """
    live, extents = extents_around(index, volume.superblock, lives)
    if volume.keys is not None:  # a new index has nothing whose key is missing
        volume.keys.expect(np.union1d(index.key_numbers(), Manifests(index).key_numbers()))
    if not index.is_sealed:
        check_index(index, volume)
    if not index.was_clean:
        check_free(volume, extents, notes.begun)
        check_manifests(volume, index, synced_generation)
    if Manifests(index).settle_all():
        live, extents = extents_around(index, volume.superblock, lives)
    return live, extents


def _new_index(
    folder: Path, volume: Volume, progress: Progress | None, undo: ExitStack, *, is_rebuilt: bool
) -> Index:
    index = Index.empty(folder, volume.superblock.capacity_bytes, sealed=volume.is_all_sealed)
    undo.callback(index.abandon)
    if is_rebuilt:
        volume.skip_generations(rebuild(volume, index, progress))
    return index


def _doubts(index: Index, synced_generation: int, *, rebuilt: bool) -> Doubts:
    doubts = Doubts(index)
    if rebuilt or not index.knows_doubts:
        doubts.add_above(0)
    elif not index.was_clean:
        doubts.forget_gone()
        doubts.add_above(synced_generation)
    return doubts


def open_index(
    folder: Path,
    notes: NotePlace,
    volume: Volume,
    boot_id: str,
    progress: Progress | None,
    *,
    is_empty: bool,
) -> OpenedIndex:
    """Open the existing index or rebuild it, and begin an epoch: on the drive first, then in the index."""
    index: Index | None = None
    live, extents, lives = None, None, None
    superblock, synced = volume.superblock, notes.synced
    is_noted = (synced.drive_uuid, synced.epoch) == (superblock.drive_uuid, superblock.epoch)
    synced_generation = synced.generation if is_noted else 0
    blank = is_empty or superblock.epoch == EPOCH_FORMATTED
    all_erased = True
    with ExitStack() as undo:
        try:
            index = Index.trusted(folder, volume.superblock, boot_id, notes.note)
            undo.callback(index.abandon)
            add_lent(volume, index, notes.lent)
            lives = index.lives()
            live, extents = _checked(index, lives, volume, notes, synced_generation)
            all_erased = finish(volume, index, extents)
        except StorageError as doubt:
            extents = None
            if not blank:
                log.warning("The index in %s is rebuilt from the drive: %s.", folder, _half(doubt))
        rebuilt = (index is None or extents is None) and not blank
        if index is None or extents is None:
            undo.close()
            index = _new_index(folder, volume, progress, undo, is_rebuilt=rebuilt)
            lives = index.lives()
            live, extents = extents_around(index, volume.superblock, lives)
            all_erased = finish(volume, index, extents)
        assert live is not None
        assert lives is not None
        index = without_clear_labels(index, folder, volume, undo)
        doubts = _doubts(index, synced_generation, rebuilt=rebuilt)
        clean = blank or (index.was_clean and not rebuilt)
        volume.begin_epoch(None if clean else live)
        drive_uuid, epoch = volume.superblock.drive_uuid, volume.superblock.epoch
        notes.write_begun(BegunNote(drive_uuid, epoch, volume.last_generation))
        index.begin_epoch(volume.superblock, boot_id, notes)
        undo.pop_all()

    def note_synced(generation: int) -> None:
        notes.write_synced(SyncNote(drive_uuid, epoch, generation))

    def note_begun(generation: int) -> None:
        notes.write_begun(BegunNote(drive_uuid, epoch, generation))

    def note_lent(place: int, ground: Ground | None) -> None:
        note = None if ground is None else LentNote(drive_uuid, epoch, *ground)
        notes.write_lent(place, note)

    notings = (note_synced, note_begun, note_lent)
    return OpenedIndex(index, extents, lives, boot_id, rebuilt, doubts, all_erased, *notings)
