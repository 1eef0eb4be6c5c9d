"""The interface of a policy: which of its rows should be evicted first.

A policy orders rows and knows nothing else: no sessions, no guards, no expiry. Its user takes out rows that may not be
evicted now and gives them back later. So a policy never refuses a row and never loses one. The orders themselves are in
C (`keep/lru.c`, `keep/s3fifo.c`), where the core calls them; a simulator calls them through this class.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from kvstore.storage.keep._keep import ffi, lib
from kvstore.storage.keep.outcome import check

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NO_ROW", "Policy", "Steps"]

NO_ROW: Final = -1


class _HasLeft(Protocol):
    """A counter of steps."""

    left: int


class Steps:
    """The remaining steps of this call, shared by all its parts."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Policy:
    """An order of rows. Only rows that are in it are touched, inherited from, evicted or removed."""

    __slots__ = ("_steps", "kept")

    name: ClassVar[str]  # its name in statistics
    knows_names: ClassVar[bool]  # whether it uses names; if not, none need be made

    def __init__(self, kept: Any) -> None:
        if not kept:
            raise MemoryError("There is no memory for an order of eviction.")
        self.kept = ffi.gc(kept, lib.keep_policy_free)
        self._steps = ffi.new("int64_t *")

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Add a new block, which has not been used yet."""
        check(lib.keep_policy_admitted(self.kept, row, pages, name64))

    def readmitted(self, row: int, pages: int) -> None:
        """Add a block that was taken out before, as just used."""
        check(lib.keep_policy_readmitted(self.kept, row, pages))

    def restored(self, pages: Iterable[int]) -> None:
        """Add rows, from 0, to an empty policy, as used in this order, before all later ones."""
        column = array("I", pages)
        check(lib.keep_policy_restored(self.kept, ffi.from_buffer("uint32_t[]", column), len(column)))

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Order a row right after `place`, whose uses counted for it too. It may be in the policy already."""
        check(lib.keep_policy_inherited(self.kept, row, pages, place))

    def touched(self, rows: Iterable[int]) -> None:
        """Note that blocks were used, in this order; one may occur more than once."""
        column = array("I", rows)
        check(lib.keep_policy_touched(self.kept, ffi.from_buffer("uint32_t[]", column), len(column)))

    def removed(self, row: int) -> None:
        """Take a row out for a while, or for a reason unrelated to its value."""
        check(lib.keep_policy_removed(self.kept, row))

    def evicted(self, row: int, name64: int) -> None:
        """Take out a row that was evicted to make room."""
        check(lib.keep_policy_evicted(self.kept, row, name64))

    def candidate(self, steps: _HasLeft) -> int:
        """Return the row to evict first; the same one until something changes.

        `NO_ROW` if there is none, or if the steps are used up before one is found.
        """
        self._steps[0] = steps.left
        row = int(lib.keep_policy_candidate(self.kept, self._steps))
        steps.left = self._steps[0]
        return row
