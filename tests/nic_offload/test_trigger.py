"""When a put fires: at its threshold, once, without any call, and not at all once it is cancelled."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nic_offload.fabric import EventKind
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.trigger import AckWatch, watch_acks
from tests.nic_offload.rig import PAGE, Pair, after_ms, wait_until

if TYPE_CHECKING:
    from nic_offload.flags import FlagWord

STORE = """
import sys
from nic_offload.flags import FlagWords
FlagWords.open(sys.argv[1])[0].store(int(sys.argv[2]))
"""


def test_a_put_fires_never_early_and_never_twice(pair: Pair, flag: FlagWord) -> None:
    near, there = pair.near, pair.there
    near.fill(0, b"block")
    there.arm(there.put(1, 5, flag=(0, 7), fires=(flag, 3), report_fired=True))
    flag.store(2)
    there.fence()
    assert near.fabric.statistics().fired == 1  # the fence
    assert near.fabric.statistics().waiting == 1
    assert not near.of(1)
    assert pair.far.bytes_at(0, 5) == bytes(5)

    flag.store(3)
    assert near.final(1).kind == EventKind.DONE
    wait_until(lambda: pair.far.word(0).load() == 7, "the flag")
    assert pair.far.bytes_at(0, 5) == b"block"
    pair.far.fill(0, b"taken")
    pair.far.word(0).store(0)
    for value in range(4, 50):
        flag.store(value)
        if value % 10 == 0:
            there.fence()
    there.fence()
    assert near.kinds(1) == [EventKind.FIRED, EventKind.DONE]
    assert near.fabric.statistics().fired == 2 + 5  # the put and the fences
    assert (pair.far.bytes_at(0, 5), pair.far.word(0).load()) == (b"taken", 0)


def test_a_word_already_past_the_threshold_fires_at_once(pair: Pair, flag: FlagWord) -> None:
    flag.store(100)
    pair.there.arm(pair.there.put(1, 9, fires=(flag, 3)))
    assert pair.near.final(1).kind == EventKind.DONE


def test_a_word_that_decreases_un_fires_nothing(pair: Pair, flag: FlagWord) -> None:
    pair.there.arm(*(pair.there.put(tag, 9, fires=(flag, tag)) for tag in (1, 2)))
    flag.store(1)
    assert pair.near.final(1).kind == EventKind.DONE
    flag.store(0)
    pair.there.fence()
    flag.store(2)
    pair.near.final(2)
    assert pair.near.fabric.statistics().fired == 3


def test_64_bit_thresholds_are_compared_as_such(pair: Pair, flag: FlagWord) -> None:
    high = 1 << 63
    pair.there.arm(pair.there.put(1, 9, fires=(flag, high)))
    flag.store(high - 1)
    pair.there.fence()
    assert pair.near.fabric.statistics().fired == 1
    flag.store(high)
    assert pair.near.final(1).kind == EventKind.DONE


def test_a_store_in_another_process_fires_without_a_call_in_this_one(pair: Pair) -> None:
    pair.near.fill(0, b"from afar")
    pair.there.arm(pair.there.put(1, 9, flag=(0, 5), fires=(pair.flags[0], 3)))
    subprocess.run([sys.executable, "-c", STORE, pair.flags.path, "2"], check=True, timeout=30)
    pair.there.fence()
    assert pair.near.fabric.statistics().fired == 1
    subprocess.run([sys.executable, "-c", STORE, pair.flags.path, "3"], check=True, timeout=30)
    # Memory alone is looked at: no call into the arming fabric.
    wait_until(lambda: pair.far.word(0).load() == 5, "the flag")
    assert pair.far.bytes_at(0, 9) == b"from afar"
    pair.near.final(1)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(thresholds=st.lists(st.integers(1, 12), min_size=1, max_size=24), steps=st.sets(st.integers(1, 12)))
def test_puts_armed_in_any_order_fire_exactly_when_reached(
    pair: Pair, thresholds: list[int], steps: set[int]
) -> None:
    near, there, flag = pair.near, pair.there, pair.flags[0]
    near.events.clear()
    flag.store(0)
    tags = range(len(thresholds))
    there.arm(*(there.put(tag, 1 + tag, fires=(flag, thresholds[tag]), report_fired=True) for tag in tags))
    for value in sorted(steps | {12}):
        flag.store(value)
        there.fence()
        near.reap()
        fired = {event.tag for event in near.events if event.kind == EventKind.FIRED}
        assert {tag for tag in fired if tag in tags} == {tag for tag in tags if thresholds[tag] <= value}
    near.all_final(tags)
    for tag in tags:
        assert near.kinds(tag) == [EventKind.FIRED, EventKind.DONE]


def test_each_word_fires_only_its_own_puts(pair: Pair) -> None:
    words = pair.flags
    pair.there.arm(*(pair.there.put(i, 8, fires=(words[i], 1)) for i in range(64)))
    for i in range(0, 64, 3):
        words[i].store(1)
    pair.near.all_final(range(0, 64, 3))
    pair.there.fence()
    assert {tag for tag in pair.near.finals() if tag < 64} == set(range(0, 64, 3))
    assert pair.near.fabric.statistics().waiting == 64 - 22
    for i in range(64):
        words[i].store(1)
    pair.near.all_final(range(64))


def test_a_word_may_be_unmapped_once_no_put_waits_for_it(pair: Pair) -> None:
    for tag in range(0, 200, 2):
        with FlagWords.create(1) as words:
            pair.there.arm(*(pair.there.put(tag + i, 8, fires=(words[0], 1)) for i in range(2)))
            assert pair.near.fabric.cancel([tag, tag + 1]) == 2
    pair.there.fence()
    with FlagWords.create(1) as words:
        pair.there.arm(pair.there.put(200, 8, fires=(words[0], 1), deadline_ns=after_ms(5)))
        assert pair.near.final(200).status == -errno.ETIMEDOUT
    pair.there.fence()


def test_cancel_is_exact(pair: Pair, flag: FlagWord) -> None:
    near, there = pair.near, pair.there
    near.fill(0, b"never")
    there.arm(*(there.put(tag, 5, flag=(0, 7), fires=(flag, 3), report_fired=True) for tag in range(1, 11)))
    assert near.fabric.cancel(range(1, 10)) == 9
    near.reap()
    for tag in range(1, 10):  # the final event is there when cancel returns
        assert [(event.kind, event.status) for event in near.of(tag)] == [
            (EventKind.FAILED, -errno.ECANCELED)
        ]
    there.fence()
    flag.store(3)
    assert near.final(10).kind == EventKind.DONE
    there.fence()
    assert near.fabric.statistics().fired == 3  # the tenth and two fences
    assert near.fabric.statistics().cancelled == 9
    assert near.fabric.cancel([10]) == 0
    assert near.fabric.cancel(range(1, 11)) == 0
    assert near.fabric.cancel([]) == 0


def test_cancelled_puts_leave_nothing_behind_when_the_word_is_raised(pair: Pair, flag: FlagWord) -> None:
    pair.near.fill(0, b"never")
    pair.there.arm(pair.there.put(1, 5, flag=(0, 7), fires=(flag, 3)))
    assert pair.near.fabric.cancel([1]) == 1
    flag.store(99)
    pair.there.fence()
    pair.there.fence()
    assert pair.near.fabric.statistics().fired == 2
    assert pair.far.bytes_at(0, 5) == bytes(5)
    assert pair.far.word(0).load() == 0


@pytest.mark.parametrize(
    ("thresholds", "withdrawn"),
    [
        ([5, 1, 9, 3, 7, 2, 8, 4, 6, 10], (0,)),
        ([5, 1, 9, 3, 7, 2, 8, 4, 6, 10], (1, 2)),
        ([5, 1, 9, 3, 7, 2, 8, 4, 6, 10], (0, 5, 9)),
        # What takes the place of the one withdrawn comes from elsewhere and belongs further up.
        ([1, 10, 2, 11, 12, 3, 4], (3,)),
    ],
)
def test_cancelling_some_leaves_the_others_in_order(
    pair: Pair, thresholds: list[int], withdrawn: tuple[int, ...]
) -> None:
    near, there, flag = pair.near, pair.there, pair.flags[0]
    tags = range(len(thresholds))
    there.arm(*(there.put(tag, 8, fires=(flag, thresholds[tag])) for tag in tags))
    assert near.fabric.cancel(withdrawn) == len(withdrawn)
    for value in range(1, 13):
        flag.store(value)
        there.fence()
        left = [tag for tag in tags if thresholds[tag] > value and tag not in withdrawn]
        assert near.fabric.statistics().waiting == len(left)
    near.all_final(tags)
    failed = {event.tag for event in near.events if event.kind == EventKind.FAILED}
    assert failed == set(withdrawn)


def test_a_put_whose_flag_is_never_stored_ends_at_its_deadline(pair: Pair, flag: FlagWord) -> None:
    near, there = pair.near, pair.there
    near.fill(0, b"never")
    deadline_ns = after_ms(30)
    there.arm(there.put(1, 5, flag=(0, 7), fires=(flag, 3), deadline_ns=deadline_ns))
    event = near.final(1)
    assert (event.kind, event.status) == (EventKind.FAILED, -errno.ETIMEDOUT)
    assert event.time_ns >= deadline_ns
    flag.store(3)
    there.fence()
    there.fence()
    statistics = near.fabric.statistics()
    assert (statistics.fired, statistics.expired, statistics.waiting) == (2, 1, 0)
    assert pair.far.bytes_at(0, 5) == bytes(5)
    assert pair.far.word(0).load() == 0


def test_an_expired_deadline_lets_nothing_be_sent(pair: Pair, flag: FlagWord) -> None:
    flag.store(3)
    over_ns = after_ms(-1)
    pair.near.fill(0, b"never")
    pair.there.arm(
        pair.there.put(1, 5, deadline_ns=over_ns),
        pair.there.put(2, 5, fires=(flag, 3), deadline_ns=over_ns),
    )
    pair.near.all_final([1, 2])
    pair.there.fence()
    assert {pair.near.final(tag).status for tag in (1, 2)} == {-errno.ETIMEDOUT}
    assert pair.far.bytes_at(0, 5) == bytes(5)


def test_a_put_whose_checksum_takes_past_its_deadline_is_not_sent(provider: str) -> None:
    """The flag is in time, the checksum of 256 MiB is not."""
    length = 256 << 20
    with Pair(provider, PAGE) as pair:
        source = allocate(length)
        with pair.near.fabric.register(source) as region:
            pair.far.fill(0, b"canary")
            at = region.address
            small = pair.there.put(1, length, flag=(0, 7), crc32c=1, deadline_ns=after_ms(5))
            pair.there.arm(small._replace(region=region, source=at))
            event = pair.near.final(1)
            assert (event.kind, event.status) == (EventKind.FAILED, -errno.ETIMEDOUT)
            assert pair.far.bytes_at(0, 6) == b"canary"
        source.close()


def test_nothing_is_posted_after_its_deadline(pair: Pair) -> None:
    """Puts that are due at once and wait for each other: at most one passes its deadline as it is posted."""
    near, there = pair.near, pair.there
    for turn in range(100):
        near.events.clear()
        deadline_ns = after_ms(0.3 + 0.02 * turn)
        there.arm(*(there.put(tag, 65536, deadline_ns=deadline_ns) for tag in range(1, 65)))
        finals = near.all_final(range(1, 65))
        posted = [event.value for event in finals.values() if event.kind == EventKind.DONE]
        assert sum(posted_ns > deadline_ns for posted_ns in posted) <= 1


def test_a_single_word_is_put_once(pair: Pair) -> None:
    """Once it was put again when its own completion came, over whatever had been put there since.

    That is put by us as well. A store of the far side's own would prove nothing: a provider copies eight bytes with
    memcpy, which stores them twice, an instruction apart, and whoever stores between the two finds their value gone.
    """
    near, there = pair.near, pair.there
    for value in range(1, 200, 2):
        near.fill(0, (value + 1).to_bytes(8, "little"))
        there.arm(there.put(value, 0, flag=(0, value)), there.put(value + 1, 8, target=there.length))
        finals = near.all_final([value, value + 1])
        assert {finals[tag].kind for tag in (value, value + 1)} == {EventKind.DONE}
        there.arm(there.put(1000 + value, 0, flag=(1, value)))  # behind all that was put before
        wait_until(lambda value=value: pair.far.word(1).load() == value, "the last word")  # type: ignore[misc]
        assert pair.far.word(0).load() == value + 1


def test_watches_are_withdrawn_in_any_order(pair: Pair) -> None:
    """Each remaining one sees its own word, wherever in the list it is now."""
    near = pair.near
    draw = random.Random(7)
    for turn in range(20):
        count = 12
        generation = turn + 1
        watch_acks(
            near.fabric,
            [
                AckWatch(i, near.endpoint, near.region.address + near.word_offset(i), generation, 0, 1)
                for i in range(count)
            ],
        )
        gone = draw.sample(range(count), 6)
        for i in gone:
            assert near.fabric.cancel([i]) == 1
        near.reap()
        near.events.clear()
        left = [i for i in range(count) if i not in gone]
        for i in draw.sample(left, len(left)):
            near.word(i).store(generation << 8 | 1)
        near.wait(lambda: len(near.events) == len(left), "the words of those that are left")  # noqa: B023
        assert sorted((event.tag, event.kind) for event in near.events) == [
            (i, EventKind.ACKED) for i in left
        ]
        near.events.clear()
