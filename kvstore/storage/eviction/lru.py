"""Exact LRU: the least recently used row is evicted first (`keep/lru.c`)."""

from __future__ import annotations

from typing import ClassVar, Final

from kvstore.storage.eviction.policy import Policy
from kvstore.storage.keep._keep import lib

__all__ = ["Lru"]


class Lru(Policy):
    """One ring, the coldest row first."""

    __slots__ = ()

    name: Final = "lru"
    knows_names: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__(lib.keep_policy_lru())
