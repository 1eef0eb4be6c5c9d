"""The version of this distribution. pyproject.toml takes it from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse

__all__ = ["VERSION", "add_version"]

VERSION: Final = "0.1.0"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version` to a command."""
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {VERSION}", help="show the version and exit"
    )
