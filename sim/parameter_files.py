"""Reads the files that options name, each with a bound; whatever is wrong with one is an OutOfRange of one sentence."""

from __future__ import annotations

import csv
import io
import tomllib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcli.input_file import open_input
from sim.units import OutOfRange, Unusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

__all__ = ["open_text", "read_rows", "read_text", "read_toml"]

_FILE_BYTES_MAX = 16 << 20
_TRACE_BYTES_MAX = 2 << 30  # its requests take several times as much memory


@contextmanager
def open_text(parameter: str, path: Path, bytes_max: int = _TRACE_BYTES_MAX) -> Iterator[TextIO]:
    """Open it as UTF-8, with or without a mark, and with any ends of lines, as `csv` wants them."""
    try:
        with io.TextIOWrapper(open_input(path, bytes_max), "utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise Unusable(parameter, path, "can't be read: it is not UTF-8") from error
    except OSError as error:
        raise Unusable(parameter, path, f"can't be read: {error.strerror}") from error
    except csv.Error as error:
        raise Unusable(parameter, path, f"can't be read: it is not CSV ({error})") from error


def read_text(parameter: str, path: Path) -> str:
    """Read it whole."""
    with open_text(parameter, path, _FILE_BYTES_MAX) as file:
        return file.read()


def read_toml(parameter: str, path: Path) -> dict[str, Any]:
    """Read a file of TOML."""
    text = read_text(parameter, path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(parameter, path, f"can't be read: it is not TOML ({error})") from error


def read_rows(parameter: str, path: Path, columns: tuple[str, ...], rows_max: int) -> list[dict[str, str]]:
    """The rows of a CSV file, of which there is at least one, with at least these columns."""
    with open_text(parameter, path, _FILE_BYTES_MAX) as file:
        rows = list(csv.DictReader(file))
    if not rows or len(rows) > rows_max or not set(columns) <= set(rows[0]):
        accepted = f"with the columns {','.join(columns)} and 1 to {rows_max:,} lines"
        raise OutOfRange(parameter, str(path), "a CSV file", accepted)
    return rows
