"""Closing an endpoint ends, for certain, everything that goes through it, in both directions."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import AckWatch, Landing, watch_acks, watch_landings
from tests.nic_offload.rig import PAGE, Pair, Side, Way, after_ms, needs_ends_of_their_own, wait_until

CYCLES = 30
PUTS = 300


def test_closing_the_source_with_hundreds_in_flight_frees_it(provider: str) -> None:
    """After the close the source may be overwritten: not a byte of that arrives."""
    with Pair(provider) as pair:
        near, far, flag = pair.near, pair.far, pair.flags[0]
        for cycle in range(CYCLES):
            side = Side.more(near)
            way = Way.between(side, far)
            length = (3, 5000, 40_000)[cycle % 3]
            span = length * (near.length // length)
            near.fill(0, bytes([cycle + 1]) * near.length)
            flag.store(cycle)
            way.arm(
                *(
                    way.put(
                        tag,
                        length,
                        target=tag * length % span,
                        flag=(tag, cycle + 1),
                        fires=(flag, cycle + 1 + tag // 200),
                    )
                    for tag in range(PUTS)
                )
            )
            flag.store(cycle + 1)  # 100 of them still wait
            near.wait(lambda: bool(near.events), "the first event")
            side.endpoint.close()
            near.fill(0, b"\xff" * near.length)
            assert near.fabric.statistics().waiting == 0
            pair.there.fence()
            near.reap()
            count = len(near.events)
            assert b"\xff" not in far.bytes_at(0, far.length)
            flag.store(1000 + cycle)
            pair.there.fence()
            pair.there.fence()
            near.reap()
            assert len(near.events) == count + 2  # the fences: of a closed endpoint nothing more is told
            assert b"\xff" not in far.bytes_at(0, far.length)
            for tag in range(PUTS):
                assert far.word(tag).load() <= cycle + 1
            near.events.clear()
        near.region.close()  # nothing uses it
        near.endpoint.close()
        assert near.fabric.statistics().in_flight == 0


def test_closing_the_target_stops_incoming_writes(provider: str) -> None:
    """The source continues to send; after the close the target does not change, on any page."""
    needs_ends_of_their_own(provider)
    with Pair(provider) as pair:
        near, far = pair.near, pair.far
        near.fill(0, b"\xaa" * near.length)
        for cycle in range(CYCLES):
            side = Side.more(far)
            sender = Side.more(near)
            way = Way.between(sender, side)
            length = (8, 5000, 40_000)[cycle % 3]
            span = length * (far.length // length)
            base = PUTS * cycle
            way.arm(
                *(
                    way.put(base + i, length, target=i * length % span, flag=(i, base + i + 1))
                    for i in range(PUTS)
                )
            )
            wait_until(lambda: far.word(0).load() != 0, "the first flag")
            side.endpoint.close()
            far.fill(0, bytes(far.length + PAGE))
            way.arm(*(way.put(base + i, length, flag=(i, 1)) for i in range(20)))
            pair.there.fence()
            pair.back.fence()
            pair.there.fence()
            clean = far.bytes_at(0, far.length + PAGE - 8)  # the last word is the fence's
            assert clean == bytes(len(clean))
            sender.endpoint.close()
        near.region.close()
        far.region.close()


def test_closing_one_endpoint_does_not_affect_the_other(pair: Pair) -> None:
    """Transfers through one endpoint continue when the other is closed."""
    near, flag = pair.near, pair.flags[0]
    other = Side.more(near)
    way = Way.between(other, pair.far)
    way.arm(*(way.put(tag, 4000, fires=(flag, 1)) for tag in range(0, 200, 2)))
    pair.there.arm(*(pair.there.put(tag, 4000, flag=(0, 7), fires=(flag, 1)) for tag in range(1, 200, 2)))
    flag.store(1)
    other.endpoint.close()
    finals = near.all_final(range(1, 200, 2))
    assert {finals[tag].kind for tag in range(1, 200, 2)} == {EventKind.DONE}


def slot_watch(pair: Pair, slot: int, length: int, deadline_ns: int = 0) -> Landing:
    return Landing(
        tag=slot,
        endpoint=pair.far.endpoint,
        word=pair.far.word(slot).address,
        generation=7,
        payload=pair.far.region.address,
        length=length,
        peer=pair.back.peer,
        ack_target=pair.back.word_target(slot),
        ack_key=pair.back.key,
        ack_value=7 << 8 | 1,
        deadline_ns=deadline_ns,
    )


def test_landed_puts_stay_landed_and_others_fail(provider: str) -> None:
    """Few of a hundred checksums of 8 MiB are done when the endpoint is closed; if all are, it tries again."""
    needs_ends_of_their_own(provider)
    assert any(close_while_summing(provider) for _ in range(8))


def close_while_summing(provider: str) -> bool:
    """Whether the endpoint was closed before all checksums were made; the promises hold either way."""
    length, landed, watched = 8 << 20, 100, 120
    with Pair(provider, length) as pair:
        far = pair.far
        block = os.urandom(length)
        far.fill(0, block)
        for slot in range(landed):
            far.word(slot).store(7)
        watch_landings(far.fabric, [slot_watch(pair, slot, length) for slot in range(watched)])
        wait_until(lambda: far.fabric.statistics().landed == landed, "the flags are seen")
        far.endpoint.close()
        far.reap()
        summed = len([event for event in far.events if event.kind == EventKind.LANDED])
        finals = far.all_final(range(watched))
        assert {(finals[i].kind, finals[i].value) for i in range(landed)} == {
            (EventKind.LANDED, crc32c(block))
        }
        assert {(finals[i].kind, finals[i].status) for i in range(landed, watched)} == {
            (EventKind.WATCH_FAILED, -errno.ECANCELED)
        }
        assert len(far.events) == watched
        far.region.close()
    return summed < landed


def test_ack_watches_of_a_closed_endpoint_are_dropped(pair: Pair) -> None:
    near = pair.near
    watches = [
        AckWatch(tag, near.endpoint, near.word(tag).address, 7, after_ms(60_000), 3) for tag in range(50)
    ]
    watch_acks(near.fabric, watches)
    other = Side.more(near)
    near.endpoint.close()
    near.word(3).store(7 << 8 | 3)
    Way.between(other, pair.far).fence()
    assert near.fabric.statistics().watches == 0
    assert not [event for event in near.events if event.tag < 50]


def test_a_closed_handle_is_refused(pair: Pair) -> None:
    put = pair.there.put(1, 8)
    pair.near.endpoint.close()
    pair.near.endpoint.close()
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        pair.there.arm(put)


def test_a_fabric_can_be_closed_with_everything_in_flight(provider: str) -> None:
    needs_ends_of_their_own(provider)
    for _ in range(5):
        with Pair(provider) as pair:
            flag = pair.flags[0]
            put, fires = pair.there.put, (flag, 2)
            pair.there.arm(*(put(tag, 30_000, flag=(tag % 400, 1)) for tag in range(400)))
            pair.there.arm(*(put(tag, 30_000, fires=fires) for tag in range(400, 500)))
            watch_landings(pair.far.fabric, [slot_watch(pair, slot, 30_000) for slot in range(100)])
            pair.near.wait(lambda pair=pair: bool(pair.near.events), "the first event")  # type: ignore[misc]


CALLERS = """
import contextlib, socket, struct, sys
from nic_offload.fabric import EventKind
from tests.nic_offload.rig import Pair

with Pair(sys.argv[1]) as pair:
    for cycle in range(5):
        endpoint = pair.near.fabric.open_endpoint()
        family, port, host = struct.unpack("=H2s4s", endpoint.address()[:8])
        assert family == socket.AF_INET
        where = socket.inet_ntoa(host), int.from_bytes(port, "big")
        callers = [socket.create_connection(where) for _ in range(5)]
        pair.there.fence()  # they are accepted
        endpoint.close()
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.send(bytes(64))
            caller.close()
        pair.there.arm(pair.there.put(cycle, 4, flag=(0, cycle + 1)))
        assert pair.near.final(cycle).kind == EventKind.DONE
"""


@pytest.mark.parametrize("provider", ["net", "tcp;ofi_rxm"], indirect=True)
def test_an_unidentified_caller_does_no_harm_after_the_close(provider: str) -> None:
    """The provider frees the endpoint's listener and keeps its request, which points to it."""
    environment = os.environ | {
        "MALLOC_PERTURB_": "165"
    }  # what is freed is overwritten, and using it is seen
    ended = subprocess.run(
        [sys.executable, "-c", CALLERS, provider],
        check=False,
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
