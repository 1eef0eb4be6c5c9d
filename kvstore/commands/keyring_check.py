"""Whether the keyring in a data folder is the one that its drives were last in use with; no key is needed for that.

What always holds: nothing is locked or written, so a node may have the folder open. What it doesn't do: notice a copy
that lacks only keys made since the node's last start; the start itself finds the records that name such keys.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import NoKeyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.keyring_state import read_status, why_not_the_drives
from kvstore.storage.drive_files import FolderDrives
from kvstore.storage.folder import drive_path
from kvstore.storage.superblock import read_superblock

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.wire.record import KeyringMark

__all__ = ["keyring_flaw", "marks_of"]


def marks_of(data: Path) -> list[KeyringMark]:
    """Return what the drives that can be read have of their keyring."""
    marks = []
    for number in FolderDrives(data, None).linked():
        with suppress(OSError):
            superblock = read_superblock(drive_path(data, number))
            if superblock is not None and superblock.keyring is not None:
                marks.append(superblock.keyring)
    return marks


def keyring_flaw(data: Path) -> str | None:
    """Say in a sentence why a node wouldn't start with the folder's keyring; None if there is no such reason."""
    marks, path = marks_of(data), keyring_path(data)
    if not marks:
        return None
    try:
        return why_not_the_drives(read_status(path).mark, marks)
    except NoKeyring:
        return f"There is no keyring {path}, and the drives' records are encrypted with one: restore it from a backup."
