"""A command's output file: there when it is whole, and not before.

What always holds: a file is written beside its place and moved there when all of it is written; if that fails, nothing
is left and an older file stays. A device, a pipe or a socket is written to, and never replaced. A link stays one.
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
    """Open it to be written. ConfigError if it can't be."""
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
        raise ConfigError(f"{path} could not be written: {error.strerror}.") from error
    finally:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
