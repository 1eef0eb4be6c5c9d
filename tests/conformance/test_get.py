"""Gets: bytes, checksums, permissions; and transfers of many pieces with one flag."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.checksum import crc32c
from nic_offload.fabric import EventKind
from nic_offload.scatter import Flag, Piece, gather_get, scatter_put
from tests.conformance.backends import end_or_late, lands, refusal_deadline_ns, through
from tests.nic_offload.rig import PAGE, Side, Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.backends import Gate, Stage

SIZES = (1, 7, 8, 9, 63, 255, 4095, 4096, 4097, 65_537, 262_145, 400_000)


def test_the_bytes_are_exactly_those_of_the_peer(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    rng = random.Random(12)
    far.fill(0, rng.randbytes(far.length))
    for turn, length in enumerate(SIZES, 1):
        near.fill(0, b"\xee" * near.length)
        source, target = rng.randrange(500_000), rng.randrange(500_000)
        wanted = far.bytes_at(source, length)
        there.arm(
            there.get(
                turn,
                length,
                source=source,
                target=target,
                flag=(0, turn),
                fires=(gate.counter, turn),
                crc32c=crc32c(wanted) if turn % 2 else None,
            )
        )
        gate.raise_to(turn)
        lands(far.word(0), turn)  # told to the peer only when the bytes are here
        assert near.bytes_at(target, length) == wanted
        assert near.bytes_at(0, target) == b"\xee" * target
        end = target + length
        assert near.bytes_at(end, near.length - end) == b"\xee" * (near.length - end)
        assert near.final(turn).kind == EventKind.DONE
    assert near.fabric.statistics().got_bytes == sum(SIZES)


def test_wrong_bytes_give_no_flag_and_no_count(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    block = random.Random(13).randbytes(70_000)
    far.fill(0, block)
    moved = stage.counter()
    fires, right = (gate.counter, 1), crc32c(block)
    there.arm(
        there.get(1, 70_000, flag=(1, 7), fires=fires, completion=moved, crc32c=right ^ 1),
        there.notify(2, 2, 7, fires=(moved, 1)),
        there.get(3, 70_000, target=100_000, flag=(3, 7), fires=fires, crc32c=right),
    )
    gate.raise_to(1)
    event = near.final(1)
    assert (event.kind, event.status) == (EventKind.FAILED, -errno.EBADMSG)
    event = near.final(2)
    assert (event.kind, event.status, event.value) == (EventKind.FAILED, -errno.EPIPE, errno.EBADMSG)
    lands(far.word(3), 7)
    stage.settle(gate)
    assert moved.failed
    assert moved.value() == 0
    assert (far.word(1).load(), far.word(2).load()) == (0, 0)
    assert near.bytes_at(100_000, 70_000) == block


def test_a_put_whose_bytes_changed_is_not_sent(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    block = random.Random(14).randbytes(70_000)
    near.fill(0, block)
    moved, right = stage.counter(), crc32c(block)
    put: Callable[..., Any] = there.put
    there.arm(
        put(1, 70_000, flag=(1, 7), fires=(gate.counter, 1), crc32c=right),
        put(2, 70_000, flag=(2, 8), fires=(gate.counter, 2), crc32c=right, completion=moved),
        there.notify(3, 3, 7, fires=(moved, 1)),
    )
    gate.raise_to(1)
    lands(far.word(1), 7)
    assert far.bytes_at(0, 70_000) == block
    near.final(1)
    near.fill(69_999, bytes([block[-1] ^ 1]))
    gate.raise_to(2)
    assert near.final(2).status == -errno.EBADMSG
    assert near.final(3).status == -errno.EPIPE
    stage.settle(gate)
    assert far.bytes_at(0, 70_000) == block
    assert (far.word(2).load(), far.word(3).load()) == (0, 0)


def test_memory_that_may_not_be_read_is_not_read(stage: Stage, gate: Gate) -> None:
    near, far = stage.near, stage.far
    target = Side.more(far)
    with far.fabric.register(far.memory, remote_read=False, endpoint=target.endpoint) as closed:
        way = Way(Side.more(near), target.endpoint.address(), closed.base, closed.key, far.length)
        far.fill(0, b"secret" * 100)
        moved, fires = stage.counter(), (gate.counter, 1)
        way.arm(
            way.get(
                1, 600, flag=(1, 7), fires=fires, completion=moved, deadline_ns=refusal_deadline_ns(near)
            ),
        )
        stage.there.arm(stage.there.notify(2, 2, 7, fires=(moved, 1)))
        gate.raise_to(1)
        if end_or_late(near, 1) == EventKind.LATE:
            way.endpoint.close()
        else:
            assert near.final(1).kind == EventKind.FAILED
        assert near.final(2).status == -errno.EPIPE
        assert near.bytes_at(0, 600) == bytes(600)
        assert (far.word(1).load(), far.word(2).load()) == (0, 0)


def test_memory_that_may_only_be_read_is_not_written(stage: Stage, gate: Gate) -> None:
    near, far = stage.near, stage.far
    target = Side.more(far)
    readable = far.fabric.register(far.memory, remote_write=False, remote_read=True, endpoint=target.endpoint)
    with readable:
        way = Way(Side.more(near), target.endpoint.address(), readable.base, readable.key, far.length)
        far.fill(0, b"mine" * 100)
        near.fill(0, b"ours" * 100)
        moved = stage.counter()
        way.arm(way.get(1, 400, target=5000, fires=(gate.counter, 1)))
        gate.raise_to(1)
        assert near.final(1).kind == EventKind.DONE
        assert near.bytes_at(5000, 400) == b"mine" * 100
        way.arm(
            way.put(
                2,
                400,
                flag=(1, 7),
                fires=(gate.counter, 2),
                completion=moved,
                deadline_ns=refusal_deadline_ns(near),
            )
        )
        gate.raise_to(2)
        if end_or_late(near, 2) == EventKind.FAILED:
            assert near.final(2).status not in (-errno.ECANCELED, -errno.ETIMEDOUT)
        way.endpoint.close()
        stage.settle(gate)
        assert far.bytes_at(0, 400) == b"mine" * 100
        assert far.word(1).load() == 0


def shuffled(stage: Stage, pages: int) -> list[Piece]:
    """Pages in random order here, and in sequence at the peer."""
    order = random.Random(15).sample(range(pages), pages)
    return [
        Piece(stage.near.region.address + page * PAGE, stage.there.base + i * PAGE, PAGE)
        for i, page in enumerate(order)
    ]


@pytest.mark.parametrize("spoiled", [False, True])
def test_many_pieces_have_one_flag(stage: Stage, gate: Gate, *, spoiled: bool) -> None:
    """It arrives after all of them; if one of them fails, not at all."""
    near, far, there = stage.near, stage.far, stage.there
    way = through(near, far) if spoiled else there
    near.fill(0, random.Random(16).randbytes(near.length))
    pieces = shuffled(stage, 200)
    bad = [Piece(near.region.address, there.base + (1 << 40), PAGE)] if spoiled else []
    scatter_put(
        near.fabric,
        tag=1,
        endpoint=way.endpoint,
        peer=way.peer,
        region=near.region,
        pieces=pieces[:100] + bad + pieces[100:],
        target_key=way.key,
        flag=Flag(way.word_target(0), way.key, 7),
        trigger=gate.counter,
        threshold=5,
        deadline_ns=refusal_deadline_ns(near) if spoiled else 0,
    )
    gate.raise_to(4)
    stage.settle(gate)
    assert not any(far.bytes_at(0, 200 * PAGE))
    gate.raise_to(5)
    if spoiled:
        assert end_or_late(near, 1) in (EventKind.FAILED, EventKind.LATE)
        way.endpoint.close()
        stage.settle(gate)
        assert far.word(0).load() == 0
        return
    lands(far.word(0), 7)
    for piece in pieces:
        start = piece.local - near.region.address
        assert far.bytes_at(piece.remote - there.base, PAGE) == near.bytes_at(start, PAGE)
    assert near.final(1).kind == EventKind.DONE
    stage.holds_nothing()


def test_many_pieces_are_fetched_and_the_owner_is_notified_once(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    far.fill(0, random.Random(17).randbytes(200 * PAGE))
    pieces = shuffled(stage, 200)
    gather_get(
        near.fabric,
        tag=1,
        endpoint=there.endpoint,
        peer=there.peer,
        region=near.region,
        pieces=pieces,
        source_key=there.key,
        flag=Flag(there.word_target(0), there.key, 7),
        trigger=gate.counter,
        threshold=1,
    )
    gate.raise_to(1)
    lands(far.word(0), 7)
    for piece in pieces:
        start = piece.local - near.region.address
        assert far.bytes_at(piece.remote - there.base, PAGE) == near.bytes_at(start, PAGE)
    near.final(1)
    far.word(0).store(0)
    gate.raise_to(10)
    stage.settle(gate)
    assert far.word(0).load() == 0
    stage.holds_nothing()
