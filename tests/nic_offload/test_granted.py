"""Puts by grants: the sender on one side, the receiver on the other, and peers that break the rules.

Where a peer is played heads are packed from what `proto/kvstore/v1/kvstore.proto` says of them, and by no code of ours.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
from array import array
from operator import attrgetter
from typing import TYPE_CHECKING

import pytest

from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError
from nic_offload.group import Group
from nic_offload.receiver import Receiver, Room, packed_rooms
from nic_offload.sender import METADATA_BYTES_MAX, Area, Sender, name_put, put, put_row
from nic_offload.shelf import Shelf, Shelved
from nic_offload.sockaddr import SocketAddress, ip_of
from nic_offload.trigger import TriggeredNotify, arm
from tests.nic_offload.rig import PAGE, WAIT_S, Pair, after_ms, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nic_offload.receiver import Came, State

PROVIDERS = ("net", "tcp;ofi_rxm", "shm", "sockets")
MIB = 1 << 20
LENGTH_MAX = 600 << 10
SLOTS = 4
SLOT = PAGE + LENGTH_MAX
ROOMS = PAGE + SLOTS * SLOT  # in the far memory, behind flags and slots
HEADS = 0  # in the near memory
DATA = SLOTS * PAGE
OWNER, FINGERPRINT = b"o" * 16, b"f" * 16
FIRST, FIRST_ACK = 1 << 40, 1 << 20
LANDED, WRITTEN = 1, 2
DIFFERS, TAKEN, EXPIRED, UNSAID = 0x47, 0x45, 0x46, 0x48
SHARED = b"shared by tenant"
RECEIVER = 77
WORDS = 64


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class GrantRig:
    """The near side is a client, the far side its node."""

    def __init__(self, pair: Pair, unsaid_code: int = 0) -> None:
        self.pair = pair
        self.shelf = Shelf(pair.far.fabric, pair.far.region)
        here = pair.far.region.address
        self.receiver = Receiver(
            pair.far.fabric,
            self.shelf,
            pair.far.endpoint,
            RECEIVER,
            pair.back.peer,
            Area(here, here + PAGE, SLOT, 0, SLOTS, FIRST),
            LENGTH_MAX,
            OWNER,
            (pair.back.word_target(0), pair.back.key, WORDS),
            (LANDED, DIFFERS, TAKEN, EXPIRED, WRITTEN),
            (pair.there.base, pair.there.key),
            SHARED,
            unsaid_code,
        )
        there = pair.there
        self.sender = Sender(
            pair.near.endpoint,
            pair.near.region,
            there.peer,
            Area(there.base, there.base + PAGE, SLOT, there.key, SLOTS, FIRST),
            pair.near.word(0).address,
            WORDS,
            0,
            pair.near.region.address + HEADS,
            FIRST_ACK,
            10_000_000_000,
            3,
        )
        self.came: list[Came] = []
        self.lanes: list[Callable[[], list[Came]]] = []  # each returns what a lane has that is new
        self._rooms = 0
        self._tags = itertools.count(1 << 20, 1 << 10)
        pair.near.fill(DATA, os.urandom(MIB))

    def feed(self, count: int, pages: int = 1 + LENGTH_MAX // PAGE) -> None:
        base, rooms = self.pair.far.region.address + ROOMS, []
        for _ in range(count):
            rooms.append(Room(base + self._rooms, pages, self._rooms))
            self._rooms += pages * PAGE
        assert ROOMS + self._rooms <= self.pair.far.length
        self.receiver.feed(packed_rooms(rooms))

    def put(
        self,
        numbers: list[int],
        length: int = 5000,
        *,
        durability: int = LANDED,
        expires_unix_ms: int = 0,
        metadata: bytes = b"",
        deadline_ns: int = 0,
        threshold: int = 0,
        domains: tuple[bytes, ...] = (),
    ) -> tuple[int, Group]:
        """Put pieces of our data, each from an offset of its own; with a threshold when word 100 reaches it."""
        near, tag = self.pair.near, next(self._tags)
        rows = [
            put_row(
                near.region,
                near.region.address + DATA + number * 64,
                length,
                threshold,
                key_of(number),
                domains[i] if domains else b"",
            )
            for i, number in enumerate(numbers)
        ]
        group = put(
            near.fabric,
            self.sender,
            tag,
            rows,
            near.counter(near.word(100)) if threshold else None,
            FINGERPRINT,
            durability,
            expires_unix_ms=expires_unix_ms,
            deadline_ns=deadline_ns,
            metadata=(metadata, b""),
        )
        return tag, group

    def data(self, number: int, length: int) -> bytes:
        return self.pair.near.bytes_at(DATA + number * 64, length)

    def take(self, *, every: bool = True) -> State:
        came, state = self.receiver.take(every=every)
        self.came += itertools.chain(came, *(new() for new in self.lanes))
        self.came.sort(key=attrgetter("id"))
        return state

    def wait_came(self, count: int, *, every: bool = True) -> None:
        def enough() -> bool:
            self.take(every=every)
            return len(self.came) >= count

        wait_until(enough, f"{count} blocks")

    def payload(self, came: Came) -> bytes:
        return self.pair.far.bytes_at(came.address + PAGE - self.pair.far.region.address, came.length)

    def codes(self, group: Group, count: int) -> list[int]:
        assert group.wait(count, WAIT_S)
        return [row.code for row in group.rows()]

    def refusal(self, tag: int) -> int:
        """The error code that the node sent for a put."""
        near = self.pair.near
        near.wait(lambda: bool(near.of(tag + 1)), "an answer")
        (event,) = near.of(tag + 1)
        return event.value & 0xFF

    # --- a peer of its own making

    def forge(self, slot: int, head: bytes, payload: bytes = b"", *, flag: int = FIRST) -> None:
        """Write a put as a malicious peer may: bytes up to the end of the head, then the flag."""
        pair, at, tag = self.pair, DATA + MIB, next(self._tags)
        data = head + payload
        pair.near.fill(at, data)
        target = PAGE + slot * SLOT + PAGE - len(head)
        pair.there.arm(pair.there.put(tag, len(data), source=at, target=target))
        pair.near.final(tag)
        self.flag(slot, flag)

    def flag(self, slot: int, value: int) -> None:
        near, there, tag = self.pair.near, self.pair.there, next(self._tags)
        target = there.base + slot * 8
        arm(near.fabric, [TriggeredNotify(tag, near.endpoint, there.peer, target, there.key, value)])
        near.final(tag)


def head_of(
    payload: bytes,
    *,
    generation: int = FIRST,
    ack_generation: int = 9,
    ack_word: int = 3,
    length: int | None = None,
    metadata: bytes = b"",
    metadata_bytes: int | None = None,
    flags: int = 1,
    durability: int = LANDED,
    payload_crc: int | None = None,
    head_crc: int | None = None,
) -> bytes:
    """Metadata and head, as specified in the proto file."""
    rest = struct.pack(
        "<IQQQIIIBB2x32s16s32x",
        len(metadata) if metadata_bytes is None else metadata_bytes,
        generation,
        ack_generation,
        0,
        ack_word,
        len(payload) if length is None else length,
        crc32c(payload) if payload_crc is None else payload_crc,
        flags,
        durability,
        key_of(1),
        FINGERPRINT,
    )
    summed = crc32c(metadata + rest) if head_crc is None else head_crc
    return metadata + struct.pack("<I", summed) + rest


def open_rig(provider: str) -> Iterator[GrantRig]:
    with Pair(provider, 32 * MIB) as pair:
        pair.there.fence()
        yield GrantRig(pair)


@pytest.fixture(params=PROVIDERS)
def rig(request: pytest.FixtureRequest) -> Iterator[GrantRig]:
    yield from open_rig(request.param)


@pytest.fixture
def net() -> Iterator[GrantRig]:
    yield from open_rig("net")


@pytest.mark.parametrize("length", [1, 4096, 5000, 16_384, 100_001, LENGTH_MAX])
def test_a_block_arrives_complete_with_its_metadata(rig: GrantRig, length: int) -> None:
    rig.feed(1)
    _, group = rig.put([7], length, durability=LANDED, metadata=b"who wants it")
    assert rig.codes(group, 1) == [LANDED]
    rig.wait_came(1)
    (came,) = rig.came
    assert (came.key, came.fingerprint, came.length) == (key_of(7), FINGERPRINT, length)
    assert (came.durability, came.ack_word, came.ack_generation, came.listed) == (LANDED, 0, FIRST_ACK, 1)
    assert rig.payload(came) == rig.data(7, length)
    assert came.crc32c == crc32c(rig.data(7, length))
    far, start = rig.pair.far, came.address - rig.pair.far.region.address
    assert came.metadata_bytes == 16
    assert far.bytes_at(start + PAGE - 128 - 16, 16) == b"who wants it\0\0\0\0"
    assert len(rig.shelf) == 1


@pytest.mark.parametrize("length", [1, 16_385, LENGTH_MAX])
def test_nothing_of_a_block_stays_in_its_slot(rig: GrantRig, length: int) -> None:
    """The slot is its peer's again from the answer on, so nobody else could overwrite it later, for an erasure."""
    rig.feed(1)
    _, group = rig.put([7], length)
    assert rig.codes(group, 1) == [LANDED]
    payloads = [rig.pair.far.bytes_at(PAGE + slot * SLOT + PAGE, LENGTH_MAX) for slot in range(SLOTS)]
    assert payloads == [bytes(LENGTH_MAX)] * SLOTS


def test_more_puts_than_slots_take_turns(rig: GrantRig) -> None:
    rig.feed(40, pages=3)
    numbers = list(range(40))
    _, group = rig.put(numbers)
    assert rig.codes(group, 40) == [LANDED] * 40
    rig.wait_came(40)
    assert sorted(came.key for came in rig.came) == sorted(map(key_of, numbers))
    for came in rig.came:
        assert rig.payload(came) == rig.data(int.from_bytes(came.key, "little"), 5000)


def test_writes_into_a_slot_after_its_flag_have_no_effect(net: GrantRig) -> None:
    net.feed(1)
    _, group = net.put([3])
    assert net.codes(group, 1) == [LANDED]
    net.wait_came(1)
    net.pair.far.fill(PAGE, b"\xff" * SLOTS * SLOT)
    assert net.payload(net.came[0]) == net.data(3, 5000)


def test_bytes_other_than_those_sent_are_refused(net: GrantRig) -> None:
    net.feed(2, pages=4)
    payload = os.urandom(9000)
    net.forge(1, head_of(payload, payload_crc=crc32c(payload) ^ 1), payload)
    word = net.pair.near.word(3)
    wait_until(lambda: word.load() == 9 << 8 | DIFFERS, "the answer")
    state = net.take()
    assert (net.came, state.differed, state.rooms, len(net.shelf)) == ([], 1, 2, 0)
    net.forge(1, head_of(payload, generation=FIRST + 1, ack_generation=10), payload, flag=FIRST + 1)
    wait_until(lambda: word.load() == 10 << 8 | LANDED, "the slot serves again")
    net.wait_came(1)
    assert net.payload(net.came[0]) == payload


@pytest.mark.parametrize("durability", [LANDED, WRITTEN])
@pytest.mark.parametrize("is_needed", [True, False])
def test_a_put_without_a_domain_is_refused_where_one_is_needed(durability: int, *, is_needed: bool) -> None:
    """For any requested acknowledgement; `shared` is the owner's own domain, which lanes know as zeros."""
    with Pair("net", 32 * MIB) as pair:
        pair.there.fence()
        rig = GrantRig(pair, UNSAID if is_needed else 0)
        rig.feed(4)
        domains = (b"a user's domain!", SHARED, b"")
        tag, group = rig.put([1, 2, 3], durability=durability, domains=domains)
        if is_needed:
            assert rig.refusal(tag + 4) == UNSAID
        rig.wait_came(2 if is_needed else 3)
        if durability == LANDED and not is_needed:
            assert rig.codes(group, 3) == [LANDED] * 3
        assert len(rig.receiver.rooms()) == 4 - len(rig.came), "the refused one's room is free"
        stored = {came.key: came.domain for came in rig.came}
        wanted = {key_of(1): domains[0], key_of(2): bytes(16)} | ({} if is_needed else {key_of(3): bytes(16)})
        assert stored == wanted
        assert len(rig.shelf) == len(wanted)


def test_a_flag_without_its_bytes_is_not_a_put(net: GrantRig) -> None:
    """As with a NIC that fires on errors: the header in the slot is not of this generation."""
    net.feed(1)
    net.flag(0, FIRST)
    wait_until(lambda: net.take().broken == -errno.EPROTO, "the end")
    assert net.came == []


@pytest.mark.parametrize(
    "slip",
    [
        {"generation": FIRST + 1},
        {"generation": FIRST - 1},
        {"length": 0},
        {"length": LENGTH_MAX + 1},
        {"length": 0xFFFFFFFF},
        {"metadata_bytes": 4},
        {"metadata_bytes": METADATA_BYTES_MAX + 8},
        {"metadata_bytes": 0xFFFFFFF8},
        {"ack_word": WORDS},
        {"ack_generation": 0},
        {"ack_generation": 1 << 56},
        {"durability": 0},
        {"flags": 3},
        {"head_crc": 5},
    ],
    ids=str,
)
def test_an_invalid_put_ends_the_receiver_without_an_acknowledgement(
    net: GrantRig, slip: dict[str, int]
) -> None:
    net.feed(1)
    payload = os.urandom(500)
    net.forge(2, head_of(payload, **slip), payload)  # type: ignore[arg-type]
    wait_until(lambda: net.take().broken == -errno.EPROTO, "the end")
    assert net.receiver.rooms() == [0], "its room is unused"
    net.forge(0, head_of(payload), payload)
    time.sleep(0.05)
    assert net.take().broken == -errno.EPROTO
    assert (net.came, len(net.shelf), net.pair.near.word(3).load()) == ([], 0, 0)


def test_without_a_room_a_put_waits_and_is_reported_once(net: GrantRig) -> None:
    _, group = net.put([1, 2])
    net.pair.far.wait(lambda: len(net.pair.far.of(RECEIVER)) == 1, "somebody is asked for room")
    assert not group.wait(1, 0.05)
    state = net.take()
    assert (state.wanted_pages, state.rooms, state.starved) == (3, 0, 1)
    assert not group.wait(1, 0.05)
    assert len(net.pair.far.of(RECEIVER)) == 1, "once, until it is fed"
    assert net.take().starved
    net.feed(2, pages=3)
    assert not net.take().starved
    assert net.codes(group, 2) == [LANDED] * 2
    net.wait_came(2)
    assert [net.payload(came) for came in net.came] == [net.data(1, 5000), net.data(2, 5000)]


def test_a_room_of_the_right_size_is_taken_before_a_larger_one(net: GrantRig) -> None:
    net.feed(1, pages=9)
    net.feed(1, pages=3)
    net.feed(1, pages=5)
    for number in (1, 2):
        _, group = net.put([number])
        assert net.codes(group, 1) == [LANDED]
    net.wait_came(2)
    assert [came.room // PAGE for came in net.came] == [9, 12]


def test_a_put_cancelled_before_it_fired_uses_no_slot(net: GrantRig) -> None:
    net.feed(8, pages=3)
    near = net.pair.near
    tag, group = net.put(list(range(50)), threshold=5)
    assert near.fabric.cancel([tag + 2 * i for i in range(50)]) == 50
    near.all_final([tag + 2 * i for i in range(50)])
    assert {near.finals()[tag + 2 * i].status for i in range(50)} == {-errno.ECANCELED}
    assert group.open_rows == 50, "their rows are for their owner to end"
    _, group = net.put(list(range(8)))
    assert net.codes(group, 8) == [LANDED] * 8


def test_a_deadline_ends_waiting_for_a_flag_or_for_a_slot(net: GrantRig) -> None:
    near = net.pair.near
    tag, _ = net.put(list(range(3)), threshold=1000, deadline_ns=after_ms(30))
    assert near.final(tag + 4).status == -errno.ETIMEDOUT
    # Without rooms four fill the slots, and the others wait for these.
    tag, group = net.put(list(range(10)), deadline_ns=after_ms(100))
    ended = near.all_final([tag + 2 * i for i in range(4, 10)])
    assert {ended[tag + 2 * i].status for i in range(4, 10)} == {-errno.ETIMEDOUT}
    net.feed(8, pages=3)
    wait_until(lambda: [row.code for row in group.rows()][:4] == [LANDED] * 4, "what had gone out")
    _, group = net.put(list(range(20, 24)))
    assert net.codes(group, 4) == [LANDED] * 4


@pytest.mark.parametrize(
    "rig", PROVIDERS[:-1], indirect=True
)  # sockets (1.17) loses the end of a first burst at times
def test_closing_the_endpoint_ends_everything(rig: GrantRig) -> None:
    rig.feed(2, pages=3)
    _, group = rig.put(list(range(30)))  # some land, some fill slots, some wait for a slot,
    rig.put(list(range(30)), threshold=9)  # and some for their flag
    wait_until(
        lambda: sum(row.over for row in group.rows()) == 2, "whichever two flags were seen first", WAIT_S
    )
    rig.pair.near.endpoint.close()
    rig.sender.close()
    rig.wait_came(2)
    rig.pair.far.endpoint.close()
    assert rig.receiver.rooms() == []
    rig.receiver.close()


def test_blocks_that_arrived_before_the_endpoint_closed_are_processed_while_there_is_room(
    net: GrantRig,
) -> None:
    _, group = net.put([1, 2, 3])
    net.pair.far.wait(lambda: len(net.pair.far.of(RECEIVER)) == 1, "somebody is asked for room")
    wait_until(lambda: net.pair.far.bytes_at(0, 24) == FIRST.to_bytes(8, "little") * 3, "all flags")
    # Rooms that come in the same moment as the end.
    net.pair.near.endpoint.close()
    net.feed(2, pages=3)
    net.pair.far.endpoint.close()
    net.take()
    assert [net.payload(came) for came in net.came] == [net.data(1, 5000), net.data(2, 5000)]
    assert group.open_rows >= 1


def test_another_block_of_the_same_name_is_refused_if_the_refusal_could_not_be_reported_later(
    net: GrantRig,
) -> None:
    net.feed(6, pages=3)
    assert net.codes(net.put([1])[1], 1) == [LANDED]
    other = net.data(1, 4999)
    tag, group = net.put([1], 4999)
    assert net.refusal(tag) == TAKEN
    group.end(0)
    tag, group = net.put([1], 4999, durability=WRITTEN)  # the application decides, and says so
    assert group.wait_landed(WAIT_S)
    assert net.codes(net.put([1])[1], 1) == [LANDED], "the same block once more"
    net.wait_came(3)
    state = net.take()
    assert [came.listed for came in net.came] == [1, 0, 0]
    assert net.payload(net.came[1]) == other
    assert (state.taken, len(net.shelf)) == (0, 1)


def test_an_expiring_block_is_not_listed_and_not_acknowledged_too_late(net: GrantRig) -> None:
    net.feed(3, pages=3)
    now_ms = int(time.time() * 1000)
    assert net.codes(net.put([1], expires_unix_ms=now_ms + 60_000)[1], 1) == [LANDED]
    tag, group = net.put([2], expires_unix_ms=now_ms - 1)
    assert net.refusal(tag) == EXPIRED
    group.end(0)
    net.wait_came(1)
    assert (net.came[0].listed, net.came[0].expires_unix_ms, len(net.shelf)) == (0, now_ms + 60_000, 0)


def test_a_put_that_fires_before_it_is_named_is_not_sent(net: GrantRig) -> None:
    net.feed(2, pages=3)
    near = net.pair.near
    tag, group = net.put([1], durability=0)
    assert near.final(tag).status == -errno.EDESTADDRREQ
    group.end(0)
    tag, group = net.put([0], durability=0, threshold=5)
    name_put(group, 0, key_of(42), LANDED)
    with pytest.raises(FabricError):
        name_put(group, 1, key_of(43), LANDED)
    with pytest.raises(FabricError):
        name_put(Group(near.fabric, 1 << 40, 1), 0, key_of(43), LANDED)
    near.word(100).store(5)
    assert net.codes(group, 1) == [LANDED]
    net.wait_came(1)
    assert net.came[0].key == key_of(42)


def test_an_answer_to_a_put_that_was_not_sent_has_no_effect(net: GrantRig) -> None:
    """A node can compute the word. Taken for an answer it would free slot and word, and so would the put's end."""
    near, tag = net.pair.near, 7
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and accepts nothing
        peer = near.fabric.add_peer(SocketAddress(ip_of("127.0.0.1"), nobody.getsockname()[1]).packed(4))
        sender = Sender(
            near.endpoint,
            near.region,
            peer,
            Area(0, PAGE, SLOT, 0, 1, FIRST),
            near.word(WORDS).address,
            1,
            0,
            near.region.address + HEADS,
            FIRST_ACK,
            10_000_000_000,
            3,
        )
        row = put_row(near.region, near.region.address + DATA, PAGE, 0, key_of(1))
        group = put(near.fabric, sender, tag, [row], None, FINGERPRINT, LANDED)
        wait_until(lambda: near.endpoint.stalled_ns > 0, "the put can't be sent")
        stale = near.fabric.statistics().stale_words
        near.word(WORDS).store(FIRST_ACK << 8 | LANDED)
        wait_until(lambda: near.fabric.statistics().stale_words > stale, "the word was seen")
        assert (group.open_rows, group.row(0).landed_ns) == (1, 0)
        assert near.fabric.cancel([tag]) == 1
        assert near.final(tag).status == -errno.ECANCELED


def test_unawaited_blocks_do_not_wake_a_waiter(net: GrantRig) -> None:
    net.feed(40, pages=3)
    for number in range(20):
        assert net.codes(net.put([number])[1], 1) == [LANDED]
    time.sleep(0.05)
    net.pair.far.reap()
    told = len(net.pair.far.of(RECEIVER))
    assert told < 20
    net.wait_came(20)
    _, group = net.put([30], durability=WRITTEN)
    net.pair.far.wait(lambda: len(net.pair.far.of(RECEIVER)) > told, "who waits is told of at once")
    assert group.wait_landed(WAIT_S)


def test_a_block_on_the_shelf_gets_its_own_new_name(net: GrantRig) -> None:
    net.feed(1, pages=3)
    assert net.codes(net.put([1])[1], 1) == [LANDED]
    net.wait_came(1)
    landed = net.came[0].id
    assert net.shelf.rename(array("Q", [landed, landed]), array("Q", [5, 6])) == b"\1\0"
    assert net.shelf.take([5])[0]
    assert len(net.shelf) == 0


def test_a_landed_block_stays_listed_until_its_name_is_removed(net: GrantRig) -> None:
    """Unlike other new names, whose records differ; once it is renamed it is one of them."""
    net.feed(1, pages=3)
    assert net.codes(net.put([1])[1], 1) == [LANDED]
    net.wait_came(1)
    came = net.came[0]
    net.shelf.put([Shelved(OWNER, key_of(2), FINGERPRINT, 2, came.address + PAGE, 100, 0)])
    names = OWNER + came.key + OWNER + key_of(2)
    net.shelf.unlist(names, others_only=True)
    assert len(net.shelf) == 1
    assert net.shelf.rename(array("Q", [came.id, 2]), array("Q", [5, 6])) == b"\1\0"
    net.shelf.unlist(names, others_only=True)
    assert len(net.shelf) == 0


def test_a_put_under_a_stored_name_is_answered_by_the_application(net: GrantRig) -> None:
    """It knows the stored bytes. A put that waits for more than `landed` is answered all the same."""
    net.feed(6, pages=3)
    net.shelf.stored(OWNER + key_of(1) + OWNER + key_of(2), are_stored=True)
    _, unanswered = net.put([1])
    assert net.put([1], durability=WRITTEN)[1].wait_landed(WAIT_S)
    assert net.codes(net.put([3])[1], 1) == [LANDED]
    net.shelf.stored(OWNER + key_of(2), are_stored=False)
    assert net.codes(net.put([2])[1], 1) == [LANDED]
    net.wait_came(4)
    told = {(came.key, came.durability): (came.is_stored, came.listed) for came in net.came}
    assert told == {
        (key_of(1), LANDED): (1, 0),
        (key_of(1), WRITTEN): (1, 0),
        (key_of(3), LANDED): (0, 1),
        (key_of(2), LANDED): (0, 1),
    }
    assert unanswered.open_rows == 1, "it has heard nothing"


def test_an_unlisted_block_is_stored_for_the_next_one_of_its_name(net: GrantRig) -> None:
    net.feed(3, pages=3)
    soon_ms = int(time.time() * 1000) + 60_000
    assert net.codes(net.put([1], expires_unix_ms=soon_ms)[1], 1) == [LANDED]
    net.put([1], 4999)
    net.wait_came(2)
    assert [came.is_stored for came in net.came] == [0, 1]
