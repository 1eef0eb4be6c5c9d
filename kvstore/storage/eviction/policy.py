"""The interface of a policy: of the rows it has been given, which should be evicted first.

A policy orders rows and knows nothing else: no sessions, no guards, no expiry. Its user takes out rows that may not be
evicted now and gives them back later. So a policy never refuses a row and never loses one. The orders themselves are in
C (`keep/lru.c`, `keep/s3fifo.c`), where the core calls them; through this class a simulator does.
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
    """What counts steps."""

    left: int


class Steps:
    """How much may still be done in this call; shared by all who do it."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Policy:
    """An order of rows. Only rows that are in it are touched, inherited from, evicted or removed."""

    __slots__ = ("_steps", "kept")

    name: ClassVar[str]  # what it is called in statistics
    knows_names: ClassVar[bool]  # whether it uses names; if not, none need be made

    def __init__(self, kept: Any) -> None:
        if not kept:
            raise MemoryError("There is no memory for an order of eviction.")
        self.kept = ffi.gc(kept, lib.keep_policy_free)
        self._steps = ffi.new("int64_t *")

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Take in a new block, which was never used yet."""
        check(lib.keep_policy_admitted(self.kept, row, pages, name64))

    def readmitted(self, row: int, pages: int) -> None:
        """Take in a block known from before, as just used: given back."""
        check(lib.keep_policy_readmitted(self.kept, row, pages))

    def restored(self, pages: Iterable[int]) -> None:
        """Take in rows from 0 on into an empty policy, as used in this order, before all that comes."""
        column = array("I", pages)
        check(lib.keep_policy_restored(self.kept, ffi.from_buffer("uint32_t[]", column), len(column)))

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Let a row go no sooner than right after `place`, whose uses were its own too. It may be in already."""
        check(lib.keep_policy_inherited(self.kept, row, pages, place))

    def touched(self, rows: Iterable[int]) -> None:
        """Note that blocks were used, in this order; one may occur more than once."""
        column = array("I", rows)
        check(lib.keep_policy_touched(self.kept, ffi.from_buffer("uint32_t[]", column), len(column)))

    def removed(self, row: int) -> None:
        """Take a row out for a while, or for a reason that says nothing of its worth."""
        check(lib.keep_policy_removed(self.kept, row))

    def evicted(self, row: int, name64: int) -> None:
        """Take a row out that has been evicted to make room."""
        check(lib.keep_policy_evicted(self.kept, row, name64))

    def candidate(self, steps: _HasLeft) -> int:
        """Return the row that should go first, and the same one until something changes.

        `NO_ROW` if there is none, or if the steps are used up before one is found.
        """
        self._steps[0] = steps.left
        row = int(lib.keep_policy_candidate(self.kept, self._steps))
        steps.left = self._steps[0]
        return row
