"""Parses sizes and quantities, and has the one error for values out of range.

What always holds: KB, MB, GB, TB are powers of 1000, as drives and the paper count; KiB, MiB, GiB, TiB are
powers of 1024. The error for a refused value names the parameter, its unit and the accepted range.
"""

from __future__ import annotations

import math
import re

__all__ = ["OutOfRange", "Unusable", "format_bytes", "format_seconds", "parse_bytes", "plain", "require"]

_PLAIN_SECONDS_MIN = 1e-2
_PLAIN_MAX = 1e15  # what is larger is written in powers of ten

_SCALE = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class OutOfRange(ValueError):
    """A parameter outside what the model accepts; the message is one sentence a person can act on."""

    def __init__(self, parameter: str, value: object, unit: str, accepted: str) -> None:
        super().__init__(f"{parameter} is {value}; it takes {unit}, {accepted}.")


class Unusable(OutOfRange):
    """A file that can't be read or written."""

    def __init__(self, parameter: str, path: object, why: str) -> None:
        ValueError.__init__(self, f"{parameter}: {path} {why}.")


def require(parameter: str, value: float, unit: str, low: float, high: float) -> None:
    """Refuse a value that is not from `low` to `high`, both included. NaN is refused as well."""
    if not low <= value <= high:
        raise OutOfRange(parameter, plain(value), unit, f"from {plain(low)} to {plain(high)}")


def plain(value: float) -> str:
    """A number as people write it: whole ones in full, as 100,000,000, unless they are very large."""
    if abs(value) <= _PLAIN_MAX and value == int(value):
        return f"{int(value):,}"
    try:
        return f"{value:g}"
    except OverflowError:
        return f"a number of {len(str(value))} digits"


def parse_bytes(parameter: str, text: str) -> int:
    """Read '32KB', '1.5 GiB' or '4096'. A part of a byte is refused."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]I?B|B|)\s*", text.upper())
    accepted = "a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 32KB"
    if match is None:
        raise OutOfRange(parameter, repr(text), "a size in bytes", accepted)
    value = float(match[1]) * _SCALE[match[2]]
    if value != int(value):
        raise OutOfRange(parameter, repr(text), "a size in bytes", "a whole number of them")
    return int(value)


def format_bytes(size_bytes: int) -> str:
    """Write a size the way `parse_bytes` reads it back, exactly."""
    for unit in ("TB", "GB", "MB", "KB", "TiB", "GiB", "MiB", "KiB"):
        scale = _SCALE[unit.upper()]
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def format_seconds(seconds: float) -> str:
    """Three digits, as in the model's tables; all digits from a thousand seconds on."""
    if seconds < _PLAIN_SECONDS_MIN:
        return f"{seconds:.2e}"
    decimals = max(0, 2 - math.floor(math.log10(seconds)))
    return f"{seconds:,.{decimals}f}"
