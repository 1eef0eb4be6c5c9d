"""Opens a file that an option or a setting names.

What always holds: no more than `bytes_max` is read, and no device, pipe or folder, which might never end, or never
begin. Each refusal is an OSError whose `strerror` says why.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["open_input", "read_input"]


def open_input(path: Path, bytes_max: int) -> BinaryIO:
    """Open a regular file of at most this size."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > bytes_max:
        file.close()
        raise _too_large(path, bytes_max)
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Open it, but wait for no writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_input(path: Path, bytes_max: int) -> bytes:
    """Read it whole."""
    with open_input(path, bytes_max) as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:  # such as a file of /proc, whose size is 0
        raise _too_large(path, bytes_max)
    return data


def _too_large(path: Path, bytes_max: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {bytes_max / (1 << 20):g} MiB", str(path))
