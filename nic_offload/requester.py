"""The KV-cache requester: fetches all KV of a user when the match-action table says so, while the user still types.

It knows where every extent of a user is (`stored`, `moved`, `dropped`: the catalogue follows every transfer), takes
requests for users, and passes gets to a `Fetcher`: fairly, within bounds, until each request's deadline. It has no
I/O and no clock: time is passed in as `now_ms`, and all output goes through the fetcher, in `pump`, `cancel` and
`cancel_user`. A table's hits reach it by `perform(entry, request, At(requester, now_ms, deadline_ms))`.

What always holds:

- A get names the newest extent known at that moment; a replaced or dropped extent is never requested.
- There is one fetch per user: a second request joins it. An extent that is in flight or has arrived is not requested
  again, unless it failed.
- Bytes and gets in flight are bounded, in total and per user, including those being cancelled.
- Tenants share the bytes evenly, and so do the users of one tenant; of these, urgent ones come first.
- Every request ends exactly once, in a result of `pump`. A request cancelled before its gets were issued causes none.
- Everything is bounded: what exceeds a bound is refused, or dropped and counted, and the result says which.

What it doesn't do: place the bytes, retry (the next request does), decide what is kept. `store` and `route` are
recorded for the code that puts (`placement`); the catalogue says where a user's KV is fetched from. Call it from one
thread; the fetcher must not call back.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from nic_offload.errors import KvError
from nic_offload.requester_catalogue import Catalogue, Change, Extent, User
from nic_offload.requester_terms import (
    Answer,
    Ended,
    Ending,
    Fetcher,
    Finished,
    Limits,
    Outcome,
    Placement,
    Statistics,
)
from nic_offload.requester_turns import Line, Lines

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

__all__ = ["KvRequester"]

_NO_PLACEMENT = Placement()


@dataclass(slots=True)
class _Fetch:
    """The fetches of one user. Each of the user's known keys is in one of the three, or has arrived."""

    queued: OrderedDict[bytes, None]
    asked: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    missing: bool = False
    requests: dict[int, bool] = field(default_factory=dict)  # number: urgent
    urgent: int = 0  # how many of them are
    tickets: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class _Waiting:
    """A user for whom something is queued or in flight."""

    fetch: _Fetch | None = None
    bytes_in_flight: int = 0


class _Ticket(NamedTuple):
    user: User
    fetch: _Fetch
    extents: tuple[Extent, ...]


class KvRequester:
    """The requester; see the top of this file."""

    def __init__(self, fetcher: Fetcher, limits: Limits | None = None) -> None:
        self._fetcher = fetcher
        self._limits = limits = limits or Limits()
        self._catalogue = Catalogue(
            users_max=limits.users_max,
            extents_max=limits.extents_max,
            extents_per_user_max=limits.extents_per_user_max,
            extent_bytes_max=limits.extent_bytes_max,
        )
        self._placements: dict[User, Placement] = {}
        self._waiting: dict[User, _Waiting] = {}
        self._requests: dict[int, User] = {}
        self._deadlines: list[tuple[int, int]] = []  # a heap of deadlines and numbers, including ended ones
        self._number = 0
        self._lines = Lines(limits.extent_bytes_max)
        self._tickets: dict[Hashable, _Ticket] = {}
        self._bytes_in_flight = self._gets_in_flight = 0
        self._ended: list[Ended] = []
        self._counts = Statistics()

    # What is known.

    def stored(self, user: User, extent: Extent) -> Change:
        """A block of the user was stored; a fetch that is under way includes it."""
        change = self._catalogue.stored(user, extent)
        return self._reported(user, extent.key, change)

    def moved(self, user: User, extent: Extent) -> Change:
        """A block of the user has moved."""
        change = self._catalogue.moved(user, extent)
        return self._reported(user, extent.key, change)

    def dropped(self, user: User, key: bytes, generation: int) -> Change:
        """A block of the user is gone; if it was queued, it is removed from the queue."""
        change = self._catalogue.dropped(user, key, generation)
        return self._reported(user, key, change)

    def forget(self, user: User) -> int:
        """All KV of the user is gone; returns the number of extents. The user's requests end by the next `pump`."""
        count = self._catalogue.forget(user)
        self._placements.pop(user, None)
        waiting = self._waiting.get(user)
        if waiting is not None and waiting.fetch is not None:
            waiting.fetch.queued.clear()
            waiting.fetch.failed.clear()
            self._settle(user)
        return count

    def extents(self, user: User) -> tuple[Extent, ...]:
        """Where the user's KV lies, in order."""
        return tuple(self._catalogue.of(user).values())

    def placement(self, user: User) -> Placement:
        """The rules' placement of KV that the user's requests make."""
        return self._placements.get(user, _NO_PLACEMENT)

    # Requests.

    def request(self, user: User, now_ms: int, deadline_ms: int, *, urgent: bool = False) -> Answer:
        """Queue gets for all KV of the user, or join the fetch that is under way."""
        counts = self._counts
        if deadline_ms <= now_ms:
            counts.refused_late += 1
            return Answer(Outcome.LATE)
        if len(self._requests) + len(self._ended) >= self._limits.requests_max:
            counts.refused_full += 1
            return Answer(Outcome.FULL)
        known = self._catalogue.of(user)
        waiting = self._waiting.get(user)
        fetch = None if waiting is None else waiting.fetch
        if fetch is None and not known:
            counts.missed += 1
            return Answer(Outcome.MISS)
        merged = fetch is not None
        if fetch is None:
            fetch = _Fetch(OrderedDict.fromkeys(known))
            self._waiting.setdefault(user, _Waiting()).fetch = fetch
            counts.queued += 1
        else:
            fetch.queued.update(dict.fromkeys(key for key in known if key in fetch.failed))
            fetch.failed.clear()
            counts.merged += 1
        self._number += 1
        fetch.requests[self._number] = urgent
        fetch.urgent += urgent
        self._requests[self._number] = user
        self._remember_deadline(deadline_ms)
        self._settle(user)
        return Answer(Outcome.MERGED if merged else Outcome.QUEUED, self._number)

    def cancel(self, number: int) -> bool:
        """End a request; False if it has ended already. With the last request of a user their fetch ends."""
        if number not in self._requests:
            return False
        self._end(number, Ending.CANCELLED)
        return True

    def cancel_user(self, user: User) -> int:
        """End all requests for the user; returns their number."""
        waiting = self._waiting.get(user)
        numbers = () if waiting is None or waiting.fetch is None else tuple(waiting.fetch.requests)
        for number in numbers:
            self._end(number, Ending.CANCELLED)
        return len(numbers)

    def pump(self, now_ms: int) -> list[Ended]:
        """Apply deadlines, issue what there is room for, and return the requests that have ended."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, number = heapq.heappop(self._deadlines)
            if number in self._requests:
                self._end(number, Ending.EXPIRED)
        per_ticket = self._limits.gets_per_ticket_max
        for (user, _), extents in self._pick().items():
            for start in range(0, len(extents), per_ticket):
                self._issue(user, tuple(extents[start : start + per_ticket]))
        ended, self._ended = self._ended, []
        return ended

    def finished(
        self, ticket: Hashable, *, missing: Collection[bytes] = (), failed: Collection[bytes] = ()
    ) -> Finished:
        """A ticket has ended. The node doesn't have the keys in `missing`; all others except `failed` have arrived."""
        taken = self._tickets.pop(ticket, None)
        if taken is None:
            raise KvError(f"There is no ticket {ticket!r}, or it has been reported as finished already.")
        user, fetch, extents = taken
        fetch.tickets.discard(ticket)
        self._land(user, extents)
        moved_bytes = 0
        for extent in extents:
            fetch.asked.discard(extent.key)
            if extent.key not in missing and extent.key not in failed:
                moved_bytes += extent.length
            else:
                self._did_not_come(user, fetch, extent, missing=extent.key in missing)
        self._counts.fetched_bytes += moved_bytes
        self._settle(user)
        return Finished(user, moved_bytes)

    def statistics(self) -> Statistics:
        """Return the counts so far, and the current state."""
        return replace(
            self._counts,
            users=len(self._catalogue),
            extents=self._catalogue.extents,
            requests=len(self._requests),
            bytes_in_flight=self._bytes_in_flight,
            gets_in_flight=self._gets_in_flight,
            tickets=len(self._tickets),
        )

    def place(self, user: User, *, keep: bool = False, node: str = "") -> None:
        """Record a rule's placement; earlier ones stay."""
        if user not in self._placements and len(self._placements) >= self._limits.users_max:
            self._counts.placements_without_room += 1
            return
        before = self.placement(user)
        self._placements[user] = Placement(keep or before.keep, node or before.node)

    def refuse_handle(self, *, foreign: bool) -> None:
        """Count a handle that stands for nothing here."""
        if foreign:
            self._counts.refused_foreign += 1
        else:
            self._counts.missed += 1

    # Internals.

    def _reported(self, user: User, key: bytes, change: Change) -> Change:
        """Let a fetch that is under way follow the catalogue."""
        if change is Change.STALE:
            self._counts.reports_stale += 1
        elif change is Change.NO_ROOM:
            self._counts.reports_without_room += 1
        waiting = self._waiting.get(user)
        fetch = None if waiting is None else waiting.fetch
        if fetch is not None and change in {Change.ADDED, Change.REPLACED, Change.REMOVED}:
            if change is Change.REMOVED:
                fetch.queued.pop(key, None)
            elif key not in fetch.asked and (change is Change.ADDED or key in fetch.failed):
                fetch.queued[key] = None
            fetch.failed.discard(key)
            self._settle(user)
        return change

    def _did_not_come(self, user: User, fetch: _Fetch, extent: Extent, *, missing: bool) -> None:
        if missing:
            self._counts.gets_missing += 1
        else:
            self._counts.gets_failed += 1
        known = self._catalogue.of(user).get(extent.key)
        if known is not None and known != extent:
            fetch.queued[extent.key] = None  # it has moved: request it there
        elif missing or known is None:
            self._catalogue.dropped(user, extent.key, extent.generation)
            fetch.missing = True
            current = self._waiting[user].fetch  # a different one if the ticket's was cancelled
            if current is not None:
                current.queued.pop(extent.key, None)
                current.failed.discard(extent.key)
        else:
            fetch.failed.add(extent.key)

    def _pick(self) -> dict[tuple[User, str], list[Extent]]:
        """Take from the queues, in fair order, what may go out now; by user and node."""
        picked: dict[tuple[User, str], list[Extent]] = {}
        limits = self._limits
        while len(self._lines) and self._gets_in_flight < limits.gets_in_flight_max:
            user = self._lines.head(self._cost)
            extent = self._next(user)
            if self._bytes_in_flight + extent.length > limits.bytes_in_flight_max:
                break  # nothing smaller may go first, or it would wait for ever
            self._lines.charge(user, extent.length)
            waiting = self._waiting[user]
            assert waiting.fetch is not None
            del waiting.fetch.queued[extent.key]
            waiting.fetch.asked.add(extent.key)
            waiting.bytes_in_flight += extent.length
            self._bytes_in_flight += extent.length
            self._gets_in_flight += 1
            picked.setdefault((user, extent.node), []).append(extent)
            self._line_up(user)
        return picked

    def _issue(self, user: User, extents: tuple[Extent, ...]) -> None:
        fetch = self._waiting[user].fetch
        assert fetch is not None
        try:
            ticket = self._fetcher.issue(user, extents)
        except KvError:
            self._land(user, extents)
            self._counts.gets_failed += len(extents)
            keys = {extent.key for extent in extents}
            fetch.asked -= keys
            fetch.failed |= keys
            self._settle(user)
            return
        assert ticket not in self._tickets, "a fetcher's tickets differ"
        self._tickets[ticket] = _Ticket(user, fetch, extents)
        fetch.tickets.add(ticket)
        self._counts.gets += len(extents)

    def _land(self, user: User, extents: tuple[Extent, ...]) -> None:
        """Count these as no longer in flight."""
        length = sum(extent.length for extent in extents)
        self._waiting[user].bytes_in_flight -= length
        self._bytes_in_flight -= length
        self._gets_in_flight -= len(extents)

    def _end(self, number: int, ending: Ending) -> None:
        """End one request; with the last one its fetch ends, and its gets are cancelled."""
        user = self._requests[number]
        waiting = self._waiting[user]
        fetch = waiting.fetch
        assert fetch is not None
        self._report(number, fetch, ending)
        if not fetch.requests:
            waiting.fetch = None
            for ticket in fetch.tickets:
                self._fetcher.cancel(ticket)
        self._settle(user)

    def _report(self, number: int, fetch: _Fetch, ending: Ending) -> None:
        fetch.urgent -= fetch.requests.pop(number)
        self._ended.append(Ended(number, self._requests.pop(number), ending))
        counts = self._counts
        counts.completed += ending is Ending.COMPLETE
        counts.partial += ending is Ending.PARTIAL
        counts.cancelled += ending is Ending.CANCELLED
        counts.expired += ending is Ending.EXPIRED

    def _settle(self, user: User) -> None:
        """After any change to a user: end the fetch if nothing is left of it, and put the user in the right line."""
        waiting = self._waiting[user]
        fetch = waiting.fetch
        if fetch is not None and not fetch.queued and not fetch.asked:
            ending = Ending.PARTIAL if fetch.failed or fetch.missing else Ending.COMPLETE
            for number in tuple(fetch.requests):
                self._report(number, fetch, ending)
            waiting.fetch = None
        self._line_up(user)
        if waiting.fetch is None and not waiting.bytes_in_flight:
            del self._waiting[user]

    def _line_up(self, user: User) -> None:
        """Keep the user in line while there is something to request, and paused while there is no room for it."""
        waiting = self._waiting[user]
        fetch = waiting.fetch
        if fetch is None or not fetch.queued:
            self._lines.stand(user, None)
            return
        room = self._limits.user_bytes_in_flight_max - waiting.bytes_in_flight
        line = Line.URGENT if fetch.urgent else Line.AHEAD
        self._lines.stand(user, line, pauses=self._cost(user) > room)

    def _next(self, user: User) -> Extent:
        fetch = self._waiting[user].fetch
        assert fetch is not None
        return self._catalogue.of(user)[next(iter(fetch.queued))]

    def _cost(self, user: User) -> int:
        return self._next(user).length

    def _remember_deadline(self, deadline_ms: int) -> None:
        heapq.heappush(self._deadlines, (deadline_ms, self._number))
        if len(self._deadlines) > 2 * self._limits.requests_max:  # mostly of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)
