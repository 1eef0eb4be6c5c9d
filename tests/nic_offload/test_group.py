"""Groups: rows that the fabric's thread writes, and callers that wait for them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from nic_offload._core import lib

from nic_offload.fabric import EventKind
from nic_offload.group import Group
from nic_offload.trigger import AckWatch, watch_acks
from tests.nic_offload.rig import PAGE, Pair, after_ms, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.fabric import Event

TAG = 1 << 16
LANDED, WRITTEN, REFUSED = 1, 2, 0x41
WAIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair("net", PAGE) as both:
        yield both


def watched(pair: Pair, count: int, *, deadline_ns: int = 0, is_awaited: bool = False) -> Group:
    """A group of watches for WRITTEN, over the near side's first words."""
    group = Group(pair.near.fabric, TAG, count, is_awaited=is_awaited)
    watch_acks(
        pair.near.fabric,
        [
            AckWatch(
                tag=TAG + i,
                endpoint=pair.near.endpoint,
                word=pair.near.region.address + pair.near.word_offset(i),
                generation=i + 1,
                deadline_ns=deadline_ns,
                final_code=WRITTEN,
                group=group,
                good_max=WRITTEN,
                row=i,
            )
            for i in range(count)
        ],
    )
    return group


def say(pair: Pair, row: int, code: int) -> None:
    pair.near.word(row).store((row + 1) << 8 | code)


def events(pair: Pair) -> list[Event]:
    pair.near.reap()
    return pair.near.events


def test_words_are_noted_and_one_event_reports_the_end(pair: Pair) -> None:
    group = watched(pair, 2)
    before_ns = time.monotonic_ns()
    say(pair, 0, LANDED)
    wait_until(lambda: group.row(0).landed_ns > 0, "the first has landed")
    assert (group.row(0).code, group.row(0).over, group.open_rows) == (LANDED, 0, 2)
    say(pair, 0, WRITTEN)
    say(pair, 1, WRITTEN)
    wait_until(lambda: bool(events(pair)), "the group's end")
    assert [(event.kind, event.tag) for event in events(pair)] == [(EventKind.OVER, TAG)]
    first, second = group.rows()
    assert before_ns < first.landed_ns < first.over_ns
    assert (first.code, first.over, second.code, second.over) == (WRITTEN, 1, WRITTEN, 1)
    assert second.landed_ns == second.over_ns


def test_an_error_word_is_an_event_and_its_reader_ends_the_row(pair: Pair) -> None:
    group = watched(pair, 1)
    say(pair, 0, REFUSED)
    wait_until(lambda: bool(events(pair)), "the word")
    (event,) = events(pair)
    assert (event.kind, event.tag, event.value) == (EventKind.ACKED, TAG, 1 << 8 | REFUSED)
    assert group.row(0) == (0, 0, 0, 0, 0)
    assert not group.wait(1, 0.01)
    group.end(0, 7)
    assert group.wait(1, 0)
    assert (group.row(0).code, group.row(0).over, group.row(0).landed_ns) == (7, 1, 0)
    assert len(events(pair)) == 1, "who ends the last row knows it"


def test_an_ended_row_does_not_change(pair: Pair) -> None:
    group = watched(pair, 1)
    group.end(0, 5)
    say(pair, 0, WRITTEN)
    wait_until(lambda: pair.near.fabric.statistics().watches == 0, "the watch has seen the word")
    group.end(0, 6)
    assert group.row(0) == (0, 0, 0, 5, 1)
    assert group.open_rows == 0


def test_a_watch_that_fails_is_an_event(pair: Pair) -> None:
    group = watched(pair, 1, deadline_ns=after_ms(20))
    wait_until(lambda: bool(events(pair)), "its deadline")
    assert [event.kind for event in events(pair)] == [EventKind.WATCH_FAILED]
    assert group.open_rows == 1


def test_a_waiter_is_woken_and_gets_no_event(pair: Pair) -> None:
    group = watched(pair, 3)
    come: list[bool] = []
    waiting = threading.Thread(target=lambda: come.append(group.wait(3, WAIT_S)))
    waiting.start()
    for row in (2, 0, 1):
        time.sleep(0.02)
        assert not come
        say(pair, row, WRITTEN)
    waiting.join(WAIT_S)
    assert come == [True]
    pair.there.fence()
    assert [event.kind for event in events(pair) if event.tag == TAG] == []


def test_the_first_rows_are_awaited_in_order(pair: Pair) -> None:
    group = watched(pair, 4)
    for row in (1, 2, 3):
        say(pair, row, WRITTEN)
    wait_until(lambda: group.open_rows == 1, "three have come")
    assert not group.wait(1, 0.01)
    assert not group.wait(4, 0.01)
    say(pair, 0, WRITTEN)
    assert group.wait(2, WAIT_S)
    assert group.wait(4, 0)


def test_landed_is_the_first_word_of_all_or_their_end(pair: Pair) -> None:
    group = watched(pair, 3)
    say(pair, 0, LANDED)
    group.end(1)
    assert not group.wait_landed(0.01)
    say(pair, 2, WRITTEN)
    assert group.wait_landed(WAIT_S)
    assert group.open_rows == 1


def test_the_end_of_an_awaited_group_is_not_an_event(pair: Pair) -> None:
    group = watched(pair, 1, is_awaited=True)
    say(pair, 0, WRITTEN)
    wait_until(lambda: group.open_rows == 0, "it is over")
    pair.there.fence()
    assert [event for event in events(pair) if event.tag == TAG] == []


def test_two_threads_wait_for_different_parts(pair: Pair) -> None:
    group = watched(pair, 2)
    order: list[int] = []

    def wait_in_one_piece(first: int) -> None:
        """A wait in C, without the periodic checks of `Group.wait`."""
        if lib.tk_group_wait(group._handle, first, 0, int(WAIT_S * 1e9)):
            order.append(first)

    threads = [threading.Thread(target=wait_in_one_piece, args=(first,)) for first in (2, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # so that it waits
    say(pair, 0, WRITTEN)
    wait_until(lambda: order == [1], "who waits for the first", WAIT_S / 2)
    say(pair, 1, WRITTEN)
    for thread in threads:
        thread.join(WAIT_S)
    assert order == [1, 2]


def test_the_time_a_put_fired_is_noted(pair: Pair) -> None:
    group = Group(pair.near.fabric, TAG, 2)
    flag = pair.flags[0]
    pair.there.arm(*(pair.there.put(i, 8, fires=(flag, i + 1), group=group, row=i) for i in range(2)))
    before_ns = time.monotonic_ns()
    flag.store(1)
    pair.near.final(0)
    first, second = group.rows()
    assert before_ns < first.fired_ns < time.monotonic_ns()
    assert (first.over, second) == (0, (0, 0, 0, 0, 0))


def test_writes_to_a_freed_group_are_safe(pair: Pair) -> None:
    for _ in range(50):
        watched(pair, 4)
        for row in range(4):
            say(pair, row, WRITTEN)
        wait_until(lambda: pair.near.fabric.statistics().watches == 0, "the words were seen")
        for row in range(4):
            pair.near.word(row).store(0)
