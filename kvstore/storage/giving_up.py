"""Gives up records whose keys are lost, in a data folder that no node has open.

    with EncryptedStore(data) as store:
        lost = store.lost(lambda number, key_id: False)
        store.give_up()

Always holds: `lost` writes nothing and needs no key: the place, the length and the key's id of an encrypted record
are in the clear. After `give_up` the next start accepts any keyring of the store, rebuilds the indexes from the
drives, and counts the pages of records that it can't open as free. A crash in the middle leaves either that, or a
store that still requires its keyring.

It doesn't check that a header is authentic, because that needs the keyring's store key. So the count may include
bytes that a client made to look like an encrypted record.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import ConfigError, StorageError
from kvstore.limits import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, FINGERPRINT_BYTES, KEY_BYTES, TENANT_BYTES
from kvstore.storage.drive_files import FolderDrives
from kvstore.storage.folder import FolderLock
from kvstore.storage.fsck import Report, usable_drives
from kvstore.storage.recovery import scan
from kvstore.storage.superblock import write_superblock
from kvstore.storage.volume import Volume
from kvstore.wire.record import (
    ENCRYPTED_MAGIC,
    RECORD_MAGIC,
    Flaw,
    Header,
    HeaderCodec,
    Kind,
    record_bytes,
)
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.storage.disk import Disk, Progress
    from kvstore.wire.record import Superblock

    IsKnown = Callable[[int, bytes], bool]

__all__ = ["EncryptedStore", "Lost"]

_SAID: Final = struct.Struct("<8sHHIQQI4x8s")  # the beginning of an encrypted record's header
_ENCRYPTED_VERSION: Final = 1


class Lost(NamedTuple):
    """Records that can't be read."""

    records: int
    size_bytes: int


class EncryptedStore(Handle):
    """A locked data folder with encrypted records."""

    def __init__(self, data: Path) -> None:
        """Lock it and look at its drives; ConfigError if none is encrypted, StorageError if one can't be used."""
        if not data.is_dir() or not FolderDrives(data, None).linked():
            raise ConfigError(f"The folder {data} has no drive.")
        with ExitStack() as undo:
            undo.callback(FolderLock(data).release)
            self._drives = _drives(data, undo)
            self.marks = [one.keyring for _, _, one in self._drives if one.keyring is not None]
            self._last = undo.pop_all()
        self.store_uuid = self._drives[0][2].store_uuid

    def lost(self, is_known: IsKnown, progress: Progress | None = None) -> Lost:
        """Count the encrypted records whose key is not known, by its slot and id."""
        records = size_bytes = 0
        for _, disk, superblock in self._drives:
            volume = Volume(disk, superblock)
            volume.codec = _Unopened(superblock.secret, superblock.drive_uuid)
            with closing(scan(volume, progress)) as found:
                for _, header, is_allowed in found:
                    if is_allowed and header.domain and not is_known(header.domain - 1, header.key[:8]):
                        records += 1
                        size_bytes += record_bytes(header.length)
        return Lost(records, size_bytes)

    def give_up(self) -> None:
        """Let the next opening accept another keyring, and forget what that doesn't open."""
        for (
            _,
            disk,
            superblock,
        ) in self._drives:  # in an epoch other than the index's, which is then not trusted
            write_superblock(disk, superblock._replace(epoch=superblock.epoch + 1, keyring=None))

    def close(self) -> None:
        """Unlock it."""
        self._last.close()


def _drives(data: Path, undo: ExitStack) -> list[tuple[int, Disk, Superblock]]:
    report = Report()
    drives = usable_drives(data, FolderDrives(data, None), report, undo)
    if "unusable drives" in report.damage:
        raise StorageError(f"Not all drives can be used: {report.examples['unusable drives']}")
    if all(superblock.keyring is None for _, _, superblock in drives):
        raise ConfigError(
            f"No record in {data} is encrypted; a node that is started with --master-key makes the keyring."
        )
    return drives


class _Unopened(HeaderCodec):
    """Headers as they look without the keyring."""

    __slots__ = ()

    @property
    def magics(self) -> tuple[bytes, ...]:
        """Both kinds."""
        return (RECORD_MAGIC, ENCRYPTED_MAGIC)

    def parse(self, data: bytes, at: int, offset: int) -> Header | Flaw:
        """Read the fields that are in the clear."""
        if not data.startswith(ENCRYPTED_MAGIC, at):
            return super().parse(data, at, offset)
        if len(data) - at < _SAID.size:
            return Flaw.SHORT
        _, version, kind, length, generation, expires_ms, number, key_id = _SAID.unpack_from(data, at)
        is_one = version == _ENCRYPTED_VERSION and kind in set(Kind)
        if not is_one or not BLOCK_BYTES_MIN <= length <= BLOCK_BYTES_MAX:
            return Flaw.RANGE
        return Header(
            kind,
            key_id.ljust(KEY_BYTES, b"\0"),
            bytes(TENANT_BYTES),
            bytes(FINGERPRINT_BYTES),
            generation,
            length,
            0,
            expires_ms,
            number + 1,
        )
