"""The interface of a policy: of the rows it has been given, which should be evicted first.

A policy orders rows and knows nothing else: no sessions, no guards, no expiry. Its user takes out rows that may not be
evicted now and gives them back later. So a policy never refuses a row and never loses one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NO_ROW", "Policy", "Steps"]

NO_ROW: Final = -1


class Steps:
    """How much may still be done in this call; shared by all who do it."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Policy(Protocol):
    """An order of rows. Only rows that are in it are touched, inherited from, evicted or removed."""

    @property
    def name(self) -> str:
        """What it is called in statistics."""
        ...

    @property
    def knows_names(self) -> bool:
        """Whether it uses names; if not, none need be made."""
        ...

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Take in a new block, which was never used yet."""
        ...

    def readmitted(self, row: int, pages: int) -> None:
        """Take in a block known from before, as just used: given back."""
        ...

    def restored(self, pages: Sequence[int]) -> None:
        """Take in rows from 0 on into an empty policy, as used in this order, before all that comes."""
        ...

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Let a row go no sooner than right after `place`, whose uses were its own too. It may be in already."""
        ...

    def touched(self, rows: Sequence[int]) -> None:
        """Note that blocks were used, in this order; one may occur more than once."""
        ...

    def removed(self, row: int) -> None:
        """Take a row out for a while, or for a reason that says nothing of its worth."""
        ...

    def evicted(self, row: int, name64: int) -> None:
        """Take a row out that has been evicted to make room."""
        ...

    def candidate(self, steps: Steps) -> int:
        """Return the row that should go first, and the same one until something changes.

        `NO_ROW` if there is none, or if the steps are used up before one is found.
        """
        ...
