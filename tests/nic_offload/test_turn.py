"""Callers that wait run the fabric's rounds themselves, and the progress thread whenever none does."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from typing import TYPE_CHECKING

import pytest
from nic_offload._core import lib

from nic_offload.group import Group
from nic_offload.trigger import AckWatch, watch_acks
from tests.nic_offload.rig import PAGE, Pair, happens_more_often, wait_until
from tests.nic_offload.test_processes import run_forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TAG = 1 << 16
WRITTEN = 2
WAIT_S = 20.0
SOON_S = WAIT_S / 2
CALL_S = 2
TRIES = 15


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair("net", PAGE) as both:
        yield both


def watched(pair: Pair, word: int) -> Group:
    """A group of one watch, which ends when this word is stored."""
    group = Group(pair.near.fabric, TAG + word, 1, is_awaited=True)
    watch_acks(
        pair.near.fabric,
        [
            AckWatch(
                tag=TAG + word,
                endpoint=pair.near.endpoint,
                word=pair.near.region.address + pair.near.word_offset(word),
                generation=1,
                deadline_ns=0,
                final_code=WRITTEN,
                group=group,
                good_max=WRITTEN,
            )
        ],
    )
    return group


def say(pair: Pair, word: int) -> None:
    pair.near.word(word).store(1 << 8 | WRITTEN)


def turns(pair: Pair) -> int:
    return pair.near.fabric.statistics().turns


class Waiting:
    """A thread that waits for a group in calls of the C core; `Group.wait` has shorter ones.

    On a busy machine a call may wait without the turn: then the next one asks for it again.
    """

    def __init__(self, group: Group, seconds: float = WAIT_S) -> None:
        self._group, self._seconds = group, seconds
        self.come: bool | None = None
        self.took_s = 0.0
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        began = time.monotonic()
        self.come = False
        while not self.come and (left_s := began + self._seconds - time.monotonic()) > 0:
            slice_ns = int(min(left_s, CALL_S) * 1e9)
            self.come = bool(lib.tk_group_wait(self._group._handle, 1, 0, slice_ns))
        self.took_s = time.monotonic() - began

    def ended(self) -> bool:
        """Whether the awaited event came; the thread must end soon."""
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        assert self.come is not None
        return self.come


def until_the_thread_sleeps(pair: Pair) -> None:
    slept = pair.near.fabric.statistics().sleeps
    wait_until(lambda: pair.near.fabric.statistics().sleeps > slept + 1, "the thread sleeps")


def with_the_turn(pair: Pair, group: Group, seconds: float = WAIT_S) -> Waiting:
    """One that runs the rounds.

    It is given the turn while the thread sleeps. A thread that was just woken and gets no core doesn't pass it in time.
    """
    before = turns(pair)
    until_the_thread_sleeps(pair)
    waiting = Waiting(group, seconds)
    wait_until(lambda: turns(pair) > before, "it has the turn")
    return waiting


def running(pair: Pair, word: int = 0, seconds: float = WAIT_S) -> Waiting:
    return with_the_turn(pair, watched(pair, word), seconds)


def test_a_caller_runs_the_rounds_while_it_waits(pair: Pair) -> None:
    for word in range(5):
        waiting = running(pair, word)
        say(pair, word)
        assert waiting.ended()
    before = turns(pair)
    assert not watched(pair, 5).wait(1, 0)
    assert turns(pair) == before, "a caller that doesn't wait"


def test_work_queued_by_others_is_done_in_the_rounds_of_a_caller(pair: Pair) -> None:
    waiting = running(pair)
    pair.near.fill(0, b"from another")
    pair.there.arm(pair.there.put(7, 12))
    pair.near.final(7)
    say(pair, 0)
    assert waiting.ended()


def test_a_second_caller_is_notified_by_the_first_ones_rounds_and_by_the_thread_after_them(
    pair: Pair,
) -> None:
    first = running(pair, 0)
    second, third = Waiting(watched(pair, 1)), Waiting(watched(pair, 2))
    time.sleep(0.05)  # so that they wait
    say(pair, 1)
    assert second.ended()
    say(pair, 0)
    assert first.ended()
    say(pair, 2)
    assert third.ended()


def test_a_caller_stays_no_longer_than_its_deadline(pair: Pair) -> None:
    waiting = running(pair, 0, 0.3)
    assert not waiting.ended()
    assert 0.3 <= waiting.took_s < 0.3 + SOON_S
    say(pair, 0)
    wait_until(lambda: pair.near.fabric.statistics().watches == 0, "the thread goes on")


def test_a_row_ended_by_another_thread_wakes_the_caller(pair: Pair) -> None:
    """By itself it would wake every 20 ms: a quarter of the rows would end within 5 ms."""
    words = itertools.count()

    def is_soon() -> bool:
        group = watched(pair, next(words))
        waiting = with_the_turn(pair, group)
        until_the_thread_sleeps(pair)
        began = time.monotonic()
        group.end(0, 7)
        assert waiting.ended()
        return time.monotonic() - began < 0.005

    assert happens_more_often(is_soon, 1 / 4)


def test_commands_belong_to_the_thread_and_do_not_wait_for_a_caller(pair: Pair) -> None:
    waiting = running(pair)
    began = time.monotonic()
    for _ in range(3):
        pair.near.fabric.flush()
    assert time.monotonic() - began < SOON_S
    say(pair, 0)
    assert waiting.ended()


def test_work_queued_after_a_caller_left_does_not_wait_for_the_threads_next_wake(
    pair: Pair,
) -> None:
    """By itself it would wake every 20 ms: a tenth would be posted within 2 ms."""
    group, tags = watched(pair, 0), itertools.count()

    def is_soon() -> bool:
        time.sleep(0.03)  # until it sleeps for 20 ms at a time
        assert not group.wait(1, 0.0003)
        tag, began_ns = next(tags), time.monotonic_ns()
        pair.there.arm(pair.there.put(tag, 8))
        return pair.near.final(tag).value - began_ns < 2_000_000  # until it was posted

    assert happens_more_often(is_soon, 1 / 10)


def test_a_caller_that_need_not_wait_sends_what_was_posted_meanwhile(pair: Pair) -> None:
    """So the peer is busy with one put while its caller arms the next."""
    ended, other, tags = watched(pair, 0), watched(pair, 1), itertools.count()
    waiting = with_the_turn(pair, ended)
    say(pair, 0)
    assert waiting.ended()

    def is_sent_by_the_caller() -> bool:
        assert not other.wait(1, 0.0003)  # for a moment the thread leaves the rounds to callers
        before, tag = turns(pair), next(tags)
        pair.there.arm(pair.there.put(tag, 8))
        assert ended.wait(1, WAIT_S)
        ran = turns(pair) > before
        pair.near.final(tag)
        return ran

    assert happens_more_often(is_sent_by_the_caller, 0)
    before = turns(pair)
    for _ in range(TRIES):  # it is woken now and then
        until_the_thread_sleeps(pair)
        assert ended.wait(1, WAIT_S)
    assert turns(pair) == before, "there was nothing to send"


def test_a_flag_stored_right_after_a_caller_left_fires_soon(pair: Pair) -> None:
    took_ns = []
    for tag in range(TRIES):
        group = Group(pair.near.fabric, TAG + 1, 1)
        armed = pair.there.put(tag, 8, fires=(pair.flags[0], tag + 1), group=group, row=0)
        waiting = running(pair, tag)
        pair.there.arm(armed)
        say(pair, tag)
        assert waiting.ended()
        stored_ns = time.monotonic_ns()
        pair.flags[0].store(tag + 1)
        pair.near.final(tag)
        took_ns.append(group.row(0).fired_ns - stored_ns)
    assert statistics.median(took_ns) < 50_000_000


def test_a_fabric_is_closed_under_a_caller_that_runs_its_rounds() -> None:
    with Pair("net", PAGE) as pair:
        waiting = running(pair, 0, 1.0)
        began = time.monotonic()
        pair.near.fabric.close()
        assert time.monotonic() - began < SOON_S
        assert not waiting.ended()


def test_a_forked_child_is_refused_what_it_would_wait_for(pair: Pair) -> None:
    """At once, because a thread that the child doesn't have may hold the locks of the group and of the turn."""
    group = watched(pair, 0)
    actions: list[Callable[[], object]] = [
        lambda: group.wait(1, 0.05),
        lambda: group.wait_landed(0.05),
        lambda: group.open_rows,
        lambda: group.row(0),
        lambda: group.land(0, 1),
        lambda: group.end(0),
    ]
    assert [run_forked(action) for action in actions] == [0] * len(actions)
