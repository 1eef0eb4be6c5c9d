"""The caller: what it writes and where, when a place is free, and how calls wait for one."""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.limits import FABRIC_ANSWER_BYTES, FABRIC_CALL_BYTES
from kvstore.wire import fabric_call as wire
from nic_offload.caller import PLACES, WAITING, WAITING_BYTES, Call, Caller
from nic_offload.fabric import EventKind
from nic_offload.group import Group
from tests.nic_offload.far import Far, way_to
from tests.nic_offload.rig import PAGE, Pair, Side, after_ms, wait_until
from tests.wire.calls import call_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.nic_offload.rig import Way

WORDS = PAGE  # where our words are in the near side's memory; the calls lie behind them
CALLS = 2 * PAGE
ANSWERS = CALLS + PLACES * FABRIC_CALL_BYTES
TAG = 1 << 16
GENERATION = 41
FINGERPRINT = bytes(range(16))
ACK_WORDS = [20, 21, 22, 23]
BYTES = 2


LENGTH = ANSWERS + PLACES * FABRIC_ANSWER_BYTES
DONE = wire.AnswerCode.DONE


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair("net", LENGTH) as both:
        both.there.fence()
        yield both


def caller_to(near: Side, there: Way) -> Caller:
    address = near.region.address
    return Caller(
        near.endpoint, near.region, there.peer, (there.base, there.key), address + WORDS, address + CALLS,
        address + ANSWERS, GENERATION, ACK_WORDS,
    )  # fmt: skip


@pytest.fixture
def caller(pair: Pair) -> Iterator[Caller]:
    caller = caller_to(pair.near, pair.there)
    yield caller
    pair.near.endpoint.close()
    caller.close()


def rows_of(count: int, seed: int = 1) -> list[wire.FetchRow]:
    draw = random.Random(seed)
    return [
        wire.FetchRow(draw.randbytes(32), 1000 + i, i, 100 + i, draw.getrandbits(64), draw.getrandbits(64))
        for i in range(count)
    ]


def fetch(
    pair: Pair,
    caller: Caller,
    rows: list[wire.FetchRow],
    *,
    tag: int = TAG,
    blocks_ms: float = 60_000,
    answer_ms: float = 60_000,
    metadata: bytes | None = None,
) -> tuple[int, Group]:
    """Make a call; returns the core's code and the group."""
    return fetch_from(pair.near, caller, rows, tag, blocks_ms, answer_ms, metadata)


def fetch_from(
    near: Side,
    caller: Caller,
    rows: Sequence[wire.FetchRow],
    tag: int,
    blocks_ms: float,
    answer_ms: float = 60_000,
    metadata: bytes | None = None,
) -> tuple[int, Group]:
    group = Group(near.fabric, tag, len(rows) + 1)
    call = Call(
        tag=tag,
        deadline_ns=after_ms(answer_ms),
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
    said = headers if metadata is None else metadata
    return caller.call(call, said, wire.rows_of_fetch(rows)), group


def say(pair: Pair, word: int, generation: int, code: int) -> None:
    at = WORDS + 8 * word
    pair.near.memory[at : at + 8] = (generation << 8 | code).to_bytes(8, "little")


def answer(pair: Pair, place: int, generation: int, code: int = DONE) -> None:
    say(pair, ACK_WORDS[place], generation, code)


def numbered(number: int) -> list[wire.FetchRow]:
    """A block whose key identifies its call."""
    return [wire.FetchRow(number.to_bytes(32, "little"), 1000, 1, 100 + number, 0, 0)]


def number_in(pair: Pair, place: int, generation: int) -> int:
    """The number of the call in a place of the peer, after checking the call."""
    start = wire.call_offset(place)
    length = wire.length_said(pair.far.bytes_at(start, wire.LENGTH_END))
    call, rows = wire.read_call(pair.far.bytes_at(start, length), generation)
    assert call.ack_word == ACK_WORDS[place]
    return int.from_bytes(rows.fetch[0].key, "little")


def fill(pair: Pair, caller: Caller) -> None:
    """Fill the places of these numbers with calls."""
    for number in range(PLACES):
        assert fetch(pair, caller, numbered(number), tag=TAG * (number + 1))[0] == 0
    wait_until(lambda: all(landed(pair, place) == GENERATION for place in range(PLACES)), "all places")
    assert caller.free_places == 0


def landed(pair: Pair, place: int) -> int:
    at = wire.flag_offset(place)
    return int.from_bytes(pair.far.bytes_at(at, 8), "little")


@pytest.mark.parametrize("blocks", [1, 7, 900])
def test_the_call_at_the_node_has_the_wire_format(pair: Pair, caller: Caller, blocks: int) -> None:
    rows = rows_of(blocks)
    assert fetch(pair, caller, rows)[0] == 0
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


def test_a_place_is_free_when_done_is_reported_and_its_generation_rises(pair: Pair, caller: Caller) -> None:
    groups = []
    for i in range(PLACES):
        groups.append(fetch(pair, caller, rows_of(1), tag=TAG * (i + 1))[1])
        assert caller.free_places == PLACES - 1 - i
    wait_until(lambda: landed(pair, 2) == GENERATION, "the third call")
    answer(pair, 2, GENERATION)
    wait_until(lambda: groups[2].row(1).over == 1, "the third call is answered")
    assert caller.free_places == 1
    fetch(pair, caller, rows_of(1), tag=TAG * 10)
    wait_until(lambda: landed(pair, 2) == GENERATION + 1, "the second call in that place")


def test_an_answer_with_bytes_is_an_event_and_keeps_its_place_until_it_is_read(
    pair: Pair, caller: Caller
) -> None:
    _, group = fetch(pair, caller, rows_of(2))
    assert caller.answer(TAG) is None
    caller.read(TAG)  # there is nothing yet
    wait_until(lambda: landed(pair, 0) == GENERATION, "the call")
    answer(pair, 0, GENERATION, BYTES)
    pair.near.wait(lambda: bool(pair.near.of(TAG + 5)), "the answer")
    assert pair.near.of(TAG + 5)[-1].kind == EventKind.ACKED
    assert group.row(2).over == 0
    assert caller.free_places == PLACES - 1
    assert caller.answer(TAG) == (0, GENERATION)
    assert caller.answer(TAG + 1) is None
    caller.read(TAG + 1)
    assert caller.free_places == PLACES - 1
    caller.read(TAG)
    caller.read(TAG)
    assert caller.free_places == PLACES
    assert caller.answer(TAG) is None
    fetch(pair, caller, rows_of(1), tag=TAG * 2)
    wait_until(lambda: landed(pair, 0) == GENERATION + 1, "the next call in that place")


# --- calls that wait


def test_waiting_calls_are_sent_in_order_each_into_an_answered_place(pair: Pair, caller: Caller) -> None:
    """The places are answered in any order, either without data or with bytes, which the test reads."""
    fill(pair, caller)
    count = 60
    for number in range(PLACES, count):
        assert fetch(pair, caller, numbered(number), tag=TAG * (number + 1))[0] == 0
    assert caller.free_places == 0
    pair.there.fence()
    dice, there = random.Random(17), dict(enumerate(range(PLACES)))
    generations = [GENERATION] * PLACES
    for number in range(PLACES, count):
        assert [landed(pair, place) for place in range(PLACES)] == generations, "nothing goes out unanswered"
        place = dice.randrange(PLACES)
        tag = TAG * (there[place] + 1)
        if dice.random() < 0.5:
            answer(pair, place, generations[place])
        else:
            answer(pair, place, generations[place], BYTES)
            pair.near.wait(lambda tag=tag: bool(pair.near.of(tag + 3)), "the answer")  # type: ignore[misc]
            pair.there.fence()
            assert landed(pair, place) == generations[place], "its bytes are not read yet"
            assert caller.answer(tag) == (place, generations[place])
            caller.read(tag)
        generations[place] += 1
        due = generations[place]
        wait_until(lambda place=place, due=due: landed(pair, place) == due, "the next one")  # type: ignore[misc]
        assert number_in(pair, place, due) == number
        there[place] = number


def test_a_call_made_as_a_place_gets_free_does_not_overtake_waiting_ones(pair: Pair, caller: Caller) -> None:
    """The thread that reads an answer frees its place, and may make the next call before the core notices."""
    fill(pair, caller)
    fetch(pair, caller, numbered(PLACES), tag=TAG * (PLACES + 1))
    last, due = TAG, GENERATION
    for number in range(PLACES, PLACES + 300):
        answer(pair, 0, due, BYTES)
        wait_until(lambda last=last, due=due: caller.answer(last) == (0, due), "the answer")  # type: ignore[misc]
        caller.read(last)
        fetch(pair, caller, numbered(number + 1), tag=TAG * (number + 2))
        last, due = TAG * (number + 1), due + 1
        wait_until(lambda due=due: landed(pair, 0) == due, "the next one")  # type: ignore[misc]
        assert number_in(pair, 0, due) == number


def test_a_waiting_call_whose_deadline_passes_is_reported_before_its_block_and_never_sent(
    pair: Pair, caller: Caller
) -> None:
    near = pair.near
    fill(pair, caller)
    for number in range(PLACES, PLACES + 3):
        short = number == PLACES + 1
        fetch(pair, caller, numbered(number), tag=TAG * (number + 1), blocks_ms=30 if short else 60_000)
    late = TAG * (PLACES + 2)
    near.events.clear()
    near.wait(lambda: bool(near.of(late)), "the end of its block")
    assert [(one.tag, one.kind, one.status) for one in near.events] == [
        (late + 2, EventKind.FAILED, -errno.ETIMEDOUT),
        (late, EventKind.WATCH_FAILED, -errno.ETIMEDOUT),
    ]
    for step, number in enumerate((PLACES, PLACES + 2)):
        answer(pair, 1, GENERATION + step)
        due = GENERATION + step + 1
        wait_until(lambda due=due: landed(pair, 1) == due, "the one behind it")  # type: ignore[misc]
        assert number_in(pair, 1, due) == number
    answer(pair, 1, GENERATION + 2)
    pair.there.fence()
    pair.there.fence()
    assert landed(pair, 1) == GENERATION + 2, "nothing more was left to go out"
    assert caller.free_places == 1


def test_a_waiting_call_has_as_long_for_its_answer_as_one_sent_at_once(pair: Pair, caller: Caller) -> None:
    """Otherwise one that waited nearly all of its time would end the link without a fault of the node."""
    near = pair.near
    fill(pair, caller)
    fetch(pair, caller, numbered(8), tag=TAG * 8, answer_ms=1000)
    fetch(pair, caller, numbered(9), tag=TAG * 9, blocks_ms=200)
    near.wait(lambda: bool(near.of(TAG * 9)), "some time goes by")
    before_ns = time.monotonic_ns()
    answer(pair, 0, GENERATION)
    wait_until(lambda: landed(pair, 0) == GENERATION + 1, "it goes out")
    near.wait(lambda: bool(near.of(TAG * 8 + 3)), "nobody answers it")
    (event,) = near.of(TAG * 8 + 3)
    assert event.status == -errno.ETIMEDOUT
    assert event.time_ns - before_ns > 900_000_000
    assert caller.free_places == 0, "nobody knows whether the other side has it"


def test_a_call_waits_no_longer_than_for_its_answer(pair: Pair, caller: Caller) -> None:
    """As a call without blocks that have a deadline: a reserve."""
    near = pair.near
    fill(pair, caller)
    fetch(pair, caller, numbered(9), tag=TAG * 9, answer_ms=30)
    near.wait(lambda: bool(near.of(TAG * 9 + 2)), "its end")
    assert near.of(TAG * 9 + 2)[0].status == -errno.ETIMEDOUT


def test_a_call_withdrawn_while_waiting_leaves_its_turn_to_the_next(pair: Pair, caller: Caller) -> None:
    fill(pair, caller)
    fetch(pair, caller, numbered(8), tag=TAG * 9)
    fetch(pair, caller, numbered(9), tag=TAG * 10)
    assert pair.near.fabric.cancel([TAG * 9 + 2]) == 1
    answer(pair, 3, GENERATION)
    wait_until(lambda: landed(pair, 3) == GENERATION + 1, "the next")
    assert number_in(pair, 3, GENERATION + 1) == 9


def test_a_put_that_was_never_posted_uses_neither_slot_nor_generation() -> None:
    """The other side is stopped before it has accepted the connection: nothing can be posted."""
    with Far("net", LENGTH) as far, Side("net", LENGTH) as near:
        there = way_to(near, far.said)
        far.stop()
        caller = caller_to(near, there)
        for turn in range(3 * PLACES):
            fetch_from(near, caller, numbered(turn), TAG * (turn + 1), 20)
            assert near.final(TAG * (turn + 1) + 2).status == -errno.ETIMEDOUT
            assert caller.free_places == PLACES
        wait_until(
            lambda: near.fabric.statistics().watches == 0, "the last block's own watch is over as well"
        )
        far.go_on()
        fetch_from(near, caller, numbered(0), TAG * 100, 60_000)
        tags = itertools.count(1)

        def has_come() -> bool:
            tag = next(tags)
            there.arm(there.get(tag, 8, source=wire.flag_offset(0)))
            assert near.final(tag).kind == EventKind.DONE
            return int.from_bytes(near.bytes_at(0, 8), "little") == GENERATION

        wait_until(has_come, "the first call of its place")
        near.endpoint.close()
        caller.close()


def test_the_number_of_waiting_calls_is_bounded(pair: Pair, caller: Caller) -> None:
    fill(pair, caller)
    for number in range(WAITING):
        assert fetch(pair, caller, numbered(number), tag=TAG * (number + 10))[0] == 0
    tag = TAG * (WAITING + 10)
    code, group = fetch(pair, caller, numbered(0), tag=tag)
    assert code == -errno.EBUSY
    assert group.open_rows == 2, "nothing of it was begun"
    answer(pair, 0, GENERATION)
    wait_until(lambda: landed(pair, 0) == GENERATION + 1, "the first of them goes out")
    assert fetch(pair, caller, numbered(0), tag=tag)[0] == 0
    assert fetch(pair, caller, numbered(0), tag=tag + TAG)[0] == -errno.EBUSY


def test_the_bytes_of_waiting_calls_are_bounded(pair: Pair, caller: Caller) -> None:
    fill(pair, caller)
    large = bytes(65536)
    tags = itertools.count(TAG * 10, TAG)
    taken = 0
    while fetch(pair, caller, numbered(1), tag=next(tags), metadata=large)[0] == 0:
        taken += 1
        assert taken <= WAITING
    assert 0.9 * WAITING_BYTES < taken * len(large) <= WAITING_BYTES
    assert fetch(pair, caller, numbered(1), tag=next(tags), metadata=large)[0] == -errno.EBUSY
    assert fetch(pair, caller, numbered(1), tag=next(tags))[0] == 0, "a small one still fits"


def answer_all(pair: Pair, count: int) -> None:
    dues = [GENERATION] * PLACES

    def answer_some() -> bool:
        for place, due in enumerate(dues):
            if landed(pair, place) == due:
                answer(pair, place, due)
                dues[place] += 1
        return sum(dues) == PLACES * GENERATION + count

    wait_until(answer_some, "all go out")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


@pytest.mark.parametrize("way", ["answered", "cancelled", "endpoint", "fabric"])
def test_nothing_is_kept_of_calls_that_have_ended(way: str) -> None:
    """Their bytes, 4 MiB a round, and their work, of which the fabric has little: a leak shows in either."""
    rounds, each, large = 24, 64, bytes(65536)
    before = 0
    with Pair("net", LENGTH, 1024) as pair:
        for turn in range(rounds):
            near = pair.near if way != "fabric" else Side("net", LENGTH, 1024)
            if way == "endpoint":
                near = Side.more(pair.near)
            there = type(pair.there).between(near, pair.far)
            caller = caller_to(near, there)
            tags = [TAG * (each * turn + number + 1) for number in range(each)]
            groups = [fetch_from(near, caller, numbered(1), tag, 60_000, metadata=large) for tag in tags]
            assert {code for code, _ in groups} == {0}
            if way == "answered":
                answer_all(pair, each)
            elif way == "cancelled":
                near.fabric.cancel([tag + i for tag in tags for i in (0, 2)])
            if way == "fabric":
                near.close()
            else:
                near.endpoint.close()
                caller.close()
            if way in {"answered", "cancelled"}:
                near.endpoint = near.fabric.open_endpoint()
            if turn == rounds // 3:
                before = resident_bytes()
        if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # it keeps what is freed for a while
            assert resident_bytes() - before < each * len(large) * rounds // 6
        if way != "fabric":
            assert pair.near.fabric.statistics().watches == 0


def test_a_call_too_large_for_its_place_is_not_started(pair: Pair, caller: Caller) -> None:
    group = Group(pair.near.fabric, TAG, 2)
    call = Call(TAG, 0, 0, 0, group, 1, 1, 0, wire.CallKind.FETCH, 0, 0, 1, FINGERPRINT)
    rows = wire.rows_of_fetch(rows_of(1))
    assert caller.call(call, bytes(FABRIC_CALL_BYTES - 64), rows) == -errno.EMSGSIZE
    assert caller.call(call, b"", rows + b"x") == -errno.EINVAL
    assert pair.near.fabric.statistics().watches == 0
    assert caller.free_places == PLACES


def test_the_deadline_of_the_blocks_is_reported_for_each(pair: Pair, caller: Caller) -> None:
    _, group = fetch(pair, caller, rows_of(2), blocks_ms=20)
    pair.near.wait(lambda: len(pair.near.events) >= 3, "the deadlines")
    failed = {event.tag for event in pair.near.events if event.kind == EventKind.WATCH_FAILED}
    assert failed == {TAG, TAG + 2}
    assert group.open_rows == 3
