"""The version of this distribution. pyproject.toml takes it from here.

`import kvstore` imports this, and nothing that takes time: before a command handles Ctrl-C, it would show a traceback.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

__all__ = ["VERSION", "add_version"]

VERSION = "0.1.0"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version` to a command."""
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {VERSION}", help="show the version and exit"
    )
