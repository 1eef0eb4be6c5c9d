"""S3-FIFO: three FIFO queues; blocks used only once pass through a tenth of the drive (`keep/s3fifo.c`)."""

from __future__ import annotations

from typing import ClassVar, Final

from kvstore.limits import EVICTION_GHOSTS_MAX, EVICTION_USES_MAX
from kvstore.storage.eviction.policy import Policy
from kvstore.storage.keep._keep import lib

__all__ = ["S3Fifo"]


class S3Fifo(Policy):
    """Two rings of rows and a memory of names."""

    __slots__ = ()

    name: Final = "s3fifo"
    knows_names: ClassVar[bool] = True

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(lib.keep_policy_s3fifo(capacity_pages, EVICTION_GHOSTS_MAX, EVICTION_USES_MAX))

    @property
    def ghosts(self) -> int:
        """Return how many names of evicted blocks are remembered."""
        return int(lib.keep_policy_ghosts(self.kept))
