"""The installed version of this distribution."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["add_version", "package_version"]


def package_version() -> str:
    """The version of this distribution."""
    try:
        return version("triggerkv")
    except PackageNotFoundError:
        return "unknown"


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{parser.prog} {package_version()}")  # noqa: T201 - what it is for
        parser.exit()


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let a command be asked for its version."""
    parser.add_argument("--version", action=_Version)
