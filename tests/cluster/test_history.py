"""The checker of histories, on handmade ones: each inconsistent one is rejected, and each possible one accepted."""

from __future__ import annotations

import random

import pytest

from tests.cluster.history import Call, End, Kind, faults, is_linearizable


def call(
    kind: Kind, value: str | None, began_s: float, ended_s: float, end: End = End.DONE, key: str = "k"
) -> Call:
    return Call(1, kind, key, value, began_s, ended_s, end)


def put(value: str, began_s: float, ended_s: float, end: End = End.DONE) -> Call:
    return call(Kind.PUT, value, began_s, ended_s, end)


def get(value: str | None, began_s: float, ended_s: float, end: End = End.DONE) -> Call:
    return call(Kind.GET, value, began_s, ended_s, end)


def delete(began_s: float, ended_s: float, end: End = End.DONE) -> Call:
    return call(Kind.DELETE, None, began_s, ended_s, end)


def append(value: str, began_s: float, ended_s: float, end: End = End.DONE) -> Call:
    return call(Kind.APPEND, value, began_s, ended_s, end)


def resume(value: str, began_s: float, ended_s: float, end: End = End.DONE) -> Call:
    return call(Kind.RESUME, value, began_s, ended_s, end)


BAD = {
    "other bytes": ("bytes that nobody put", [put("a", 0, 1), get("b", 2, 3)]),
    "bytes of nobody": ("bytes that nobody put", [get("a", 2, 3)]),
    "bytes that were put later": ("bytes that nobody put", [get("a", 0, 1), put("a", 2, 3)]),
    "bytes of a put that never happened": (
        "bytes that nobody put",
        [put("a", 0, 1, End.FAILED), get("a", 2, 3)],
    ),
    "another key's bytes": (
        "bytes that nobody put",
        [call(Kind.PUT, "a", 0, 1, key="other"), put("b", 0, 1), get("a", 2, 3)],
    ),
    "a loss": ("lost", [put("a", 0, 1), get(None, 2, 3)]),
    "a loss after a hit": ("lost", [put("a", 0, 1), get("a", 2, 3), get(None, 4, 5)]),
    "a loss beside a put that is not over": (
        "lost",
        [put("a", 0, 1), put("a", 0, 9, End.UNKNOWN), get(None, 2, 3)],
    ),
    "a loss though a deletion came before": (
        "lost",
        [put("a", 0, 1), delete(2, 3), put("b", 4, 5), get(None, 6, 7)],
    ),
    "a loss before a deletion": ("lost", [put("a", 0, 1), get(None, 2, 3), delete(4, 5)]),
    "a loss beside a deletion that never happened": (
        "lost",
        [put("a", 0, 1), delete(2, 3, End.FAILED), get(None, 4, 5)],
    ),
    "a deletion undone": ("a deletion was undone", [put("a", 0, 1), delete(2, 3), get("a", 4, 5)]),
    "a deletion undone later": (
        "a deletion was undone",
        [put("a", 0, 1), delete(2, 3), get(None, 4, 5), get("a", 6, 7)],
    ),
    "older bytes after newer ones": (
        "a deletion was undone",
        [put("a", 0, 1), delete(2, 3), put("b", 4, 5), get("a", 6, 7)],
    ),
    "a deletion undone and put again only later": (
        "a deletion was undone",
        [put("a", 0, 1), delete(2, 3), get("a", 4, 5), put("a", 6, 7)],
    ),
    "an append that is not there": ("no order", [append("a", 0, 1), resume("", 2, 3)]),
    "an append that goes": (
        "no order",
        [append("a", 0, 1), append("b", 2, 3), resume("a/b", 4, 5), resume("a", 6, 7)],
    ),
    "appends in another order": ("no order", [append("a", 0, 1), append("b", 2, 3), resume("b/a", 4, 5)]),
    "two orders": (
        "no order",
        [append("a", 0, 5), append("b", 0, 5), resume("a/b", 6, 7), resume("b/a", 6, 7)],
    ),
    "an append of nobody": ("no order", [append("a", 0, 1), resume("a/b", 2, 3)]),
    "an append twice": ("no order", [append("a", 0, 1), resume("a/a", 2, 3)]),
    "an append that had failed": ("no order", [append("a", 0, 1, End.FAILED), resume("a", 2, 3)]),
    "an append that came and went": (
        "no order",
        [append("a", 0, 1, End.UNKNOWN), resume("a", 2, 3), resume("", 4, 5)],
    ),
    "a session that comes back": ("no order", [append("a", 0, 1), delete(2, 3), resume("a", 4, 5)]),
    "a clock that goes back": ("a clock", [put("a", 2, 1)]),
}

GOOD = {
    "a hit": [put("a", 0, 1), get("a", 2, 3)],
    "a miss before": [get(None, 0, 1), put("a", 2, 3)],
    "beside the put": [put("a", 0, 5), get(None, 1, 2), get("a", 3, 4), get(None, 3, 4)],
    "a put of which nobody knows": [
        put("a", 0, 1, End.UNKNOWN),
        get(None, 2, 3),
        get("a", 4, 5),
        get(None, 6, 7),
    ],
    "a put that never happened": [put("a", 0, 1, End.FAILED), get(None, 2, 3)],
    "a get that says nothing": [put("a", 0, 1), get(None, 2, 3, End.FAILED)],
    "deleted": [put("a", 0, 1), delete(2, 3), get(None, 4, 5)],
    "beside the deletion": [put("a", 0, 1), delete(2, 5), get(None, 3, 4), get("a", 3, 4), get(None, 6, 7)],
    "a deletion of which nobody knows": [
        put("a", 0, 1),
        delete(2, 3, End.UNKNOWN),
        get(None, 4, 5),
        get("a", 6, 7),
        get(None, 8, 9),
    ],
    "deleted and put again": [put("a", 0, 1), delete(2, 3), put("a", 4, 5), get("a", 6, 7)],
    "a put beside the deletion": [put("a", 0, 5), delete(1, 2), get("a", 6, 7)],
    "a late put": [put("a", 0, 1, End.UNKNOWN), delete(2, 3), get("a", 4, 5)],
    "a session": [append("a", 0, 1), resume("a", 2, 3), append("b", 4, 5), resume("a/b", 6, 7)],
    "appends side by side": [append("a", 0, 5), append("b", 0, 5), resume("b/a", 6, 7)],
    "an append of which nobody knows": [append("a", 0, 1, End.UNKNOWN), resume("", 2, 3), resume("a", 4, 5)],
    "a session that was removed": [append("a", 0, 1), delete(2, 3), resume("", 4, 5), append("b", 6, 7)],
}


@pytest.mark.parametrize("name", BAD)
def test_an_impossible_history_is_refused(name: str) -> None:
    why, history = BAD[name]
    found = faults(history)
    assert found
    assert found[0].startswith(why)
    shuffled = random.Random(name).sample(history, len(history))
    assert faults(shuffled), "in whatever order it was written down"


@pytest.mark.parametrize("name", GOOD)
def test_a_possible_history_is_accepted(name: str) -> None:
    assert faults(GOOD[name]) == []


def test_an_invalid_call_is_found_among_ten_thousand_valid_ones() -> None:
    dice = random.Random(1)
    history = []
    for number in range(2500):
        key, value, at_s = f"k{number}", f"v{number}", dice.random() * 100
        history += [
            call(Kind.PUT, value, at_s, at_s + 1, key=key),
            call(Kind.GET, value, at_s + 2, at_s + 3, key=key),
            call(Kind.DELETE, None, at_s + 4, at_s + 5, key=key),
            call(Kind.GET, None, at_s + 6, at_s + 7, key=key),
        ]
    assert faults(history) == []
    history.append(call(Kind.GET, "v77", 200, 201, key="k77"))
    assert len(faults(history)) == 1


def test_a_session_of_many_clients_is_checked_in_time() -> None:
    """Calls of a sequential history are widened so that many overlap."""
    dice = random.Random(2)
    state: list[str] = []
    calls = []
    for at in range(150):
        widen = dice.random() * 3, dice.random() * 3
        if dice.random() < 0.5:
            state.append(str(at))
            calls.append(append(str(at), at - widen[0], at + widen[1]))
        else:
            calls.append(resume("/".join(state), at - widen[0], at + widen[1]))
    assert is_linearizable(calls)
    last = max(at for at, one in enumerate(calls) if one.kind is Kind.RESUME)
    calls[last] = resume("/".join(state[:-3]), calls[last].began_s + 9, calls[last].ended_s + 9)
    assert not is_linearizable(calls)
