"""Sessions as chains: which blocks are in which session, and which of them are tails.

A session is a chain of blocks at positions; a block may be in many sessions. A block's bytes depend on all blocks
before it, so it has the same position in all of them.

A *tail* is a block that is the last one in every session that has it; a block in no session is a tail too. If only
tails are evicted, what remains of each session is always a prefix. A tail always exists: the block with the highest
position is one.

A session is *broken* once a block was removed from its middle (expired or deleted): blocks after the gap can't be
used, and it is unknown whether the gap will be filled. Positions that never had a block break nothing: those blocks
may be on another drive.

Always holds: `followed[row]` is the number of sessions in which a block comes after the row. All operations are O(1),
except adding a block out of order or removing one from a session's middle (a bisection and a shift of at most 8 bytes
per block of that session), and removing a block that is in many sessions (their number).

It knows no guards, sizes or times, and forgets a session when its last block is removed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.limits import SESSION_BLOCKS_MAX, SESSION_LINKS_MIN, SESSION_LINKS_PER_BLOCK
from kvstore.storage.eviction.items import Refusal
from kvstore.storage.eviction.policy import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Chains"]

_NO_LINK: Final = 0
_NO_GAP: Final = -1
_LINK_BITS: Final = 32
_LINK_MASK: Final = (1 << _LINK_BITS) - 1


class _Chain:
    """One session. `places` is sorted: each a position, and below it the link to the row that stands there."""

    __slots__ = ("gap", "places", "queued", "session")

    def __init__(self, session: int) -> None:
        self.session = session
        self.places = array("Q")
        self.gap = _NO_GAP  # the lowest position that something left though something stood behind it
        self.queued = False  # stands among the broken ones

    def find(self, position: int) -> int:
        """Return where a position's place is, or would be."""
        return bisect_left(self.places, position << _LINK_BITS)

    def is_broken(self) -> bool:
        return self.gap != _NO_GAP and self.gap < self.places[-1] >> _LINK_BITS


class Chains:
    """All sessions. A link means that a row is in a chain: 20 bytes, and 12 a row."""

    __slots__ = (
        "_broken",
        "_by_session",
        "_chains",
        "_first",
        "_free_chains",
        "_free_link",
        "_link_chain",
        "_link_next",
        "_link_row",
        "_positions",
        "followed",
        "links",
    )

    def __init__(self) -> None:
        self._chains: list[_Chain | None] = []
        self._free_chains: list[int] = []
        self._by_session: dict[int, int] = {}
        self._broken: deque[int] = deque()
        # Of each link; link 0 is none. Free links are chained by `_link_next`.
        self._link_row = array("I", [0])
        self._link_chain = array("I", [0])
        self._link_next = array("I", [0])
        self._free_link = _NO_LINK
        # Of each row:
        self._first = array("I")
        self._positions = array("I")
        self.followed = array("I")
        self.links = 0

    def __len__(self) -> int:
        return len(self._by_session)

    def reach(self, row: int) -> None:
        """Make rows up to this one exist."""
        missing = row + 1 - len(self._first)
        if missing > 0:
            for column in (self._first, self._positions, self.followed):
                column.extend([0] * missing)

    def refusal(self, row: int, position: int, rows: int) -> Refusal | None:
        """Say why a row can't have a position; `rows` is how many there are, for the bound of links."""
        if not 0 <= position < SESSION_BLOCKS_MAX:
            return Refusal.FULL
        if self._first[row] != _NO_LINK and self._positions[row] != position:
            return Refusal.MOVED
        if self.links >= max(SESSION_LINKS_MIN, SESSION_LINKS_PER_BLOCK * rows):
            return Refusal.FULL
        return None

    def join(self, row: int, session: int, position: int) -> None:
        """Let a row stand at a place that is free (see `at`) and that it may have (see `refusal`)."""
        index = self._by_session.get(session, -1)
        chain = self._chains[index] if index >= 0 else None
        if chain is None:
            index, chain = self._open(session)
        self._positions[row] = position
        link = self._take_link(row, index, self._first[row])
        self._first[row] = link
        self.links += 1
        place = position << _LINK_BITS | link
        places = chain.places
        if not places or places[-1] < place:
            if places:
                self.followed[self._link_row[places[-1] & _LINK_MASK]] += 1
            places.append(place)
        else:
            places.insert(chain.find(position), place)
            self.followed[row] += 1
            if position == chain.gap:
                chain.gap = _NO_GAP  # there may be more of them, which the policy then decides on

    def open_with(self, session: int, rows: Sequence[int]) -> bool:
        """Let a session that is not there begin with these rows, which stand in none; False if it can't be so.

        It is `join` for each, several times as fast: an opening does it for every session.
        """
        first = self._first
        fresh = len(set(rows)) == len(rows) <= SESSION_BLOCKS_MAX and not any(first[row] for row in rows)
        if not rows or not fresh or session in self._by_session:
            return False
        index, chain = self._open(session)
        link = len(self._link_row)
        chain.places.extend(place << _LINK_BITS | link + place for place in range(len(rows)))
        self._link_row.extend(rows)
        self._link_chain.extend([index] * len(rows))
        self._link_next.extend([_NO_LINK] * len(rows))
        self.links += len(rows)
        positions, followed = self._positions, self.followed
        for position, row in enumerate(rows):
            first[row] = link + position
            positions[row] = position
            followed[row] = 1
        followed[rows[-1]] = 0
        return True

    def at(self, session: int, position: int) -> int:
        """Return which row stands at a place; `NO_ROW` if none does."""
        chain = self._of(session)
        if chain is None or chain.places[-1] >> _LINK_BITS < position:
            return NO_ROW
        place = chain.places[chain.find(position)]
        return self._link_row[place & _LINK_MASK] if place >> _LINK_BITS == position else NO_ROW

    def leave(self, row: int, session: int | None = None) -> list[int]:
        """Take a row out of one session, or of all; return the other rows that are tails by it.

        The row itself may be one by it too if it was taken out of one session.
        """
        tails: list[int] = []
        kept = _NO_LINK
        link = self._first[row]
        while link != _NO_LINK:
            following = self._link_next[link]
            index = self._link_chain[link]
            chain = self._chains[index]
            assert chain is not None
            if session is None or chain.session == session:
                self._cut(index, chain, link, tails)
            else:
                self._link_next[link] = kept
                kept = link
            link = following
        self._first[row] = kept
        return tails

    def sessions(self, row: int) -> Iterator[int]:
        """Return the sessions that a row is in."""
        link = self._first[row]
        while link != _NO_LINK:
            chain = self._chains[self._link_chain[link]]
            assert chain is not None
            yield chain.session
            link = self._link_next[link]

    def last_session(self, row: int) -> int:
        """Return the session that a row joined last; 0 if it is in none."""
        return next(self.sessions(row)) if self._first[row] != _NO_LINK else 0

    def position(self, row: int) -> int:
        """Return the position of a row in a session."""
        return self._positions[row]

    def rows(self, session: int, first_position: int = 0, until: int = SESSION_BLOCKS_MAX) -> list[int]:
        """Return the rows of a session from a position on, up to another, in order."""
        chain = self._of(session)
        if chain is None:
            return []
        return [
            self._link_row[place & _LINK_MASK]
            for place in chain.places[chain.find(first_position) : chain.find(until)]
        ]

    def stranded(self) -> int:
        """Return the tail of a broken session, or `NO_ROW`. One that stands in another session too is no such."""
        while self._broken:
            index = self._broken[0]
            chain = self._chains[index]
            if chain is not None and chain.queued:
                if chain.is_broken():
                    link = chain.places[-1] & _LINK_MASK
                    row = self._link_row[link]
                    if self._first[row] == link and self._link_next[link] == _NO_LINK:
                        return row
                chain.queued = False
            self._broken.popleft()
        return NO_ROW

    def leave_stranded(self) -> None:
        """Leave the broken session that `stranded` spoke of to the policy, until it loses one more block."""
        chain = self._chains[self._broken.popleft()]
        assert chain is not None
        chain.queued = False

    def _of(self, session: int) -> _Chain | None:
        index = self._by_session.get(session)
        return None if index is None else self._chains[index]

    def _open(self, session: int) -> tuple[int, _Chain]:
        chain = _Chain(session)
        if self._free_chains:
            index = self._free_chains.pop()
            self._chains[index] = chain
        else:
            index = len(self._chains)
            self._chains.append(chain)
        self._by_session[session] = index
        return index, chain

    def _take_link(self, row: int, index: int, following: int) -> int:
        link = self._free_link
        if link == _NO_LINK:
            link = len(self._link_row)
            self._link_row.append(row)
            self._link_chain.append(index)
            self._link_next.append(following)
        else:
            self._free_link = self._link_next[link]
            self._link_row[link] = row
            self._link_chain[link] = index
            self._link_next[link] = following
        return link

    def _cut(self, index: int, chain: _Chain, link: int, tails: list[int]) -> None:
        """Take a link out of its chain, and give both back if they are of no more use."""
        row = self._link_row[link]
        places = chain.places
        if places[-1] & _LINK_MASK == link:
            places.pop()
            if places:
                last = self._link_row[places[-1] & _LINK_MASK]
                if chain.gap > self._positions[last]:
                    chain.gap = _NO_GAP
                self.followed[last] -= 1
                if not self.followed[last]:
                    tails.append(last)
        else:
            position = self._positions[row]
            del places[chain.find(position)]
            self.followed[row] -= 1
            chain.gap = position if chain.gap == _NO_GAP else min(chain.gap, position)
        self._link_next[link] = self._free_link
        self._free_link = link
        self.links -= 1
        if not places:
            del self._by_session[chain.session]
            self._chains[index] = None
            self._free_chains.append(index)
        elif not chain.queued and chain.is_broken():
            chain.queued = True
            self._broken.append(index)
