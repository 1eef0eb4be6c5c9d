"""Only a chain orders operations: a later one finds all effects of the earlier ones, without any call."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from nic_offload.flags import FlagWord
from nic_offload.trigger import CounterMove
from tests.conformance.backends import lands, through
from tests.nic_offload.rig import PAGE, Side, Way, wait_until

if TYPE_CHECKING:
    from tests.conformance.backends import Gate, Stage


def test_each_link_finds_the_bytes_of_the_one_before(stage: Stage, gate: Gate) -> None:
    """Out through one endpoint and, chained to that, back in through another: 30 times, into a target never cleared."""
    near, far = stage.near, stage.far
    again = through(near, far)
    rng = random.Random(1)
    put, got = stage.counter(), stage.counter()
    for turn in range(30):
        length = rng.choice([1, 64, 5000, 70_000])
        block = rng.randbytes(length)
        near.fill(0, block)
        first, second, third = 3 * turn, 3 * turn + 1, 3 * turn + 2
        again.arm(
            again.notify(third, 0, turn + 1, fires=(got, turn + 1)),
            again.get(second, length, target=500_000, fires=(put, turn + 1), completion=got),
            stage.there.put(first, length, fires=(gate.counter, turn + 1), completion=put),
        )
        if turn % 2:
            stage.there.fence()  # by then a NIC has them
        gate.raise_to(turn + 1)
        lands(far.word(0), turn + 1)
        assert near.bytes_at(500_000, length) == block
        near.all_final([first, second, third])
    stage.holds_nothing()


@pytest.mark.parametrize("flagged", [False, True])
def test_fan_in_waits_for_the_last(stage: Stage, gate: Gate, *, flagged: bool) -> None:
    """Ten puts with thresholds of their own; the notify comes after all of them."""
    near, far, there = stage.near, stage.far, stage.there
    rng = random.Random(2)
    moved = stage.counter()
    for turn in range(6):
        block = rng.randbytes(10 * PAGE)
        near.fill(0, block)
        tags = range(11 * turn, 11 * turn + 10)
        start = 10 * turn
        there.arm(there.notify(tags[-1] + 1, 0, turn + 1, fires=(moved, 10 * (turn + 1))))
        there.arm(
            *(
                there.put(
                    tag,
                    PAGE,
                    source=i * PAGE,
                    target=i * PAGE,
                    flag=(10 + i, turn + 1) if flagged else None,
                    fires=(gate.counter, start + i + 1),
                    completion=moved,
                )
                for i, tag in enumerate(tags)
            )
        )
        gate.raise_to(start + 9)
        near.all_final(tags[:9])
        stage.settle(gate)
        assert far.word(0).load() == turn
        gate.raise_to(start + 10)
        lands(far.word(0), turn + 1)
        assert far.bytes_at(0, 10 * PAGE) == block
        if flagged:
            assert [far.word(10 + i).load() for i in range(10)] == [turn + 1] * 10


def test_fan_out_fires_all_that_wait(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    block = random.Random(3).randbytes(100_000)
    near.fill(0, block)
    moved = stage.counter()
    there.arm(*(there.notify(tag, tag, 5, fires=(moved, 1)) for tag in range(1, 60)))
    stage.settle()
    assert not any(far.word(tag).load() for tag in range(1, 60))
    there.arm(there.put(0, len(block), fires=(gate.counter, 1), completion=moved))
    gate.raise_to(1)
    wait_until(lambda: any(far.word(tag).load() for tag in range(1, 60)), "the first of them")
    assert far.bytes_at(0, len(block)) == block
    for tag in range(1, 60):
        lands(far.word(tag), 5)


def test_a_chain_passes_through_two_peers(stage: Stage, gate: Gate) -> None:
    """The bytes go to one, and the other is notified."""
    near, far = stage.near, stage.far
    third = Side(stage.provider, deferred_work=stage.backend.deferred_work, remote_read=True)
    try:
        way = Way.between(Side.more(near), third)
        moved = stage.counter()
        for turn in range(1, 11):
            block = bytes([turn]) * 30_000
            near.fill(0, block)
            way.arm(way.notify(100 + turn, 0, turn, fires=(moved, turn)))
            stage.there.arm(stage.there.put(turn, 30_000, fires=(gate.counter, turn), completion=moved))
            gate.raise_to(turn)
            lands(third.word(0), turn)
            assert far.bytes_at(0, 30_000) == block
            near.all_final([turn, 100 + turn])
    finally:
        near.fabric.close()
        third.close()


def test_a_chain_of_a_hundred_links_completes(stage: Stage, gate: Gate) -> None:
    """Armed last link first; each writes its number into the same word, so the last value shows the order."""
    there, far = stage.there, stage.far
    counters = [stage.counter() for _ in range(100)]
    before = [gate.counter, *counters]
    for tag in range(99, -1, -1):
        there.arm(there.notify(tag, tag, tag + 1, fires=(before[tag], 1), completion=counters[tag]))
    stage.settle()
    assert not far.word(0).load()
    gate.raise_to(1)
    lands(far.word(99), 100)
    assert [far.word(tag).load() for tag in range(100)] == list(range(1, 101))
    stage.near.all_final(range(100))
    assert [counter.value() for counter in counters] == [1] * 100


def test_counters_are_added_to_and_set(stage: Stage, gate: Gate) -> None:
    """Put -> add 5 -> set another to 1000 -> notify, and nothing at a threshold one higher."""
    there, far = stage.there, stage.far
    moved, added, put_to = stage.counter(), stage.counter(), stage.counter()
    there.arm(
        there.notify(1, 1, 7, fires=(put_to, 1000)),
        there.notify(2, 2, 7, fires=(put_to, 1001)),
        there.notify(3, 3, 7, fires=(added, 6)),
        CounterMove(4, put_to, 1000, trigger=added, threshold=5, sets=True),
        CounterMove(5, added, 5, trigger=moved, threshold=1),
        there.put(6, 500, fires=(gate.counter, 1), completion=moved),
    )
    stage.settle()
    assert (added.value(), put_to.value()) == (0, 0)
    gate.raise_to(1)
    lands(far.word(1), 7)
    stage.near.all_final([1, 4, 5, 6])
    stage.settle(gate)
    assert (moved.value(), added.value(), put_to.value()) == (1, 5, 1000)
    assert (far.word(2).load(), far.word(3).load()) == (0, 0)
    stage.there.arm(CounterMove(7, added, 1), CounterMove(8, put_to, 2000, sets=True))
    lands(far.word(2), 7)
    lands(far.word(3), 7)
    stage.near.all_final(range(1, 9))
    stage.holds_nothing()


def test_many_moves_add_up(stage: Stage, gate: Gate) -> None:
    total = stage.counter()
    rng = random.Random(5)
    steps = [rng.randrange(1, 1000) for _ in range(200)]
    stage.there.arm(
        *(
            CounterMove(tag, total, step, trigger=gate.counter, threshold=1 + tag % 7)
            for tag, step in enumerate(steps)
        ),
        stage.there.notify(1000, 0, 7, fires=(total, sum(steps))),
    )
    for value in range(1, 8):
        assert not stage.far.word(0).load()
        gate.raise_to(value)
    lands(stage.far.word(0), 7)
    stage.near.all_final([*range(200), 1000])
    assert total.value() == sum(steps)


def test_a_move_never_decreases_a_word(stage: Stage) -> None:
    """A counter only grows: setting it to less than it has is no movement."""
    if stage.backend.nic_counts:
        pytest.skip("a NIC sets its counter to what it is told")
    counter = stage.counter()
    counter.add(100)
    stage.there.arm(CounterMove(1, counter, 50, sets=True))
    stage.near.final(1)
    assert counter.value() == 100


def test_a_peer_pulls_when_notified_and_reports_it(stage: Stage, gate: Gate) -> None:
    """The storage side arms gets that its peer's notify fires, and acknowledges; then it makes no more calls."""
    near, far, there, back = stage.near, stage.far, stage.there, stage.back
    rng = random.Random(6)
    sizes = [rng.choice([8, 999, 40_000]) for _ in range(12)]
    told = far.fabric.open_counter(FlagWord(far.word(0).address))
    back.arm(
        *(
            back.get(i, size, source=0, target=i * 40_000, flag=(i, i + 1), fires=(told, i + 1))
            for i, size in enumerate(sizes)
        )
    )
    for i, size in enumerate(sizes):
        block = rng.randbytes(size)
        near.fill(0, block)
        there.arm(there.notify(i, 0, i + 1, fires=(gate.counter, i + 1)))
        gate.raise_to(i + 1)
        lands(near.word(i), i + 1)
        assert far.bytes_at(i * 40_000, size) == block
    far.all_final(range(len(sizes)))


def test_a_get_is_acknowledged_through_a_chain(stage: Stage, gate: Gate) -> None:
    """Get -> count -> notify: the owner may reuse the memory, as all of it has been read."""
    near, far, there = stage.near, stage.far, stage.there
    got = stage.counter()
    for turn in range(10):
        block = random.Random(turn).randbytes(8 * PAGE)
        far.fill(0, block)
        tags = range(10 * turn, 10 * turn + 8)
        there.arm(there.notify(tags[-1] + 1, 0, turn + 1, fires=(got, 8 * (turn + 1))))
        there.arm(
            *(
                there.get(
                    tag,
                    PAGE,
                    source=i * PAGE,
                    target=i * PAGE,
                    fires=(gate.counter, turn + 1),
                    completion=got,
                )
                for i, tag in enumerate(tags)
            )
        )
        gate.raise_to(turn + 1)
        lands(far.word(0), turn + 1)
        far.fill(0, bytes(8 * PAGE))
        assert near.bytes_at(0, 8 * PAGE) == block
