"""Blocks that a client's core copies from the node's mapped memory: what it copies, and what it refuses.

The node is played by hand: the test writes its answers, and the words behind them, into the client's memory.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvstore.limits import FABRIC_ANSWER_BYTES
from kvstore.wire import fabric_call as wire
from nic_offload.caller import PLACES, Call, Caller
from nic_offload.checksum import crc32c
from nic_offload.fabric import EventKind
from nic_offload.group import Group
from nic_offload.memory import allocate_shared
from nic_offload.trigger import AckWatch, watch_acks
from tests.nic_offload.rig import PAGE, Pair, Side, after_ms, wait_until
from tests.nic_offload.test_caller import (
    ACK_WORDS,
    ANSWERS,
    DONE,
    FINGERPRINT,
    GENERATION,
    LENGTH,
    TAG,
    caller_to,
    landed,
    say,
)

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

    from nic_offload.pieces import Pieces

SHARES, WHERE, KIND_WHERE = 2, 3, 3
SERVED, SCATTERED, CORRUPT, LATE, CANCELLED = 0x7F, 0x7D, 0x82, 0x87, 0x7E
NODE_BYTES = 8 << 20
TARGETS = -(-LENGTH // PAGE) * PAGE  # behind what the calls use
TARGET_BYTES = 4 << 20


class Wanted(NamedTuple):
    """A block, and where it is in the node's memory."""

    offset: int
    length: int
    skip: int = 0
    part: int = 0

    @property
    def got_bytes(self) -> int:
        return self.part or self.length


class Client:
    """The client's side with the node's memory mapped; the test acts as the node."""

    def __init__(self, rows: int = 0, rows_count: int = 0) -> None:
        self.pair = Pair("net", TARGETS + TARGET_BYTES)
        self.pair.there.fence()
        self.caller: Caller = caller_to(self.pair.near, self.pair.there)
        self.node: mmap.mmap
        self.node, self._fd = allocate_shared(NODE_BYTES)
        self.node[:] = os.urandom(NODE_BYTES)
        self.caller.share(self.node, SERVED, SCATTERED, CORRUPT, LATE, rows, rows_count)
        self.tags = itertools.count(1)
        self.calls = [GENERATION] * PLACES

    def get(
        self,
        blocks: Sequence[Wanted],
        *,
        tag: int = TAG,
        blocks_ms: float = 60_000,
        pieces: Sequence[Pieces | None] = (),
    ) -> Group:
        group, code = self._get(blocks, tag, blocks_ms, pieces)
        assert code == 0
        return group

    def get_code(self, blocks: Sequence[Wanted], *, pieces: Sequence[Pieces | None] = ()) -> int:
        """Request blocks without waiting; returns 0 or an error number."""
        return self._get(blocks, TAG, 60_000, pieces)[1]

    def _get(
        self, blocks: Sequence[Wanted], tag: int, blocks_ms: float, pieces: Sequence[Pieces | None]
    ) -> tuple[Group, int]:
        group = Group(self.pair.near.fabric, tag, len(blocks) + 1)
        is_part = any(block.part for block in blocks)
        rows = [
            wire.FetchRow(i.to_bytes(32, "little"), block.length, i, 100 + i, 0, 0, block.skip, block.part)
            for i, block in enumerate(blocks)
        ]
        call = Call(
            tag=tag,
            deadline_ns=after_ms(60_000),
            blocks_deadline_ns=after_ms(blocks_ms),
            expires_unix_ms=0,
            group=group,
            row=len(blocks),
            blocks=len(blocks),
            lease_ms=0,
            kind=wire.CallKind.FETCH_PARTS if is_part else wire.CallKind.FETCH,
            flags=0,
            durability=0,
            good_code=DONE,
            fingerprint=FINGERPRINT,
        )
        packed = wire.rows_of_parts(rows) if is_part else wire.rows_of_fetch(rows)
        first = self.pair.near.region.address
        given = itertools.chain(pieces, itertools.repeat(None))
        wanted = [
            number
            for at, some in zip(self.targets(blocks), given, strict=False)
            for number in (first + at, 0 if some is None else some.pointer)
        ]
        return group, self.caller.call(call, b"", packed, wanted)

    def say_served(self, block: int) -> None:
        say(self.pair, block, 100 + block, SERVED)

    def targets(self, blocks: Sequence[Wanted]) -> list[int]:
        return [TARGETS + sum(one.got_bytes for one in blocks[:i]) for i in range(len(blocks))]

    def asked(self, place: int = 0) -> wire.Call:
        wait_until(lambda: landed(self.pair, place) == self.calls[place], "the call")
        start = wire.call_offset(place)
        length = wire.length_said(self.pair.far.bytes_at(start, wire.LENGTH_END))
        call, _ = wire.read_call(self.pair.far.bytes_at(start, length), self.calls[place])
        self.calls[place] += 1
        return call

    def answer(
        self, rows: Sequence[tuple[int, int]], place: int = 0, *, spoilt: bool = False, kind: int = KIND_WHERE
    ) -> None:
        """Write an answer: offset and checksum of each block, then the word."""
        place, generation = 0, self.calls[0] - 1
        body = b"".join(struct.pack("<QI4x", *row) for row in rows)
        said = struct.pack("<IQB7x", 24 + len(body), generation, kind) + body
        data = crc32c(said).to_bytes(4, "little") + said
        if spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        at = ANSWERS + place * FABRIC_ANSWER_BYTES
        self.pair.near.memory[at : at + len(data)] = data
        say(self.pair, ACK_WORDS[place], generation, WHERE)

    def rows(self, blocks: Sequence[Wanted]) -> list[tuple[int, int]]:
        return [(one.offset, crc32c(self.node[one.offset : one.offset + one.length])) for one in blocks]

    def is_exact(self, blocks: Sequence[Wanted]) -> bool:
        for one, at in zip(blocks, self.targets(blocks), strict=True):
            first = one.offset + one.skip
            if self.pair.near.bytes_at(at, one.got_bytes) != self.node[first : first + one.got_bytes]:
                return False
        return True

    def untouched(self, blocks: Sequence[Wanted]) -> bool:
        whole = sum(one.got_bytes for one in blocks)
        return self.pair.near.bytes_at(TARGETS, whole) == bytes(whole)

    def codes(self, group: Group, blocks: int) -> list[int]:
        return [group.row(i).code for i in range(blocks)]

    def close(self) -> None:
        self.pair.near.endpoint.close()
        self.caller.close()
        self.pair.__exit__()
        self.node.close()
        os.close(self._fd)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.mark.parametrize(
    "blocks",
    [
        [Wanted(0, 1)],
        [Wanted(4096, 32 << 10), Wanted(NODE_BYTES - 5000, 5000), Wanted(777, 16 << 10)],
        [Wanted(i * 4096, 4000) for i in range(700)],
        [Wanted(100, 1 << 20), Wanted(1 << 20, (1 << 20) + 13)],
        [
            Wanted(0, 50_000, 0, 1),
            Wanted(50_000, 50_000, 16_000, 20_000),
            Wanted(9, 40_000, 39_999, 1),
            Wanted(3, 900),
        ],
    ],
    ids=["byte", "three", "many", "large", "parts"],
)
def test_blocks_are_copied_whole_from_the_mapped_memory(client: Client, blocks: list[Wanted]) -> None:
    group = client.get(blocks)
    assert client.asked().flags & SHARES
    client.answer(client.rows(blocks))
    assert group.wait(len(blocks) + 1, 20)
    assert client.codes(group, len(blocks) + 1) == [SERVED] * len(blocks) + [DONE]
    assert client.is_exact(blocks)
    assert client.caller.shared_blocks == len(blocks)
    assert client.caller.free_places == PLACES


def test_the_place_is_reused_only_after_the_last_copy(client: Client) -> None:
    """Its next call tells the node that the blocks may be released."""
    blocks = [Wanted(0, 1 << 20)] * 4
    for number in range(1, 41):  # a thread without a core sees few of the moments that matter
        group = client.get(blocks, tag=number * TAG)
        client.asked()
        client.answer(client.rows(blocks))
        while client.caller.free_places < PLACES:
            pass
        end = client.pair.near.bytes_at(TARGETS + TARGET_BYTES - PAGE, PAGE)  # before it has come, if it may
        assert end == client.node[(1 << 20) - PAGE : 1 << 20]
        assert group.wait(5, 20)
        client.pair.near.fill(TARGETS, bytes(TARGET_BYTES))


def test_a_wrong_checksum_is_corrupt_and_then_the_fabric_is_used(client: Client) -> None:
    blocks = [Wanted(0, 5000), Wanted(8192, 5000)]
    group = client.get(blocks)
    client.asked()
    good, other = client.rows(blocks)
    client.answer([good, (other[0], other[1] ^ 1)])
    assert group.wait(3, 20)
    assert client.codes(group, 2) == [SERVED, CORRUPT]
    client.get(blocks, tag=2 * TAG)
    assert not client.asked(0).flags & SHARES


@pytest.mark.parametrize("offset", [NODE_BYTES - 4999, NODE_BYTES, (1 << 64) - 1])
def test_a_place_outside_the_memory_is_not_an_answer(client: Client, offset: int) -> None:
    blocks = [Wanted(0, 5000), Wanted(0, 5000)]
    group = client.get(blocks)
    client.asked()
    client.answer([client.rows(blocks)[0], (offset, 0)])
    is_refused(client, group, blocks)


def has(side: Side, kind: EventKind) -> int:
    side.reap()
    return sum(event.kind == kind for event in side.events)


def is_refused(client: Client, group: Group, blocks: Sequence[Wanted]) -> None:
    """The answer is left to the application, and no block has arrived."""
    near = client.pair.near
    wait_until(lambda: has(near, EventKind.ACKED) == 1, "the answer")
    assert not any(row.over for row in group.rows())
    assert client.untouched(blocks)


@pytest.mark.parametrize("change", ["spoilt", "kind", "short", "long"])
def test_an_invalid_answer_is_not_accepted(client: Client, change: str) -> None:
    blocks = [Wanted(0, 5000), Wanted(8192, 5000)]
    group = client.get(blocks)
    client.asked()
    rows = client.rows(blocks)
    client.answer(
        rows[:1] if change == "short" else rows + rows[:1] if change == "long" else rows,
        spoilt=change == "spoilt",
        kind=1 if change == "kind" else KIND_WHERE,
    )
    is_refused(client, group, blocks)


def test_an_ordinary_answer_ends_blocks_by_their_words(client: Client) -> None:
    group = client.get([Wanted(0, 5000), Wanted(8192, 5000)])
    client.asked()
    say(client.pair, 0, 100, SERVED)
    say(client.pair, 1, 101, 0x81)
    say(client.pair, ACK_WORDS[0], GENERATION, DONE)
    assert group.wait(3, 20)
    assert client.codes(group, 2) == [SERVED, 0x81]
    assert client.caller.shared_blocks == 0
    assert client.caller.free_places == PLACES


def test_an_answer_that_took_too_long_is_a_miss(client: Client) -> None:
    """The node may have reused the memory."""
    blocks = [Wanted(0, 5000)]
    group = client.get(blocks)
    client.asked()
    time.sleep(1.2)
    client.answer(client.rows(blocks))
    assert group.wait(2, 20)
    assert client.codes(group, 1) == [LATE]


def test_abandoned_blocks_are_not_copied(client: Client) -> None:
    blocks = [Wanted(0, 5000), Wanted(8192, 5000)]
    group = client.get(blocks, blocks_ms=50)
    client.asked()
    near = client.pair.near
    wait_until(lambda: has(near, EventKind.WATCH_FAILED) == 2, "both deadlines")
    others = client.get(blocks, tag=2 * TAG)  # whose watches are in the memory of those that are over
    wait_until(lambda: landed(client.pair, 1) == GENERATION, "the second call")
    client.answer(client.rows(blocks))
    assert group.wait(3, 20)
    assert client.codes(group, 2) == [LATE, LATE], "what the node would have confirmed by words"
    assert client.untouched(blocks)
    assert client.caller.free_places == PLACES - 1
    assert [row.over for row in others.rows()] == [0, 0, 0]


def test_nothing_is_copied_once_the_endpoint_is_closed(client: Client) -> None:
    blocks = [Wanted(0, 1 << 20)] * 4
    client.get(blocks)
    client.asked()
    client.answer(client.rows(blocks))
    client.pair.near.endpoint.close()
    before = client.pair.near.bytes_at(TARGETS, TARGET_BYTES)
    time.sleep(0.05)
    assert client.pair.near.bytes_at(TARGETS, TARGET_BYTES) == before


def test_a_word_of_another_watch_ends_no_row_while_its_block_is_copied(client: Client) -> None:
    """A cancelled get's second watch: the bytes would arrive after its caller was told that they don't."""
    blocks = [Wanted(0, 1 << 20)] * 4
    for attempt in range(1, 20):
        group = client.get(blocks, tag=attempt * TAG)
        client.asked()
        watches = [
            AckWatch(
                tag=attempt * TAG + 2 * i + 1,
                endpoint=client.pair.near.endpoint,
                word=client.pair.near.region.address + PAGE + 8 * i,
                generation=100 + i,
                final_code=1,
                deadline_ns=after_ms(60_000),
                group=group,
                good_max=255,
                row=i,
            )
            for i in range(4)
        ]
        watch_acks(client.pair.near.fabric, watches)
        for at in range(TARGETS, TARGETS + TARGET_BYTES, 1 << 20):
            client.pair.near.memory[at] ^= 0xFF
        client.answer(client.rows(blocks))
        assert group.wait(1, 20)
        for i in range(4):
            say(client.pair, i, 100 + i, CANCELLED)
        assert group.wait(5, 20)
        codes = client.codes(group, 4)
        assert set(codes) <= {SERVED}, "each was being copied when the word came"
        assert client.is_exact(blocks)
        for i in range(4):
            say(client.pair, i, 0, 0)
