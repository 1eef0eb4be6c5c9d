"""Staging: which slots are free, on its own; and the way from a GPU to a peer, with a stand-in for the GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nic_offload.errors import KvError, StagingFull
from nic_offload.fabric import EventKind
from nic_offload.staging import PinnedStaging, SlotRing, StagingSlot, Use
from tests.nic_offload.fake_cupy import FakeStream
from tests.nic_offload.rig import Pair, wait_until

if TYPE_CHECKING:
    from nic_offload.fabric import Region
    from nic_offload.trigger import TriggeredPut
    from tests.nic_offload.fake_cupy import FakeCupy

PAGE = 4096


class Rung:
    """The slots' words, which only streams ring."""

    def __init__(self, slots: int) -> None:
        self.words = [0] * slots
        self.ring = SlotRing(slots, self.words.__getitem__)

    def copy_done(self, use: Use) -> None:
        self.words[use.slot] = use.threshold


def test_a_slot_comes_back_when_its_put_has_ended_and_its_copy_is_done() -> None:
    rung = Rung(1)
    use = rung.ring.reserve()
    assert use == (0, 1)
    rung.ring.stage(use)
    rung.copy_done(use)
    with pytest.raises(StagingFull, match="All 1 staging slots"):
        rung.ring.reserve()
    rung.ring.release(use)
    assert rung.ring.reserve() == (0, 2)


def test_a_put_that_is_cancelled_before_its_copy_ran_keeps_the_slot_until_the_copy_ran() -> None:
    rung = Rung(1)
    use = rung.ring.reserve()
    rung.ring.stage(use)
    rung.ring.release(use)
    assert rung.ring.free_count == 0
    with pytest.raises(StagingFull):
        rung.ring.reserve()
    rung.copy_done(use)
    assert rung.ring.reserve() == (0, 2)


def test_a_slot_that_was_never_staged_comes_back_at_once_under_another_threshold() -> None:
    rung = Rung(1)
    first = rung.ring.reserve()
    rung.ring.release(first)
    second = rung.ring.reserve()
    assert second.threshold > first.threshold
    with pytest.raises(KvError, match="that use of it is over"):
        rung.ring.release(first)


def test_what_makes_no_sense_is_refused() -> None:
    rung = Rung(2)
    use = rung.ring.reserve()
    with pytest.raises(KvError, match="Slot 7 can't be staged"):
        rung.ring.stage(Use(7, 1))
    with pytest.raises(KvError, match="Slot -1 can't be released"):
        rung.ring.release(Use(-1, 0))
    rung.ring.stage(use)
    with pytest.raises(KvError, match="can't be staged: it is staged"):
        rung.ring.stage(use)
    rung.ring.release(use)
    with pytest.raises(KvError, match="can't be released: it is draining"):
        rung.ring.release(use)


STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "stage", "copy", "end"]), st.integers(0, 20)), max_size=80
)


@given(st.integers(1, 4), STEPS)
def test_no_slot_is_ever_two_things_at_a_time(slots: int, steps: list[tuple[str, int]]) -> None:
    """Against sets of what a slot still waits for: the end of its put, and the copy in a stream."""
    rung = Rung(slots)
    armed: dict[Use, bool] = {}  # by use: whether it was staged
    copying: list[Use] = []  # in stream order
    seen: set[Use] = set()
    for step, number in steps:
        if step == "reserve":
            busy = {use.slot for use in (*armed, *copying)}
            assert rung.ring.free_count == slots - len(busy)
            if len(busy) == slots:
                with pytest.raises(StagingFull):
                    rung.ring.reserve()
                continue
            use = rung.ring.reserve()
            assert use.slot not in busy
            assert use not in seen
            assert use.threshold > rung.words[use.slot]
            seen.add(use)
            armed[use] = False
        elif step == "copy" and copying:
            rung.copy_done(copying.pop(0))
        elif step in {"stage", "end"} and armed:
            use = list(armed)[number % len(armed)]
            if step == "end":
                rung.ring.release(use)
                del armed[use]
            elif not armed[use]:
                rung.ring.stage(use)
                armed[use] = True
                copying.append(use)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, PAGE), (4097, PAGE), (1, 0), (1, 100), (1, -PAGE)])
def test_a_staging_buffer_of_another_shape_is_refused(cupy: FakeCupy, slots: int, slot_bytes: int) -> None:
    with pytest.raises(KvError, match="staging"):
        PinnedStaging(slots, slot_bytes)
    assert not cupy.mapped


def test_nothing_stays_mapped_when_opening_fails(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(length: int) -> None:
        raise KvError(f"no {length} bytes")

    monkeypatch.setattr("nic_offload.staging.allocate", refuse)
    with pytest.raises(KvError, match="no 8192 bytes"):
        PinnedStaging(2, PAGE)
    assert not cupy.mapped


def test_a_length_that_does_not_fit_is_refused(cupy: FakeCupy) -> None:
    with PinnedStaging(1, PAGE) as staging:
        for length in (0, PAGE + 1):
            with pytest.raises(KvError, match="from 1 to 4096 bytes"):
                staging.reserve(length)
        slot = staging.reserve(PAGE)
        with pytest.raises(KvError, match="from 1 to 4096 bytes"):
            staging.stage(slot, 0, PAGE + 1)
        assert not cupy.current.work


def test_each_slot_holds_its_own_block_until_its_copy_ran(cupy: FakeCupy) -> None:
    with PinnedStaging(3, PAGE) as staging:
        stream = FakeStream(cupy)
        slots = [staging.reserve(PAGE) for _ in range(3)]
        blocks = [cupy.zeros(PAGE, "u1") for _ in slots]
        for number, (slot, block) in enumerate(zip(slots, blocks, strict=True), 1):
            block.host[:] = number
            staging.stage(slot, block.data.ptr, PAGE, stream)
            with pytest.raises(KvError, match="it is staged"):
                staging.stage(slot, block.data.ptr, PAGE, stream)
            staging.release(slot)  # its put was cancelled
        with pytest.raises(StagingFull):
            staging.reserve(1)
        assert staging.memory[:] == bytes(3 * PAGE)
        stream.run()
        assert staging.memory[:] == b"".join(bytes([number]) * PAGE for number in (1, 2, 3))
        assert staging.slots.free_count == 3


def test_a_block_leaves_the_gpu_with_no_call_after_stage(cupy: FakeCupy, provider: str) -> None:
    """The agent sends what the stream has copied, when the stream has copied it: slots are used many times."""
    length, rounds = PAGE - 5, 40
    with Pair(provider) as pair, PinnedStaging(3, PAGE) as staging:
        region = pair.near.fabric.register(staging.memory, remote_write=False)
        stream = FakeStream(cupy)
        block = cupy.zeros(PAGE, "u1")
        used: set[int] = set()
        for turn in range(1, rounds):
            slot = staging.reserve(length)
            used.add(slot.use.slot)
            pair.there.arm(put_of(pair, slot, turn, length, region))
            wanted = os.urandom(length)
            staging.stage(slot, block.data.ptr, length, stream)
            block.host[:length] = memoryview(wanted)  # written before the stream gets there
            assert pair.far.word(0).load() == turn - 1
            stream.run()
            wait_until(lambda turn=turn: pair.far.word(0).load() == turn, "the flag")  # type: ignore[misc]
            assert pair.far.bytes_at(0, length) == wanted
            assert pair.near.final(turn).kind == EventKind.DONE
            staging.release(slot)
        assert used == {0, 1, 2}
        region.close()
    assert not cupy.mapped


def put_of(pair: Pair, slot: StagingSlot, turn: int, length: int, region: Region) -> TriggeredPut:
    put = pair.there.put(turn, length, flag=(0, turn))
    return put._replace(
        region=region, source=slot.source, trigger=pair.near.counter(slot.word), threshold=slot.threshold
    )
