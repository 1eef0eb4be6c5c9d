"""The memory of another process, as a debugger or a core dump has it: where bytes are, and in what kind of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO

__all__ = ["Mapping", "mappings_of", "search"]

_READ_BYTES = 8 << 20
_ZEROS = bytes(_READ_BYTES)
_NO_MEMORY = ("[vvar]", "[vvar_vclock]", "[vsyscall]")


class Mapping(NamedTuple):
    """A part of a process's memory."""

    first: int
    end: int
    what: str
    flags: frozenset[str]  # the kernel's, of /proc/PID/smaps

    @property
    def is_dumped(self) -> bool:
        """Whether a core dump would contain it."""
        return "dd" not in self.flags

    @property
    def is_locked(self) -> bool:
        """Whether it is locked in memory."""
        return "lo" in self.flags


def mappings_of(pid: int) -> list[Mapping]:
    """All readable mappings."""
    found = []
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())[1:]:
        addresses, access, _, _, _, *name = part.partition("\n")[0].split()
        first, end = (int(one, 16) for one in addresses.split("-"))
        flags = frozenset(part.rpartition("VmFlags:")[2].split())
        if access.startswith("r") and " ".join(name) not in _NO_MEMORY:
            found.append(Mapping(first, end, " ".join(name), flags))
    return found


def search(pid: int, marks: Iterable[bytes]) -> dict[bytes, list[Mapping]]:
    """The mappings that contain these bytes."""
    marks = list(marks)
    found: dict[bytes, list[Mapping]] = {}
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for mapping in mappings_of(pid):
            left = set(marks)
            for data in _parts_of(mapping, memory, max(map(len, marks)) - 1):
                for mark in [one for one in left if one in data]:
                    left.remove(mark)
                    found.setdefault(mark, []).append(mapping)
    return found


def _parts_of(mapping: Mapping, memory: FileIO, overlap: int) -> Iterator[bytes]:
    at, before = mapping.first, b""
    while at < mapping.end:
        try:
            memory.seek(at)
            data = memory.read(min(_READ_BYTES, mapping.end - at))
        except OSError:  # of a device, or behind the end of its file
            return
        if not data:
            return
        if data != _ZEROS[: len(data)]:  # most of it is
            yield before + data
        before = data[-overlap:] if overlap else b""
        at += len(data)
