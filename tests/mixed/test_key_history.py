"""The checker of key histories, on handmade ones: each impossible one is reported, its possible neighbour is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.durability import Durability
from kvstore.miss import MissReason
from tests.mixed.key_history import OTHER_BYTES, End, Event, History, Kind, Outage, Way, report


def put(
    value: int,
    began_s: float,
    ended_s: float,
    end: End = End.DONE,
    *,
    way: Way = Way.ARM,
    durability: Durability = Durability.WRITTEN,
    expires_s: float = math.inf,
) -> Event:
    return Event(Kind.PUT, 1, value, began_s, ended_s, end, way, durability, expires_s)


def landed(value: int, began_s: float, ended_s: float, way: Way = Way.ARM) -> Event:
    return put(value, began_s, ended_s, way=way, durability=Durability.LANDED)


def hit(value: int, began_s: float, ended_s: float) -> Event:
    return Event(Kind.HIT, 1, value, began_s, ended_s, End.DONE)


def found(began_s: float, ended_s: float) -> Event:
    return Event(Kind.FOUND, 1, None, began_s, ended_s, End.DONE)


def miss(began_s: float, ended_s: float, reason: MissReason = MissReason.UNKNOWN) -> Event:
    return Event(Kind.MISS, 1, None, began_s, ended_s, End.DONE, reason=reason)


def removal(
    began_s: float, ended_s: float, end: End = End.DONE, *, is_sure: bool = True, call: str = "delete"
) -> Event:
    return Event(Kind.REMOVAL, 1, None, began_s, ended_s, end, is_sure=is_sure, call=call)


def of_key(key: int, event: Event) -> Event:
    event.key = key
    return event


KILL, STOP = Outage(10, 11, is_clean=False), Outage(10, 11, is_clean=True)

# The fault, a history that has it, and one that hardly differs and has none.
PAIRS: dict[str, tuple[str, list[Event | Outage], list[Event | Outage]]] = {
    "bytes of no put": ("bytes that nobody put", [put(1, 0, 1), hit(2, 2, 3)], [put(1, 0, 1), hit(1, 2, 3)]),
    "mixed bytes": (
        "bytes that nobody put",
        [put(1, 0, 1), hit(OTHER_BYTES, 2, 3)],
        [put(1, 0, 1), miss(2, 3, MissReason.BUSY)],
    ),
    "bytes of a later put": (
        "bytes that nobody put",
        [hit(1, 0, 1), put(1, 2, 3)],
        [hit(1, 0, 2), put(1, 1, 3)],
    ),
    "bytes of another key": (
        "bytes that nobody put",
        [of_key(2, put(1, 0, 1)), hit(1, 2, 3)],
        [of_key(2, put(1, 0, 1)), of_key(2, hit(1, 2, 3))],
    ),
    "bytes of a put that ended with KeyTaken": (
        "bytes of a put that had been refused",
        [put(1, 0, 1), put(2, 2, 5, End.TAKEN), hit(2, 3, 4)],
        [put(1, 0, 1), put(2, 2, 5, End.TAKEN), hit(1, 3, 4)],
    ),
    "bytes of a put that was never sent": (
        "bytes of a put that had been refused",
        [put(1, 0, 1, End.NEVER), hit(1, 2, 3)],
        [put(1, 0, 1, End.UNKNOWN), hit(1, 2, 3)],
    ),
    "bytes of a put that the drive refused": (
        "bytes of a put that had been refused",
        [put(1, 0, 2, End.REFUSED), hit(1, 3, 4)],
        [put(1, 0, 2, End.REFUSED), hit(1, 1, 4)],
    ),
    "bytes of a put that found another block": (
        "bytes of a put that had been refused",
        [put(1, 0, 1), put(2, 2, 3, End.ALREADY), hit(2, 4, 5)],
        [put(1, 0, 1), put(2, 2, 3, End.ALREADY), hit(1, 4, 5)],
    ),
    "a loss": ("an acknowledged block was lost", [put(1, 0, 1), miss(2, 3)], [put(1, 0, 2), miss(1, 3)]),
    "a loss before a deletion": (
        "an acknowledged block was lost",
        [put(1, 0, 1), miss(2, 3), removal(4, 5)],
        [put(1, 0, 1), miss(2, 4), removal(3, 5)],
    ),
    "a loss after a deletion": (
        "an acknowledged block was lost",
        [removal(0, 1), put(1, 2, 3), miss(4, 5)],
        [removal(0, 1, End.UNKNOWN), put(1, 2, 3), miss(4, 5)],
    ),
    "a loss beside a put that may expire": (
        "an acknowledged block was lost",
        [put(1, 0, 1, expires_s=4), put(1, 2, 3), miss(5, 6)],
        [put(1, 0, 1, expires_s=4), put(1, 4, 5), miss(5, 6)],
    ),
    "a written block lost by a kill": (
        "an acknowledged block was lost",
        [put(1, 0, 1), KILL, miss(12, 13)],
        [landed(1, 0, 1), KILL, miss(12, 13)],
    ),
    "a landed block lost by a clean stop": (
        "an acknowledged block was lost",
        [landed(1, 0, 1), STOP, miss(12, 13)],
        [put(1, 0, 1, End.UNKNOWN), STOP, miss(12, 13)],
    ),
    "a landed block lost to a later put": (
        "an acknowledged block was lost",
        [landed(1, 0, 1), put(2, 0, 5, End.UNKNOWN, way=Way.STREAM), miss(3, 4)],
        [landed(1, 0, 1), removal(2, 3), put(2, 0, 5, End.UNKNOWN, way=Way.STREAM), miss(3, 4)],
    ),
    "a block that landed by reserve": (
        "an acknowledged block was lost",
        [landed(1, 0, 1, Way.RESERVE), miss(1.5, 1.6)],
        [landed(1, 0, 1, Way.RESERVE), miss(0.5, 1.6)],
    ),
    "a loss after an erasure that a stop interrupted": (
        "an acknowledged block was lost",
        [removal(9, 10.5, End.UNKNOWN, call="erase_user"), STOP, put(1, 12, 13), miss(14, 15)],
        [removal(9, 11.5, End.UNKNOWN, call="erase_user"), STOP, put(1, 12, 13), miss(14, 15)],
    ),
    "a put from before a kill": (
        "a deletion was undone",
        [put(1, 9, 10.5, End.UNKNOWN), KILL, removal(12, 13), hit(1, 14, 15)],
        [put(1, 9, 11.5, End.UNKNOWN), KILL, removal(12, 13), hit(1, 14, 15)],
    ),
    "a deletion undone": (
        "a deletion was undone",
        [put(1, 0, 1), removal(2, 3), hit(1, 4, 5)],
        [put(1, 0, 1), removal(2, 4), hit(1, 3, 5)],
    ),
    "a deletion undone for a look-up": (
        "a deletion was undone",
        [put(1, 0, 1), removal(2, 3), found(4, 5)],
        [put(1, 0, 1), removal(2, 3), put(2, 3.5, 5), found(4, 5)],
    ),
    "a deletion undone for a put": (
        "a deletion was undone",
        [put(1, 0, 1), removal(2, 3), put(1, 4, 5, End.ALREADY)],
        [put(1, 0, 1), removal(2, 3, is_sure=False), put(1, 4, 5, End.ALREADY)],
    ),
    "a deletion undone by a put from before": (
        "a deletion was undone",
        [put(1, 0, 1), removal(2, 3), hit(1, 4, 5), put(1, 6, 7)],
        [put(1, 0, 1), removal(2, 3), put(1, 2.5, 7), hit(1, 4, 5)],
    ),
    "a block found after its time to live": (
        "a block was found after its time to live",
        [put(1, 0, 1, expires_s=2), hit(1, 3, 4)],
        [put(1, 0, 1, expires_s=2), put(1, 0, 1, expires_s=3), hit(1, 3, 4)],
    ),
    "two blocks found": (
        "two blocks under one key",
        [put(1, 0, 9, End.UNKNOWN), put(2, 0, 9, End.UNKNOWN), hit(1, 1, 2), hit(2, 3, 4)],
        [put(1, 0, 9, End.UNKNOWN), put(2, 0, 9, End.UNKNOWN), hit(1, 1, 2), removal(2, 3), hit(2, 3, 4)],
    ),
    "two blocks acknowledged": (
        "two blocks under one key",
        [landed(1, 0, 1), landed(2, 0, 1, Way.RESERVE)],
        [landed(1, 0, 1), put(2, 0, 1, End.TAKEN, way=Way.RESERVE)],
    ),
    "another block after a kill": (
        "two blocks under one key",
        [put(1, 0, 1), KILL, put(2, 12, 13)],
        [landed(1, 0, 1), KILL, put(2, 12, 13)],
    ),
    "KeyTaken by nothing": (
        "KeyTaken, and there was no other block",
        [put(1, 0, 1, End.TAKEN)],
        [put(1, 0, 1, End.TAKEN), put(2, 0.5, 3)],
    ),
    "KeyTaken by the same bytes": (
        "KeyTaken, and there was no other block",
        [put(1, 0, 1), put(1, 2, 3, End.TAKEN)],
        [put(1, 0, 1), put(1, 2, 3, End.ALREADY)],
    ),
    "KeyTaken by a deleted block": (
        "KeyTaken by a block that had been deleted",
        [put(1, 0, 1), removal(2, 3), put(2, 4, 5, End.TAKEN)],
        [put(1, 0, 1), removal(2, 4.5), put(2, 4, 5, End.TAKEN)],
    ),
    "an eviction from a large drive": (
        "a miss that can't be EVICTED",
        [miss(0, 1, MissReason.EVICTED)],
        [miss(0, 1, MissReason.UNKNOWN)],
    ),
    "an erasure that nobody asked for": (
        "a miss that can't be ERASED",
        [miss(0, 1, MissReason.ERASED), removal(2, 3, call="erase_user")],
        [miss(0, 3, MissReason.ERASED), removal(2, 3, call="erase_user")],
    ),
    "an expiry of a block that stays": (
        "a miss that can't be EXPIRED",
        [put(1, 0, 1, End.UNKNOWN), miss(2, 3, MissReason.EXPIRED)],
        [put(1, 0, 1, End.UNKNOWN, expires_s=2), miss(2, 3, MissReason.EXPIRED)],
    ),
    "another length": (
        "a miss that can't be LENGTH",
        [put(1, 0, 9), miss(2, 3, MissReason.LENGTH)],
        [put(1, 0, 9), miss(2, 3, MissReason.NODE_AWAY)],
    ),
}


def history_of(events: list[Event | Outage], **more: Any) -> History:
    history = History(**more)
    for one in events:
        if isinstance(one, Outage):
            history.outages.append(one)
        else:
            history.add(one)
    return history


@pytest.mark.parametrize("name", PAIRS)
def test_an_impossible_history_is_reported(name: str) -> None:
    words, impossible, _ = PAIRS[name]
    assert [fault.words for fault in history_of(impossible).faults()] == [words]
    assert [fault.words for fault in history_of(impossible[::-1]).faults()] == [words], "in any order"


@pytest.mark.parametrize("name", PAIRS)
def test_its_possible_neighbour_is_not(name: str) -> None:
    assert history_of(PAIRS[name][2]).faults() == []


@pytest.mark.parametrize("cause", ["evicts", "has_quota", "is_damaged"])
def test_a_block_that_may_have_been_removed_for_another_reason_is_not_lost(cause: str) -> None:
    more = {cause: True}
    assert history_of([put(1, 0, 1), miss(2, 3), put(2, 4, 5)], **more).faults() == []
    undone = history_of([put(1, 0, 1), removal(2, 3), hit(1, 4, 5)], **more)
    assert [fault.words for fault in undone.faults()] == ["a deletion was undone"]


@pytest.mark.parametrize(
    ("cause", "reasons"),
    [
        ("evicts", {MissReason.EVICTED}),
        ("has_quota", {MissReason.QUOTA}),
        ("is_damaged", {MissReason.CORRUPT, MissReason.UNREADABLE}),
    ],
)
def test_a_miss_names_a_reason_that_can_apply(cause: str, reasons: set[MissReason]) -> None:
    for reason in reasons:
        assert history_of([miss(0, 1, reason)]).faults()
        assert not history_of([miss(0, 1, reason)], **{cause: True}).faults()


def test_a_report_shows_the_events_of_the_key_around_the_fault() -> None:
    events = [put(1, 100, 101), miss(102, 103), put(7, 0, 1, End.TAKEN), of_key(2, put(3, 101, 102))]
    history = history_of([*events, removal(20, 21), put(2, 1, 2), removal(3, 4)])
    (fault,) = (one for one in history.faults() if "lost" in one.words)
    lines = report(history, fault).splitlines()
    assert lines[0] == "key 1: an acknowledged block was lost"
    assert [line.endswith("<--") for line in lines[2:]] == [True, True]
    assert "put 1 done arm WRITTEN" in lines[2]
    assert "miss done UNKNOWN" in lines[3]
