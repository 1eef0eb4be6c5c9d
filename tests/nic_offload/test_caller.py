"""The caller: what it writes, where it puts it, and when a place is free."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from kvstore.wire import fabric_call as wire
from nic_offload.caller import PLACES, Call, Caller
from nic_offload.fabric import EventKind
from nic_offload.group import Group
from tests.nic_offload.rig import PAGE, Pair, after_ms, wait_until
from tests.wire.calls import call_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = PAGE  # where our words are in the near side's memory; the calls lie behind them
CALLS = 2 * PAGE
TAG = 1 << 16
GENERATION = 41
FINGERPRINT = bytes(range(16))
ACK_WORDS = [20, 21, 22, 23]
BYTES = 2


@pytest.fixture
def pair() -> Iterator[Pair]:
    length = -(-wire.AREA_BYTES // PAGE) * PAGE + 2 * PAGE
    with Pair("net", length) as both:
        both.there.fence()
        yield both


@pytest.fixture
def caller(pair: Pair) -> Caller:
    near, there = pair.near, pair.there
    address = near.region.address
    return Caller(
        near.endpoint, near.region, there.peer, (there.base, there.key), address + WORDS, address + CALLS,
        GENERATION, ACK_WORDS,
    )  # fmt: skip


def rows_of(count: int, seed: int = 1) -> list[wire.FetchRow]:
    draw = random.Random(seed)
    return [
        wire.FetchRow(draw.randbytes(32), 1000 + i, i, 100 + i, draw.getrandbits(64), draw.getrandbits(64))
        for i in range(count)
    ]


def fetch(
    pair: Pair, caller: Caller, rows: list[wire.FetchRow], *, tag: int = TAG, blocks_ms: int = 60_000
) -> tuple[int, Group]:
    group = Group(pair.near.fabric, tag, len(rows) + 1)
    call = Call(
        tag=tag,
        deadline_ns=after_ms(60_000),
        blocks_deadline_ns=after_ms(blocks_ms),
        expires_unix_ms=5,
        group=group,
        row=len(rows),
        blocks=len(rows),
        lease_ms=6,
        kind=wire.CallKind.FETCH,
        flags=wire.TELLS,
        durability=2,
        good_code=wire.AnswerCode.DONE,
        fingerprint=FINGERPRINT,
    )
    headers = wire.header_bytes((("kvstore-request", "r-1"), ("steps-bin", b"\x00\xff")))
    return caller.call(call, headers, wire.rows_of_fetch(rows)), group


def say(pair: Pair, word: int, generation: int, code: int) -> None:
    at = WORDS + 8 * word
    pair.near.memory[at : at + 8] = (generation << 8 | code).to_bytes(8, "little")


def landed(pair: Pair, place: int) -> int:
    at = wire.flag_offset(place)
    return int.from_bytes(pair.far.bytes_at(at, 8), "little")


@pytest.mark.parametrize("blocks", [1, 7, 900])
def test_the_call_lies_at_the_node_as_the_wire_has_it(pair: Pair, caller: Caller, blocks: int) -> None:
    rows = rows_of(blocks)
    place, _ = fetch(pair, caller, rows)
    assert place == 0
    wait_until(lambda: landed(pair, 0) == GENERATION, "the call")
    wanted = call_bytes(
        wire.Call(
            GENERATION,
            wire.CallKind.FETCH,
            ACK_WORDS[0],
            FINGERPRINT,
            (("kvstore-request", "r-1"), ("steps-bin", b"\x00\xff")),
            wire.TELLS,
            2,
            6,
            5,
        ),
        blocks,
        wire.rows_of_fetch(rows),
    )
    assert wanted is not None
    assert pair.far.bytes_at(wire.call_offset(0), len(wanted)) == wanted


def test_the_words_of_blocks_and_call_end_their_rows(pair: Pair, caller: Caller) -> None:
    _, group = fetch(pair, caller, rows_of(3))
    say(pair, 1, 101, 0x7F)
    wait_until(lambda: group.row(1).over == 1, "the second block")
    say(pair, ACK_WORDS[0], GENERATION, wire.AnswerCode.DONE)
    say(pair, 0, 100, 0x81)
    say(pair, 2, 102, 0x7F)
    assert group.wait(4, 20)
    assert [row.code for row in group.rows()] == [0x81, 0x7F, 0x7F, wire.AnswerCode.DONE]


def test_a_place_is_free_when_done_is_said_and_its_generation_rises(pair: Pair, caller: Caller) -> None:
    groups = []
    for i in range(PLACES):
        place, group = fetch(pair, caller, rows_of(1), tag=TAG * (i + 1))
        assert place == i
        groups.append(group)
    assert caller.free_places == 0
    assert fetch(pair, caller, rows_of(1), tag=TAG * 9)[0] == -errno.EBUSY
    say(pair, ACK_WORDS[2], GENERATION, wire.AnswerCode.DONE)
    wait_until(lambda: groups[2].row(1).over == 1, "the third call is answered")
    assert caller.free_places == 1
    assert fetch(pair, caller, rows_of(1), tag=TAG * 10)[0] == 2
    wait_until(lambda: landed(pair, 2) == GENERATION + 1, "the second call in that place")


def test_an_answer_with_bytes_is_an_event_and_keeps_its_place_until_it_is_read(
    pair: Pair, caller: Caller
) -> None:
    place, group = fetch(pair, caller, rows_of(2))
    say(pair, ACK_WORDS[0], GENERATION, BYTES)
    pair.near.wait(lambda: bool(pair.near.of(TAG + 5)), "the answer")
    assert pair.near.of(TAG + 5)[-1].kind == EventKind.ACKED
    assert group.row(2).over == 0
    assert caller.free_places == PLACES - 1
    caller.read(place)
    caller.read(place)
    assert caller.free_places == PLACES


def test_what_does_not_fit_into_a_place_is_not_begun(pair: Pair, caller: Caller) -> None:
    group = Group(pair.near.fabric, TAG, 2)
    call = Call(TAG, 0, 0, 0, group, 1, 1, 0, wire.CallKind.FETCH, 0, 0, 1, FINGERPRINT)
    rows = wire.rows_of_fetch(rows_of(1))
    assert caller.call(call, bytes(wire.CALL_BYTES - 64), rows) == -errno.EMSGSIZE
    assert caller.call(call, b"", rows + b"x") == -errno.EINVAL
    assert pair.near.fabric.statistics().watches == 0
    assert caller.free_places == PLACES


def test_the_deadline_of_the_blocks_is_told_of_each(pair: Pair, caller: Caller) -> None:
    _, group = fetch(pair, caller, rows_of(2), blocks_ms=20)
    pair.near.wait(lambda: len(pair.near.events) >= 3, "the deadlines")
    failed = {event.tag for event in pair.near.events if event.kind == EventKind.WATCH_FAILED}
    assert failed == {TAG, TAG + 2}
    assert group.open_rows == 3
