"""Puts that end by the node or by their deadline: when leases are returned, and when the link is closed.

The node is played by the test: it puts words into the client's memory. The fabric is a real one.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block
from kvstore.client.link import TAGS_OF_ONE
from kvstore.client.reserved import Reservation
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, FabricError, KvError, LeaseExpired
from kvstore.reach import Reach
from kvstore.wire.ack import AckCode, ack_word
from kvstore.wire.fabric_call import Leased
from nic_offload.fabric import EventKind
from nic_offload.flags import FlagWords
from tests.nic_offload.rig import PAGE, Pair, after_ms, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kvstore.client.link import Link, Operation
    from kvstore.client.puts import ArmedPuts

LENGTH = 1000
GENERATION = 77
ACK = 3  # the word of the near side's last page in which the node acknowledges
LANDING = 1  # the word of the far side's that is the slot's flag


class FakeLink:
    """The part of a link that puts use, over a pair of sides."""

    def __init__(self, pair: Pair) -> None:
        self.error: KvError | None = None
        self.operations: dict[int, Operation] = {}
        self.endpoint = pair.there.endpoint
        self.peer = pair.there.peer
        self.landing_key = pair.there.key
        self.words: list[int] = []
        self._pair = pair

    def word_address(self, word: int) -> int:
        return self._pair.near.region.address + self._pair.near.word_offset(word)

    def give_back_words(self, words: list[int]) -> None:
        self.words += words


class FakeHost:
    """A client without a pump: the test delivers events when it chooses to."""

    def __init__(self, pair: Pair) -> None:
        self.fabric = pair.near.fabric
        self.lock = threading.RLock()
        self.link = FakeLink(pair)
        self.reach = Reach(("127.0.0.1:1",))
        self.lost: list[KvError] = []
        self.given_back: list[Leased] = []
        self._settling: list[Callable[[], None]] = []
        self._tags = itertools.count(TAGS_OF_ONE, TAGS_OF_ONE)

    def next_tags(self) -> int:
        return next(self._tags)

    def abort(
        self, _link: Link, leases: Sequence[Leased], answered: Callable[[Collection[int]], None]
    ) -> threading.Event:
        self.given_back += leases
        self.answered = answered
        over = threading.Event()
        over.set()
        return over

    def settle(self, decide: Callable[[], None]) -> None:
        self._settling.append(decide)

    def lose(self, link: FakeLink, error: KvError) -> None:
        if link.error is None:
            link.error = error
            self.lost.append(error)

    def pump(self) -> list[int]:
        """Deliver the pending events; returns their kinds."""
        told = []
        with self.lock:
            settling, self._settling = self._settling, []
            while events := self.fabric.reap():
                for event in events:
                    operation = self.link.operations.get(event.tag - event.tag % TAGS_OF_ONE)
                    if operation is not None:
                        told.append(event.kind)
                        operation.event(event)
            for decide in settling:
                decide()
        return told


class Armed:
    """One put that is armed."""

    def __init__(self, pair: Pair, deadline_ns: int) -> None:
        self.pair = pair
        self.host = FakeHost(pair)
        self.flags = FlagWords.create(1)
        there = pair.there
        lease = Leased(0, False, GENERATION, there.base, there.word_target(LANDING))
        block = Block(bytes(32), pair.near.region, 0, LENGTH)
        host: Any = self.host
        self.puts: ArmedPuts = Reservation(
            host, host.link, [block], [lease], [ACK], Durability.WRITTEN, deadline_ns
        ).arm(self.flags[0])

    def says(self, code: AckCode) -> None:
        self.pair.near.word(ACK).store(ack_word(GENERATION, code))

    def pump_until_over(self) -> KvError | None:
        wait_until(lambda: bool(self.host.pump()) or self.puts.has_ended, "the put is over")
        wait_until(lambda: self.host.pump() == [] and self.puts.has_ended, "the put is over")
        (result,) = self.puts.wait(0)
        return result.error


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair("net", PAGE) as both:
        yield both


def test_a_lease_whose_put_was_sent_is_not_returned(pair: Pair) -> None:
    """Its bytes may still be on their way to the slot; only ending the link makes sure that none arrive."""
    armed = Armed(pair, after_ms(60_000))
    armed.flags[0].store(1)
    wait_until(lambda: pair.far.word(LANDING).load() == GENERATION, "it has landed")
    armed.says(AckCode.LEASE_EXPIRED)
    assert isinstance(armed.pump_until_over(), LeaseExpired)
    assert armed.host.given_back == []
    assert [type(error) for error in armed.host.lost] == [LeaseExpired]


def test_a_lease_that_the_node_ended_before_its_put_was_sent_is_returned(pair: Pair) -> None:
    armed = Armed(pair, after_ms(60_000))
    armed.says(AckCode.LEASE_EXPIRED)
    assert isinstance(armed.pump_until_over(), DeadlineExceeded)
    assert [lease.generation for lease in armed.host.given_back] == [GENERATION]
    assert armed.host.lost == []
    armed.flags[0].store(1)
    pair.there.fence()
    assert pair.far.word(LANDING).load() == 0, "it went out after its lease was given back"


def test_a_put_that_expires_on_both_sides_at_once_does_not_end_the_link(pair: Pair) -> None:
    """The client was not scheduled for so long that it processes both at once, the node's word first."""
    armed = Armed(pair, after_ms(300))
    armed.says(AckCode.LEASE_EXPIRED)
    wait_until(lambda: pair.near.fabric.statistics().expired == 1, "its own deadline is over too")
    assert armed.host.pump()[0] == EventKind.ACKED
    assert isinstance(armed.pump_until_over(), DeadlineExceeded)
    assert [lease.generation for lease in armed.host.given_back] == [GENERATION]
    assert armed.host.lost == []


def test_a_put_that_failed_before_it_was_abandoned_does_not_end_the_link(pair: Pair) -> None:
    """The put has ended, but its end has not been reported yet."""
    armed = Armed(pair, after_ms(100))
    wait_until(lambda: pair.near.fabric.statistics().expired == 1, "its deadline is over")
    host = armed.host
    abandoning = threading.Thread(target=armed.puts.abandon)
    abandoning.start()
    wait_until(lambda: bool(host._settling or host.lost), "it asks for what is to be told")
    armed.pump_until_over()
    abandoning.join(20)
    assert armed.host.lost == []
    assert [lease.generation for lease in armed.host.given_back] == [GENERATION]


def test_a_batch_that_could_not_be_armed_leaves_nothing_behind(pair: Pair) -> None:
    """Its acknowledgements were once awaited, and ended the link when they did not arrive."""
    host: Any = FakeHost(pair)
    there = pair.there
    lease = Leased(0, False, GENERATION, there.base, there.word_target(LANDING))
    block = Block(bytes(32), pair.near.region, 0, LENGTH)
    reservation = Reservation(
        host, host.link, [block], [lease], [ACK], Durability.WRITTEN, time.monotonic_ns() + 10**9
    )
    object.__setattr__(block, "offset", PAGE * 16)  # as if its region had been closed meanwhile
    with FlagWords.create(1) as flags, pytest.raises(FabricError):
        reservation.arm(flags[0])
    assert host.link.operations == {}
    host.answered([])
    assert host.link.words == [ACK]
    assert [one.generation for one in host.given_back] == [GENERATION]
    wait_until(lambda: pair.near.fabric.statistics().watches == 0, "nothing is waited for")


def test_the_word_of_a_returned_lease_is_free_once_the_node_has_it(pair: Pair) -> None:
    armed = Armed(pair, after_ms(20))
    assert isinstance(armed.pump_until_over(), DeadlineExceeded)
    assert armed.host.link.words == [], "the lease may end at the node just now"
    armed.host.answered([])
    assert armed.host.link.words == [ACK]


def test_a_word_in_flight_is_awaited_before_it_is_reused(pair: Pair) -> None:
    """It once overwrote the acknowledgement of a get that used the word by then, which was never seen."""
    armed = Armed(pair, after_ms(20))
    assert isinstance(armed.pump_until_over(), DeadlineExceeded)
    armed.host.answered([GENERATION])
    pair.near.fabric.cancel([0])  # when it returns, the watch stands
    assert armed.host.pump() == []
    assert armed.host.link.words == []
    armed.says(AckCode.LEASE_EXPIRED)
    wait_until(lambda: bool(armed.host.pump()), "the word")
    assert armed.host.link.words == [ACK]
    assert armed.host.link.operations == {}
