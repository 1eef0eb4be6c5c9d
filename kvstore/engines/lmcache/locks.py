"""Blocks that LMCache has looked up and locked: pins on the node, released when the last key of a look-up is unlocked.

What always holds: no lock outlives its time on the node, and the record of a lock that was never released is dropped
after that time. Any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.clock import SystemClock
from kvstore.limits import LMCACHE_LOCK_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nic_offload.handle import Handle

__all__ = ["Locks"]


@dataclass(slots=True, eq=False)
class _Lock:
    pin: Handle
    until_ns: int
    keys: set[Any] = field(default_factory=set)


class Locks:
    """The locks of an adapter."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._of_key: dict[Any, deque[_Lock]] = {}
        self._all: deque[_Lock] = deque()  # the oldest first

    def add(self, pin: Handle, keys: Iterable[Any]) -> None:
        """Record a pin and the keys it protects."""
        now_ns = self._clock.monotonic_ns()
        one = _Lock(pin, now_ns + LMCACHE_LOCK_MS * 1_000_000, set(keys))
        with self._lock:
            while self._all and self._all[0].until_ns < now_ns:
                self._forget(self._all.popleft())
            self._all.append(one)
            for key in one.keys:
                self._of_key.setdefault(key, deque()).append(one)

    def take(self, keys: Iterable[Any]) -> list[Handle]:
        """Unlock keys, each once; returns the pins no longer needed, to be closed."""
        over = []
        with self._lock:
            for key in keys:
                held = self._of_key.get(key)
                if not held:
                    continue
                one = held.popleft()
                if not held:
                    del self._of_key[key]
                one.keys.discard(key)
                if not one.keys:
                    self._all.remove(one)
                    over.append(one.pin)
        return over

    def take_all(self) -> list[Handle]:
        """Unlock everything."""
        with self._lock:
            pins = [one.pin for one in self._all]
            self._all.clear()
            self._of_key.clear()
        return pins

    def __len__(self) -> int:
        with self._lock:
            return len(self._all)

    def _forget(self, one: _Lock) -> None:
        for key in one.keys:
            held = self._of_key[key]
            held.remove(one)
            if not held:
                del self._of_key[key]
