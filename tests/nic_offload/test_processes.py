"""Other processes: they take part, die at any moment, or are forked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import arm
from tests.nic_offload.far import SLOT_BYTES, Far, about, slot_block, way_to
from tests.nic_offload.rig import PAGE, Pair, Side, needs_ends_of_their_own, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 400


def check_slots(side: Side) -> int:
    """Every slot with a flag has all of its bytes; returns their number."""
    seen = 0
    for slot in range(SLOTS):
        value = side.word(slot).load()
        if not value:
            continue
        block = slot_block(slot)
        assert value == slot + 1
        assert side.bytes_at(slot * SLOT_BYTES, len(block)) == block, f"slot {slot} of {len(block)} bytes"
        seen += 1
    return seen


def test_another_process_puts_and_each_flag_has_its_bytes(provider: str) -> None:
    with Side(provider, SLOTS * SLOT_BYTES) as here, Far(provider, 4 << 20) as far:
        far.tell(**about(here), slots=SLOTS)
        for slot in range(SLOTS):
            word, block = here.word(slot), slot_block(slot)
            wait_until(lambda word=word: word.load() != 0, f"slot {slot}")  # type: ignore[misc]
            assert here.bytes_at(slot * SLOT_BYTES, len(block)) == block


@pytest.mark.parametrize("after", [1, 150])
def test_a_source_killed_in_a_stream_leaves_no_flag_without_its_bytes(provider: str, after: int) -> None:
    with Side(provider, SLOTS * SLOT_BYTES) as here, Far(provider, 4 << 20) as far:
        far.tell(**about(here), slots=SLOTS)
        word = here.word(after)
        wait_until(lambda: word.load() != 0, f"slot {after}")
        far.kill()
        check_slots(here)
        here.endpoint.close()
        assert check_slots(here) > after // 2


def test_the_next_source_after_a_killed_one_is_served(provider: str) -> None:
    with Side(provider, SLOTS * SLOT_BYTES) as here, Far(provider, 4 << 20) as far:
        far.tell(**about(here), slots=SLOTS)
        word = here.word(100)
        wait_until(lambda: word.load() != 0, "a flag")
        far.kill()
        here.endpoint.close()
        here.endpoint = here.fabric.open_endpoint()
        for slot in range(SLOTS):
            here.word(slot).store(0)
        with Far(provider, 4 << 20) as another:
            another.tell(**about(here), slots=3)
            wait_until(lambda: all(here.word(slot).load() for slot in range(3)), "the next one's blocks")


def test_closing_the_target_ends_another_processs_puts(provider: str) -> None:
    with Side(provider, SLOTS * SLOT_BYTES) as here, Far(provider, 4 << 20) as far:
        far.tell(**about(here), slots=SLOTS)
        word = here.word(20)
        wait_until(lambda: word.load() != 0, "a flag")
        here.endpoint.close()
        check_slots(here)
        here.fill(0, bytes(here.length + PAGE))
        here.endpoint = here.fabric.open_endpoint()
        with Far(provider, 4 << 20) as another:  # takes a while, and all of the fabric
            another.tell(**about(here), slots=1)
            first = here.word(0)
            wait_until(lambda: first.load() != 0, "the next one's block")
        block = slot_block(0)
        assert here.bytes_at(0, len(block)) == block
        rest = here.bytes_at(len(block), here.length - len(block))
        assert not any(rest)
        assert not any(here.word(slot).load() for slot in range(1, SLOTS))


def test_a_target_killed_in_a_stream_ends_every_put(provider: str) -> None:
    """In an event, or by the endpoint's close."""
    count, length = 600, 60_001
    with Side(provider, 8 << 20) as here, Far(provider, 8 << 20) as far:
        way = way_to(here, far.said)
        here.fill(0, os.urandom(length))
        way.arm(*(way.put(tag, length, target=tag % 100 * length, flag=(0, tag + 1)) for tag in range(count)))
        here.wait(lambda: len(here.finals()) >= 20, "the first puts")
        far.kill()
        way.arm(*(way.put(count + tag, length, flag=(0, 1)) for tag in range(50)))
        here.endpoint.close()
        here.reap()
        for event in here.finals().values():
            if event.kind == EventKind.FAILED:
                assert event.status not in {-errno.ECANCELED, -errno.ETIMEDOUT, -errno.EBADMSG}
        here.region.close()  # nothing reads from it any more
        wait_until(lambda: here.fabric.statistics().in_flight == 0, "an empty wire")


def test_a_target_dead_before_the_flag_ends_every_put(provider: str) -> None:
    with Pair(provider) as pair, Far(provider, 1 << 20) as far:
        way, flag = way_to(Side.more(pair.near), far.said), pair.flags[0]
        way.arm(*(way.put(tag, 5000, flag=(0, 7), fires=(flag, 1)) for tag in range(20)))
        way.fence()
        far.kill()
        flag.store(1)
        pair.there.arm(pair.there.put(100, 5000, flag=(0, 7)))
        assert pair.near.final(100).kind == EventKind.DONE  # others are served meanwhile
        way.endpoint.close()
        pair.near.region.close()


def run_forked(action: Callable[[], object]) -> int:
    """The exit status of a child in which the action should be refused with ECHILD: 0 if it is."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
        except FabricError as error:
            status = 0 if str(-errno.ECHILD) in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return status


def test_a_forked_child_is_refused_and_harms_nothing(pair: Pair) -> None:
    near, there, flag = pair.near, pair.there, pair.flags[0]
    near.fill(0, b"parent's")
    there.arm(there.put(1, 8, flag=(0, 7), fires=(flag, 1)))
    put = there.put(2, 8)
    actions: list[Callable[[], object]] = [
        lambda: arm(near.fabric, [put]),
        near.fabric.reap,
        near.fabric.statistics,
        near.fabric.open_endpoint,
        lambda: near.fabric.cancel([1]),
        lambda: near.fabric.add_peer(b"x" * 16),
        lambda: near.fabric.remove_peer(there.peer),
        lambda: near.fabric.register(bytearray(100)),
        near.region.close,
        near.endpoint.close,
        near.fabric.close,
    ]
    assert [run_forked(action) for action in actions] == [0] * len(actions)
    assert not near.of(1)
    flag.store(1)
    assert near.final(1).kind == EventKind.DONE
    wait_until(lambda: pair.far.word(0).load() == 7, "the flag")
    assert pair.far.bytes_at(0, 8) == b"parent's"


def test_a_stopped_peer_does_not_delay_the_others(provider: str) -> None:
    """It accepts nothing; its puts fill all queues. The others' are sent all the same."""
    length = 1 << 20
    with Pair(provider) as pair, Far(provider, 1 << 20) as far:
        near = pair.near
        stopped = Side.more(near)
        way = way_to(stopped, far.said)
        way.fence()
        far.stop()
        way.arm(*(way.put(tag, length, flag=(0, 7)) for tag in range(200)))
        pair.there.arm(*(pair.there.put(tag, 5000, flag=(0, 7)) for tag in range(1000, 1100)))
        finals = near.all_final(range(1000, 1100))
        assert {finals[tag].kind for tag in range(1000, 1100)} == {EventKind.DONE}
        stopped.endpoint.close()
        near.region.close()


FORGETFUL = """
import sys
from tests.nic_offload.rig import Pair
pair = Pair(sys.argv[1])
pair.there.arm(*(pair.there.put(i, 1 << 16, flag=(0, i + 1)) for i in range(500)))
pair.there.arm(pair.there.put(501, 8, fires=(pair.flags[0], 1)))
"""


def test_a_process_that_forgets_to_close_still_ends(provider: str) -> None:
    needs_ends_of_their_own(provider)
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", FORGETFUL, provider], check=False, capture_output=True, timeout=60
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
