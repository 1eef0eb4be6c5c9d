"""The requester against its guarantees, with random events.

The reference keeps plain dictionaries and sets of what is known, requested and in flight, and checks every get when it
is issued. It has no queues and no turns. Which of the possible gets are issued is up to the requester; the reference
checks that none is issued that must not be, and that none is left that could be.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.errors import KvError
from nic_offload.requester import KvRequester
from nic_offload.requester_catalogue import Change, Extent, User
from nic_offload.requester_terms import Ending, Limits, Outcome
from tests.nic_offload.requesting import ALICE, BOB, EVE, SMALL

if TYPE_CHECKING:
    from collections.abc import Sequence

USERS = (ALICE, BOB, EVE)
KEYS = 5
LONG = SMALL.extent_bytes_max


class Kv:
    """A user in the reference."""

    def __init__(self) -> None:
        self.known: dict[bytes, Extent] = {}
        self.requests: dict[int, int] = {}  # number: deadline
        self.come: set[bytes] = set()  # in the fetch that is under way
        self.failed: set[bytes] = set()
        self.missing = False

    def add(self, extent: Extent) -> None:
        if extent.key not in self.known:
            self.come.discard(extent.key)
        self.failed.discard(extent.key)
        self.known[extent.key] = extent

    def remove(self, key: bytes) -> None:
        del self.known[key]
        self.failed.discard(key)

    def fetch_is_over(self) -> None:
        self.come.clear()
        self.failed.clear()
        self.missing = False


class Reference:
    """The expected state, and the fetcher that receives all requests."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requester = KvRequester(self, limits)
        self.now_ms = 0
        self.kv = {user: Kv() for user in USERS}
        self.out: dict[int, tuple[User, tuple[Extent, ...]]] = {}
        self.to_call_back: set[int] = set()
        self.called_back: set[int] = set()
        self.ended: Counter[tuple[int, Ending]] = Counter()
        self.tickets = self.numbers = 0
        self.refuses = False
        self.fetched_bytes = 0

    # The fetcher.

    def issue(self, user: User, extents: Sequence[Extent]) -> int:
        kv = self.kv[user]
        assert 1 <= len(extents) <= self.limits.gets_per_ticket_max
        assert len({one.node for one in extents}) == 1
        assert kv.requests, "nobody asked for this"
        for one in extents:
            assert kv.known.get(one.key) == one, "stale, or dropped"
            assert one.key in self.pending(user), "on its way, there, or failed"
        if self.refuses:
            kv.failed |= {one.key for one in extents}
            raise KvError("refused")
        self.tickets += 1
        self.out[self.tickets] = user, tuple(extents)
        assert len(self.gets()) <= self.limits.gets_in_flight_max
        assert sum(one.length for one in self.gets()) <= self.limits.bytes_in_flight_max
        assert sum(one.length for one in self.gets(user)) <= self.limits.user_bytes_in_flight_max
        return self.tickets

    def cancel(self, ticket: Any) -> None:
        assert ticket in self.out
        assert ticket not in self.called_back
        self.called_back.add(ticket)

    # What follows from the state.

    def gets(self, user: User | None = None) -> list[Extent]:
        return [one for whose, some in self.out.values() if user in {None, whose} for one in some]

    def asked(self, user: User) -> set[bytes]:
        """The keys of fetches in flight that are still wanted."""
        wanted = self.out.keys() - self.to_call_back
        return {one.key for ticket in wanted if self.out[ticket][0] == user for one in self.out[ticket][1]}

    def pending(self, user: User) -> set[bytes]:
        kv = self.kv[user]
        return kv.known.keys() - self.asked(user) - kv.come - kv.failed if kv.requests else set()

    def end(self, user: User, number: int, ending: Ending) -> None:
        """End a request before its fetch is complete; the last request ends the fetch too."""
        del self.kv[user].requests[number]
        self.ended[number, ending] += 1
        if not self.kv[user].requests:
            self.to_call_back |= {ticket for ticket, (whose, _) in self.out.items() if whose == user}
            self.kv[user].fetch_is_over()

    def settle(self) -> None:
        """End every fetch that is complete."""
        for user, kv in self.kv.items():
            if kv.requests and not self.pending(user) and not self.asked(user):
                ending = Ending.PARTIAL if kv.failed or kv.missing else Ending.COMPLETE
                self.ended.update((number, ending) for number in kv.requests)
                kv.requests.clear()
                kv.fetch_is_over()
        assert self.called_back == self.to_call_back

    # The events.

    def report(self, user: User, extent: Extent, *, moved: bool) -> None:
        kv = self.kv[user]
        known = kv.known.get(extent.key)
        change = (self.requester.moved if moved else self.requester.stored)(user, extent)
        if known is not None and extent.generation <= known.generation:
            assert change is Change.STALE
        elif known is None and moved:
            assert change is Change.UNKNOWN
        else:
            assert change is (Change.ADDED if known is None else Change.REPLACED)
            kv.add(extent)

    def drop(self, user: User, key: bytes, generation: int) -> None:
        known = self.kv[user].known.get(key)
        change = self.requester.dropped(user, key, generation)
        if known is None:
            assert change is Change.UNKNOWN
        elif known.generation > generation:
            assert change is Change.STALE
        else:
            assert change is Change.REMOVED
            self.kv[user].remove(key)

    def forget(self, user: User) -> None:
        kv = self.kv[user]
        assert self.requester.forget(user) == len(kv.known)
        for key in tuple(kv.known):
            kv.remove(key)

    def request(self, user: User, lasts_ms: int, *, urgent: bool) -> None:
        kv = self.kv[user]
        live = sum(len(other.requests) for other in self.kv.values()) + self.ended.total()
        deadline_ms = self.now_ms + lasts_ms
        answer = self.requester.request(user, self.now_ms, deadline_ms, urgent=urgent)
        if not lasts_ms:
            assert answer.outcome is Outcome.LATE
        elif live >= self.limits.requests_max:
            assert answer.outcome is Outcome.FULL
        elif not kv.requests and not kv.known:
            assert answer.outcome is Outcome.MISS
        else:
            assert answer.outcome is (Outcome.MERGED if kv.requests else Outcome.QUEUED)
            assert answer.number is not None
            kv.failed.clear()
            kv.requests[answer.number] = deadline_ms
            self.numbers = answer.number

    def cancel_one(self, number: int) -> None:
        theirs = [user for user, kv in self.kv.items() if number in kv.requests]
        assert self.requester.cancel(number) == bool(theirs)
        for user in theirs:
            self.end(user, number, Ending.CANCELLED)

    def cancel_user(self, user: User) -> None:
        numbers = list(self.kv[user].requests)
        assert self.requester.cancel_user(user) == len(numbers)
        for number in numbers:
            self.end(user, number, Ending.CANCELLED)

    def pump(self, *, refuses: bool = False) -> None:
        for user, kv in self.kv.items():
            for number in [number for number, deadline in kv.requests.items() if deadline <= self.now_ms]:
                self.end(user, number, Ending.EXPIRED)
        self.refuses = refuses
        ended = self.requester.pump(self.now_ms)
        self.settle()
        assert Counter((one.number, one.ending) for one in ended) == self.ended
        self.ended.clear()
        if not refuses:
            self.check_that_nothing_stays_behind()

    def check_that_nothing_stays_behind(self) -> None:
        length = sum(one.length for one in self.gets())
        if (
            len(self.gets()) == self.limits.gets_in_flight_max
            or length + LONG > self.limits.bytes_in_flight_max
        ):
            return
        for user in USERS:
            theirs = sum(one.length for one in self.gets(user))
            assert not self.pending(user) or theirs + LONG > self.limits.user_bytes_in_flight_max

    def finish(self, ticket: int, missing: int, failed: int) -> None:
        """End a ticket; the bits of the two numbers select the gets that missed or failed."""
        user, extents = self.out[ticket]
        absent = {one.key for place, one in enumerate(extents) if missing >> place & 1}
        broken = {one.key for place, one in enumerate(extents) if failed >> place & 1} - absent
        moved_bytes = sum(one.length for one in extents if one.key not in absent | broken)
        wanted = ticket not in self.to_call_back
        assert self.requester.finished(ticket, missing=absent, failed=broken) == (user, moved_bytes)
        del self.out[ticket]
        self.to_call_back.discard(ticket)
        self.called_back.discard(ticket)
        self.fetched_bytes += moved_bytes
        kv = self.kv[user]
        for one in extents:
            same = kv.known.get(one.key) == one
            if one.key not in absent | broken:
                if wanted:
                    kv.come.add(one.key)
                continue
            if wanted and one.key not in kv.known:
                kv.missing = True
            if same and one.key in absent:
                kv.remove(one.key)
                kv.missing |= wanted
            elif same and wanted:
                kv.failed.add(one.key)

    def check(self) -> None:
        self.settle()
        counts = self.requester.statistics()
        assert counts.extents == sum(len(kv.known) for kv in self.kv.values())
        assert counts.users == sum(bool(kv.known) for kv in self.kv.values())
        assert counts.requests == sum(len(kv.requests) for kv in self.kv.values())
        assert counts.gets_in_flight == len(self.gets())
        assert counts.bytes_in_flight == sum(one.length for one in self.gets())
        assert counts.tickets == len(self.out)
        assert counts.fetched_bytes == self.fetched_bytes

    def wind_down(self) -> None:
        """Let everything arrive; nothing is left."""
        for _ in range(100):
            for ticket in tuple(self.out):
                self.finish(ticket, 0, 0)
                self.check()
            self.pump()
            if not self.out:
                break
        assert not any(kv.requests for kv in self.kv.values())
        requester = self.requester
        assert not requester._waiting
        assert not requester._requests
        assert not requester._lines


# Mostly what brings the requester into the thick of it; the rare events are those that empty it.
EVENTS = {
    "stored": 20,
    "moved": 8,
    "drop": 6,
    "request": 20,
    "pump": 25,
    "pump that is refused": 3,
    "finish": 25,
    "cancel": 4,
    "cancel_user": 1,
    "forget": 1,
}


def play(model: Reference, name: str, rng: random.Random) -> None:
    user = rng.choice(USERS)
    key = rng.randrange(KEYS).to_bytes(2)
    known = model.kv[user].known.get(key)
    generation = (0 if known is None else known.generation) + rng.randint(-1, 2)
    match name:
        case "stored" | "moved":
            length = rng.choice([LONG, LONG, rng.randint(1, LONG)])
            extent = Extent(rng.choice(["n1", "n2"]), 0, rng.getrandbits(20), length, key, generation)
            model.report(user, extent, moved=name == "moved")
        case "drop":
            model.drop(user, key, generation)
        case "forget":
            model.forget(user)
        case "request":
            model.request(user, rng.choice([0, 1, 5, 20, 100]), urgent=rng.random() < 0.5)
        case "cancel":
            model.cancel_one(model.numbers - rng.randrange(SMALL.requests_max))
        case "cancel_user":
            model.cancel_user(user)
        case "pump" | "pump that is refused":
            model.now_ms += rng.choice([0, 0, 1, 5])
            model.pump(refuses=name != "pump")
        case "finish" if model.out:
            missing, failed = (rng.choice([0, 0, 0, 1, 2, 7]) for _ in range(2))
            model.finish(rng.choice(list(model.out)), missing, failed)


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_keep_its_guarantees(seed: int) -> None:
    rng = random.Random(seed)
    # So that now the gets and now the bytes are what is scarce.
    model = Reference(replace(SMALL, gets_in_flight_max=rng.choice([3, 6])))
    for name in rng.choices(list(EVENTS), list(EVENTS.values()), k=400):
        play(model, name, rng)
        model.check()
    assert model.requester.statistics().gets > 20
    model.wind_down()
