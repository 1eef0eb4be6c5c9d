"""Whether etcd still has all the data that it confirmed, and what a node remembers of it.

etcd may lose its data, or be restored from a backup. Then its revisions and the epochs of sessions begin again. So a
record names each *history* of its data: by a random id, with an offset that is added to etcd's revisions. A node
whose folder remembers another history, or a later revision, names a new one with a higher offset.

What always holds: the revisions of maps never go back for a node, whatever etcd lost, while its folder remembers; the
number of histories that a folder has seen only grows. Of several records the one with the highest offset counts.
What it doesn't do: bring back what etcd has lost.
"""

from __future__ import annotations

import json
import logging
import random
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.synced_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["EtcdMemory", "History"]

log = logging.getLogger(__name__)

_SYSTEM_CHANCE = random.SystemRandom()
_GAP = 1 << 32  # between the offsets of histories, at most: a later one is above what every node remembers


class History(NamedTuple):
    """A history of etcd's data."""

    offset: int = 0
    id: str = ""  # "": it has no record
    lots: int = 0  # of the cluster

    @classmethod
    def of(cls, values: Mapping[bytes, tuple[bytes, int]], prefix: bytes) -> History:
        """The one that counts among the records below a prefix."""
        found = [cls()]
        for key, (value, _) in values.items():
            if key.startswith(prefix):
                with suppress(ValueError):
                    offset, lots = map(int, value.split())
                    found.append(cls(offset, key.removeprefix(prefix).decode(errors="replace"), lots))
        return max(found)

    def record(self) -> bytes:
        """The value of its record."""
        return b"%d %d" % (self.offset, self.lots)


@dataclass
class _Seen:
    cluster: str
    history: str = ""
    revision: int = 0  # the highest, with the offset
    losses: int = 0  # how many histories have ended


class EtcdMemory:
    """What a node remembers of its cluster's etcd, in a file if there is one. Used in its event loop only."""

    def __init__(
        self, cluster: str, file: Path | None = None, *, chance: random.Random = _SYSTEM_CHANCE
    ) -> None:
        self._file, self._seen, self._chance = file, _Seen(cluster), chance
        with suppress(OSError, ValueError, TypeError):
            if file is not None and (seen := _Seen(**json.loads(file.read_text("utf-8")))).cluster == cluster:
                self._seen = seen

    @property
    def revision(self) -> int:
        """The highest revision, with its offset."""
        return self._seen.revision

    @property
    def losses(self) -> int:
        """How often etcd was found to have lost data."""
        return self._seen.losses

    def next(self, lots: int) -> History:
        """The next history after what is remembered, of a cluster with this number of lots."""
        after = self._seen.revision and self._seen.revision + self._chance.randrange(_GAP)
        return History(after, f"{self._chance.getrandbits(64):016x}", lots)

    def takes(self, history: History, revision: int) -> bool:
        """Take a list's revision; False if etcd has lost data since, and no history says so yet."""
        seen, number = self._seen, history.offset + revision
        if not history.id:
            return False
        if history.id == seen.history:
            if number < seen.revision:
                return False
            seen.revision = number
            return True
        if seen.history and history.offset < seen.revision:
            return False
        self._seen = _Seen(seen.cluster, history.id, number, seen.losses + bool(seen.history))
        self.save()
        return True

    def save(self) -> None:
        """Save it. A file that can't be written is logged."""
        if self._file is None:
            return
        try:
            replace_file(self._file, json.dumps(asdict(self._seen)).encode())
        except OSError as error:
            log.error("%s can't be written: %s", self._file, error.strerror)  # noqa: TRY400 - it says all
