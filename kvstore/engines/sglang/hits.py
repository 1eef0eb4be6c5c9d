"""The longest usable prefix, if pools besides the KV must have their pages too. No I/O.

A pool's policy says which of its pages are required: all of them; the last few, which hold a state or a window; or, as
a second form of the KV, whole groups from the start, which only limit that form.

What always holds: a length is usable only if the KV has all its pages and every pool those that its policy requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Found", "usable"]


@dataclass(frozen=True, slots=True)
class Found:
    """The hits of a pool."""

    name: Any  # as SGLang gave it
    reach: int  # how many pages its own longest usable prefix has
    lengths: frozenset[int] | None  # at which the pool allows a prefix to end; None: at any

    @classmethod
    def of(cls, transfer: Any, here: Sequence[bool]) -> Found:
        """Compute a pool's hits from which of a prefix's pages it has."""
        policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        if policy == "block_groups":
            return cls(transfer.name, _groups(transfer, here), None)
        if policy == "trailing_pages":
            window = max(1, len(transfer.keys or ()))
            lengths = frozenset(
                end for end in range(1, len(here) + 1) if all(here[max(0, end - window) : end])
            )
            return cls(transfer.name, max(lengths, default=0), lengths)
        reach = next((number for number, is_here in enumerate(here) if not is_here), len(here))
        return cls(transfer.name, reach, frozenset(range(1, reach + 1)))


def usable(kv_pages: int, found: Sequence[Found]) -> list[int]:
    """Every length, in pages, at which a prefix may end; the shortest first."""
    return [
        length
        for length in range(1, kv_pages + 1)
        if all(one.lengths is None or length in one.lengths for one in found)
    ]


def _groups(transfer: Any, here: Sequence[bool]) -> int:
    """How many pages the leading complete groups cover: each block's pages are `group_pages` at a time."""
    block = max(1, transfer.block_pages)
    covered = 0
    while covered + block <= len(here) and all(here[covered : covered + block]):
        covered += block
    return covered
