"""The operations of several clients on a cluster, and whether their results are consistent.

A history is a list of calls: a client's, of a key, with what was put or got, when it began, when it ended, and how. It
is judged as a whole, when all is over:

- **bytes**: a get gives only what somebody had begun to put under that key;
- **loss**: what was acknowledged and not deleted is not missed by a later get;
- **deletion**: what was acknowledged as deleted is not got later, unless it was put again;
- **order**: calls of a session are linearizable: some order of them, each at one moment between its beginning and its
  end, gives just these answers. A session may be lost with its node, where the test says so: from then on it is empty,
  and what it had never comes back.

What always holds: a call whose end nobody knows may have happened at any time after it began, or never. Times are those
of one clock for all processes of a machine, which no test changes (CLOCK_MONOTONIC).
What it doesn't do: ask that blocks are linearizable, which nobody promises: while a deletion is under way a block may
be missed by one get and found by the next.

Why a search of our own: Porcupine is a Go program, with a tool chain that nothing else here needs; for the histories of
single sessions the search of Wing and Gong, with Lowe's memory of the states it has seen, is forty lines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Call", "End", "Kind", "faults", "is_linearizable"]

SEARCH_STEPS_MAX = 1_000_000  # of one session: more is a test that asks too much


class Kind(Enum):
    PUT = "put"
    GET = "get"
    DELETE = "delete"
    APPEND = "append"  # to a session
    RESUME = "resume"  # all that was appended


_CHANGES = {Kind.APPEND, Kind.DELETE}


class End(Enum):
    DONE = "done"
    FAILED = "failed"  # a get that says nothing; of others: it has not happened, and never will
    UNKNOWN = "unknown"  # it may have happened, or may happen yet


@dataclass(frozen=True)
class Call:
    client: int
    kind: Kind
    key: str
    value: str | None  # that was put, appended or got; None: a get that found nothing
    began_s: float
    ended_s: float
    end: End = End.DONE
    first: int | None = None  # of an append: it is done only if the session has just so many values before

    @property
    def until_s(self) -> float:
        """The latest time at which it can have taken effect."""
        return self.ended_s if self.end is End.DONE else math.inf

    def __str__(self) -> str:
        return (
            f"client {self.client} {self.kind.value} {self.key} {self.value!r},"
            f" {self.began_s:.3f} to {self.ended_s:.3f} s, {self.end.value}"
        )


def faults(history: Iterable[Call], *, may_lose_sessions: bool = False) -> list[str]:
    """The contradictions in a history, one sentence each."""
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in history:
        if call.ended_s < call.began_s:
            return [f"a clock that goes back: {call}"]
        by_key[call.key].append(call)
    found: list[str] = []
    for key, calls in by_key.items():
        if any(one.kind in {Kind.APPEND, Kind.RESUME} for one in calls):
            if not is_linearizable(calls, may_lose=may_lose_sessions):
                found.append(f"no order of its calls explains session {key}")
        else:
            found += _of_block(calls)
    return found


def _of_block(calls: Sequence[Call]) -> list[str]:
    puts = [one for one in calls if one.kind is Kind.PUT and one.end is not End.FAILED]
    deletions = [one for one in calls if one.kind is Kind.DELETE and one.end is not End.FAILED]
    found = []
    for get in calls:
        if get.kind is not Kind.GET or get.end is not End.DONE:
            continue
        if get.value is None:
            found += _missed(get, puts, deletions)
        else:
            found += _got(get, [one for one in puts if one.value == get.value], deletions)
    return found


def _missed(get: Call, puts: Sequence[Call], deletions: Sequence[Call]) -> list[str]:
    """A miss is a loss if a put ended before the get began, and no deletion can have come after that put."""
    for put in puts:
        if put.until_s < get.began_s and not any(
            one.until_s >= put.began_s and one.began_s <= get.ended_s for one in deletions
        ):
            return [f"lost: {get}, though: {put}"]
    return []


def _got(get: Call, puts: Sequence[Call], deletions: Sequence[Call]) -> list[str]:
    early = [one for one in puts if one.began_s <= get.ended_s]
    if not early:
        return [f"bytes that nobody put: {get}"]
    for deletion in deletions:
        # It was deleted for good if each put of these bytes was over before, or began after the get.
        if deletion.until_s < get.began_s and all(one.until_s < deletion.began_s for one in early):
            return [f"a deletion was undone: {get}, though: {deletion}"]
    return []


def is_linearizable(calls: Iterable[Call], *, may_lose: bool = False) -> bool:
    """Whether some order of a session's calls explains their answers; ValueError if the search takes too long."""
    asked = sorted(
        (one for one in calls if one.end is End.DONE or (one.kind in _CHANGES and one.end is End.UNKNOWN)),
        key=lambda one: one.began_s,
    )
    done = sum(1 << at for at, one in enumerate(asked) if one.end is End.DONE)
    seen: set[tuple[int, tuple[str | None, ...]]] = set()
    todo: list[tuple[int, tuple[str | None, ...]]] = [(0, ())]
    while todo:
        taken, state = todo.pop()
        if taken & done == done:
            return True
        left = [at for at in range(len(asked)) if not taken >> at & 1]
        first_end_s = min(asked[at].until_s for at in left)
        for at in left:
            call = asked[at]
            if call.began_s > first_end_s:
                break  # another one was over before it began
            after = _stepped(call, state)
            if after is None and may_lose:
                after = _stepped(call, ())
            if after is None:
                continue
            step = taken | 1 << at, after
            if step not in seen:
                seen.add(step)
                if len(seen) > SEARCH_STEPS_MAX:
                    raise ValueError("A history of a session that is too long to be judged.")
                todo.append(step)
    return False


def _stepped(call: Call, state: tuple[str | None, ...]) -> tuple[str | None, ...] | None:
    """The state after a call; None if the call's answer contradicts the state before it."""
    if call.kind is Kind.APPEND:
        return (*state, call.value) if call.first in {None, len(state)} else None
    if call.kind is Kind.DELETE:
        return ()
    return state if "/".join(one or "" for one in state) == (call.value or "") else None
