"""Reads the files that options and settings name: certificates, tokens, rules, settings.

What always holds: a file that is missing, too large, no regular file or not TOML is a ConfigError of one sentence.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from kvcli.input_file import read_input
from kvstore.errors import ConfigError
from kvstore.limits import INPUT_FILE_BYTES_MAX

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_file", "read_pem", "read_text", "read_toml"]


def read_file(path: Path) -> bytes:
    """Read a small file whole."""
    try:
        return read_input(path, INPUT_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror}.") from error


def read_text(path: Path) -> str:
    """The same, as UTF-8."""
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is invalid.") from error


def read_pem(path: Path, holds: str = "") -> bytes:
    """The same, with something in PEM. An empty file is an error: gRPC would take it for the system's CAs."""
    data = read_file(path)
    if _PEM[holds] not in data:
        raise ConfigError(f"{path} contains no {holds or 'certificate or key'} in PEM.")
    return data


_PEM = {"": b"-----BEGIN ", "certificate": b"-----BEGIN CERTIFICATE-----", "key": b"PRIVATE KEY-----"}


def read_toml(path: Path) -> dict[str, Any]:
    """The same, as TOML."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for settings.") from None
    except ValueError as error:  # invalid TOML, or a number longer than Python reads
        raise ConfigError(f"{path} is not TOML: {error}.") from error
