"""A ring allocator over a fixed memory: pieces are freed in the order in which they were allocated.

What always holds: allocated pieces never overlap, and each is contiguous; one thread may allocate and another free
without a lock, as each writes its own counter while anything is allocated. An empty ring begins anew at 0, where its
memory is present and in caches.
"""

from __future__ import annotations

__all__ = ["Ring"]


class Ring:
    """A ring of a fixed number of bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0  # since it was last empty; only the taker writes it
        self._given_back = 0  # since then; only the giver writes it, unless it is empty

    def take(self, size: int) -> tuple[int, int] | None:
        """Allocate a piece: its offset, and how many bytes to free for it; None: there is no room now."""
        used = self._taken - self._given_back
        if not used:
            self._taken = self._given_back = 0
        offset = self._taken % self._size
        left_out = self._size - offset if offset + size > self._size else 0  # the piece begins anew at 0
        if used + left_out + size > self._size:
            return None
        self._taken += left_out + size
        return (0 if left_out else offset), left_out + size

    def give_back(self, size: int) -> None:
        """Free the oldest allocation."""
        given_back = self._given_back + size
        assert given_back <= self._taken  # before it is known: a ring that is empty begins anew at any time
        self._given_back = given_back
