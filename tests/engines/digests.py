"""Reads what `recording` has written; this module needs no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def read_digests(folder: Path) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
    """The digests of everything saved, by key, and of everything loaded, by all engines."""
    saved: dict[str, set[str]] = {}
    loaded = []
    for file in folder.iterdir():
        lines, _, _ = file.read_text().rpartition("\n")  # one that was killed may have left half a line
        for line in lines.splitlines():
            what, key, digest = line.split()
            if what == "saved":
                saved.setdefault(key, set()).add(digest)
            elif what == "loaded":
                loaded.append((key, digest))
    return saved, loaded
