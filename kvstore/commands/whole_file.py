"""A command's output file, which appears only when it is complete.

What always holds: a temporary file beside the target is written and then renamed; on failure nothing is left, and an
older file stays. A device, a pipe or a socket is written to, and never replaced. A link stays one.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open it for writing. ConfigError if that fails; OSError, with the file's name, if a write fails."""
    unfinished: Path | None = None
    try:
        place = Path(os.path.realpath(path))
        if place.exists() and not place.is_file():
            with path.open("wb") as file:
                yield file
            return
        unfinished = place.with_name(f"{place.name}.unfinished")
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(place)
    except OSError as error:
        if error.filename is None:  # it was opened, and a write failed: the drive is full, say
            error.filename = str(path)
            raise
        raise ConfigError(f"{path} could not be written: {error.strerror}.") from error
    finally:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
