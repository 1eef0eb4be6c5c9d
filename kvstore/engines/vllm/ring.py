"""A ring allocator over a fixed memory: pieces are freed in the order in which they were allocated.

What always holds: allocated pieces never overlap, and each is contiguous; one thread may allocate and another free
without a lock, as each writes its own counter.
"""

from __future__ import annotations

__all__ = ["Ring"]


class Ring:
    """A ring of a fixed number of bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0  # of all time; only the taker writes it
        self._given_back = 0  # of all time; only the giver writes it

    def take(self, size: int) -> tuple[int, int] | None:
        """Allocate a piece: its offset, and how many bytes to free for it; None: there is no room now."""
        offset = self._taken % self._size
        used = self._taken - self._given_back
        left_out = self._size - offset if offset + size > self._size else 0  # the piece begins anew at 0
        # An empty ring takes whatever is no larger than itself, wherever the last piece ended.
        if size > self._size or (used and used + left_out + size > self._size):
            return None
        self._taken += left_out + size
        return (0 if left_out else offset), left_out + size

    def give_back(self, size: int) -> None:
        """Free the oldest allocation."""
        self._given_back += size
        assert self._given_back <= self._taken
