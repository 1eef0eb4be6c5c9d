"""A node that is away costs the first call its deadline, and the next ones nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit
from kvstore.client.breaker import Breaker
from kvstore.client.link import Link
from kvstore.errors import DeadlineExceeded, NodeUnavailable, Overloaded
from kvstore.limits import BREAKER_LATE_MS, BREAKER_MS_MAX, BREAKER_MS_MIN
from kvstore.miss import Miss, MissReason
from tests.client.test_promises import put
from tests.conftest import small_client
from tests.node.test_tenants import HeldClock
from tests.stopping import stop

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess
    from tests.conftest import ClientWithBuffers

WAIT_S = 20.0
AWAY = NodeUnavailable("Nobody there.")


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def breaker(clock: HeldClock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, error: Exception = AWAY) -> None:
    with pytest.raises(type(error)), breaker.call():
        raise error


def be_late(breaker: Breaker, clock: HeldClock, ms: int) -> None:
    """A call that misses its deadline."""

    def wait() -> None:
        pass_ms(clock, ms)
        raise DeadlineExceeded("Too late.")

    with pytest.raises(DeadlineExceeded), breaker.call():
        wait()


def pass_ms(clock: HeldClock, ms: int) -> None:
    clock.now_ns += ms * 1_000_000


def test_the_pause_doubles_up_to_its_maximum_and_ends_with_a_success(
    breaker: Breaker, clock: HeldClock
) -> None:
    pause_ms = BREAKER_MS_MIN
    for _ in range(12):
        fail(breaker)
        pass_ms(clock, pause_ms - 1)
        with pytest.raises(NodeUnavailable, match=r"next attempt is in 1 ms\. Nobody there"), breaker.call():
            pytest.fail("a call that is refused is not made")
        pass_ms(clock, 1)
        assert not breaker.is_open
        pause_ms = min(2 * pause_ms, BREAKER_MS_MAX)
    assert pause_ms == BREAKER_MS_MAX
    with breaker.call():
        pass
    fail(breaker)
    pass_ms(clock, BREAKER_MS_MIN)
    assert not breaker.is_open


def test_only_one_call_is_let_through_as_a_probe(breaker: Breaker, clock: HeldClock) -> None:
    fail(breaker)
    pass_ms(clock, BREAKER_MS_MIN)
    with breaker.call():
        assert breaker.is_open
    assert not breaker.is_open


def test_a_refusal_shows_that_the_node_is_reachable(breaker: Breaker, clock: HeldClock) -> None:
    fail(breaker, Overloaded("full"))
    assert not breaker.is_open
    fail(breaker, DeadlineExceeded("late"))
    pass_ms(clock, BREAKER_MS_MIN)
    fail(breaker, Overloaded("full"))
    assert not breaker.is_open


def test_concurrent_calls_that_fail_count_as_one_failure(breaker: Breaker, clock: HeldClock) -> None:
    for _ in range(5):
        breaker.failed(AWAY)
    pass_ms(clock, BREAKER_MS_MIN)
    assert not breaker.is_open


def test_other_exceptions_do_not_mark_a_node_as_silent(breaker: Breaker, clock: HeldClock) -> None:
    fail(breaker)
    pass_ms(clock, BREAKER_MS_MIN)
    fail(breaker, KeyError("a bug"))
    assert not breaker.is_open


def test_a_stopped_node_costs_one_deadline_and_then_fails_fast(
    node: NodeProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "_open_direct", lambda *_: None)  # else a block in its memory is still read
    block = rig.block(0)
    put(rig, [block])
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    stop(node.pid)
    try:
        (miss,) = rig.client.get([rig.wanted(block)], timeout_s=0.5)
        assert isinstance(miss, Miss)
        began = time.monotonic()
        for _ in range(200):
            (miss,) = rig.client.get([rig.wanted(block)], timeout_s=0.5)
            assert isinstance(miss, Miss)
            assert miss.reason is MissReason.NODE_AWAY
        # Two hundred deadlines would be a hundred seconds; tries cost half a second each, at most one in each pause.
        assert time.monotonic() - began < 50
    finally:
        os.kill(node.pid, signal.SIGCONT)
    rig.client.status(wait_s=WAIT_S)
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]


def test_a_node_that_was_never_reachable_is_not_called_each_time() -> None:
    with small_client("127.0.0.1:1") as client:
        kv = client.register(bytearray(4096))
        for _ in range(100):
            (miss,) = client.get([Block(bytes(32), kv, 0, 4096)], timeout_s=5)
            assert isinstance(miss, Miss)
        assert client.calls < 20
        with pytest.raises(NodeUnavailable, match="next attempt is in"):
            client.put_inline(bytes(32), b"x")


def test_a_callers_own_short_deadlines_do_not_open_the_breaker(breaker: Breaker, clock: HeldClock) -> None:
    for _ in range(100):  # answered between them, however seldom
        for _ in range(4):
            be_late(breaker, clock, BREAKER_LATE_MS // 5)
        with breaker.call():
            pass
    assert not breaker.is_open


def test_a_node_that_answers_no_call_for_a_while_counts_as_away(breaker: Breaker, clock: HeldClock) -> None:
    for calls in range(1, 6):
        assert not breaker.is_open
        be_late(breaker, clock, BREAKER_LATE_MS // 5)
        assert breaker.is_open == (calls == 5)
    with pytest.raises(NodeUnavailable, match="next attempt"), breaker.call():
        pytest.fail("it is not made")


def test_one_long_wait_is_enough(breaker: Breaker, clock: HeldClock) -> None:
    be_late(breaker, clock, BREAKER_LATE_MS)
    assert breaker.is_open


def test_short_get_deadlines_on_many_threads_do_not_fail_an_armed_put(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More gets at a time than there are places for calls over the fabric, so that some go over gRPC."""
    for module in ("core", "gets"):  # the node confirms each, however busy this machine is
        monkeypatch.setattr(f"kvstore.client.{module}.FETCH_CANCEL_MS", int(WAIT_S) * 1000)
    stored, armed = rig.block(0, 1 << 16), rig.block(1, 1 << 16)
    put(rig, [stored])
    puts = rig.client.reserve([armed]).arm(rig.flags[0])
    link = rig.client._core.link
    until_s = time.monotonic() + 1.0

    def hurry() -> None:
        wanted = rig.wanted(stored)
        while time.monotonic() < until_s and rig.client._core.link is link:
            rig.client.get([wanted], timeout_s=0.002)

    threads = [threading.Thread(target=hurry) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.client._core.link is link, link and link.error
    rig.flags[0].store(2)
    assert [result.error for result in puts.wait(WAIT_S)] == [None]


def test_short_deadlines_far_apart_do_not_open_the_breaker(breaker: Breaker, clock: HeldClock) -> None:
    for _ in range(4):
        be_late(breaker, clock, BREAKER_LATE_MS // 5)
        assert not breaker.is_open
        pass_ms(clock, 60_000)
    be_late(breaker, clock, BREAKER_LATE_MS // 5)
    assert breaker.is_open, "it was waited for long enough in all"


def test_calls_that_wait_at_the_same_time_count_as_one_wait(breaker: Breaker, clock: HeldClock) -> None:
    with pytest.raises(DeadlineExceeded), breaker.call():  # noqa: PT012 - the other call is within this one
        be_late(breaker, clock, BREAKER_LATE_MS * 3 // 5)
        raise DeadlineExceeded("Too late as well.")
    assert not breaker.is_open
