"""Checks the folder that a command writes into.

What always holds: one that can't be used is a ConfigError of one sentence, before the command does anything else.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["writable_folder"]


def writable_folder(folder: Path, *, parents: bool = False) -> None:
    """Make it unless it exists, with its parents only if `parents`, and check that files can be created in it."""
    try:
        folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise ConfigError(f"{folder} can't be used: it is a file, not a folder.") from error
    except OSError as error:
        raise ConfigError(f"{folder} can't be used: {error.strerror}.") from error
