"""Gets that a reader of the C core serves from the drive: without Python, and never with the wrong bytes."""

from __future__ import annotations

import fcntl
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Hit
from kvstore.limits import PAGE_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.wire.record import record_bytes
from nic_offload.errors import FabricError
from nic_offload.reader import Reader
from tests.client.test_cancelled_gets import paint, untouched
from tests.client.test_promises import put
from tests.conftest import ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HeldDrive, NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.node.node import Node
    from kvstore.storage.index import Entry

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
SHORT_S = 1.0
DEPTH = 1  # reads of a pipe that are under way together would take from it in any order
LENGTH = 50_000


class Held:
    """The reader's drive: reads are pending until the test supplies their bytes."""

    def __init__(self, node: NodeInProcess, drive: Path) -> None:
        self._node, self._drive = node, drive
        self._fd, self._writer = os.pipe()
        fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, 1 << 20)

        def swap(inside: Node) -> None:
            (drive,) = inside.store.drives
            reader = Reader(inside.fabric, self._fd, DEPTH, drive.record_format)
            inside.fetches.readers._of[drive] = reader

        node.call(swap)

    def entry(self, block: Block) -> Entry:
        def find(inside: Node) -> Entry:
            (connection,) = inside.connections.values()
            (entry,) = inside.store.lookup([(connection.tenant, block.key)])
            assert entry is not None
            return entry

        found: Entry = self._node.call(find)
        return found

    def record(self, entry: Entry) -> bytes:
        with self._drive.open("rb") as file:
            file.seek(entry.offset)
            return file.read(record_bytes(entry.length))

    def wait_asked(self, blocks: int) -> None:
        """Wait until the kernel is reading the records."""

        def asked(inside: Node) -> int:
            return sum(len(group.fetches) for group in inside.fetches.readers._groups.values())

        wait_until(lambda: self._node.call(asked) == blocks, "the reader has been asked")
        self._node.call(
            lambda inside: inside.fabric.cancel([1])
        )  # the progress thread has begun them by then

    def give(self, data: bytes) -> None:
        assert os.write(self._writer, data) == len(data)

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._fd)


@pytest.fixture
def held(node: NodeInProcess, tmp_path: Path) -> Iterator[Held]:
    one = Held(node, tmp_path / "node" / "drive-0.kv")
    yield one
    one.close()


class Getting:
    """A get in a thread of its own."""

    def __init__(self, rig: ClientWithBuffers, blocks: Sequence[Block], timeout_s: float = WAIT_S) -> None:
        self.outcomes: list[Any] = []
        self._wanted = [rig.wanted(block) for block in blocks]
        self._thread = threading.Thread(target=self._get, args=(rig, timeout_s))
        self._thread.start()

    def _get(self, rig: ClientWithBuffers, timeout_s: float) -> None:
        self.outcomes = rig.client.get(self._wanted, timeout_s=timeout_s)

    def wait(self) -> list[Any]:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.outcomes


def detach_all(node: Node) -> None:
    for one in list(node.connections.values()):
        node.detach(one)


def state(node: NodeInProcess) -> tuple[int, int, int, int]:
    """What is held for reads: hot memory, requested bytes of the drive, pinned extents, blocks being sent."""

    def told(inside: Node) -> tuple[int, int, int, int]:
        (drive,) = inside.store.drives
        return (
            inside.hot.shares.total_bytes,
            inside.fetches._reading_bytes,
            drive._extents.pinned,
            drive._sends.blocks + drive._traffic.in_flight,
        )

    found: tuple[int, int, int, int] = node.call(told)
    return found


def test_blocks_handed_to_the_reader_arrive_while_the_nodes_python_is_stopped(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held
) -> None:
    blocks = [rig.block(number, LENGTH) for number in range(3)]
    put(rig, blocks)
    records = [held.record(held.entry(block)) for block in blocks]
    paint(rig)
    getting = Getting(rig, blocks)
    held.wait_asked(3)
    go_on = threading.Event()
    standing = threading.Thread(target=lambda: node.call(lambda _: go_on.wait(WAIT_S)))
    standing.start()
    try:
        for record in records:
            held.give(record)
        outcomes = getting.wait()
    finally:
        go_on.set()
        standing.join(WAIT_S)
    assert outcomes == [Hit(block.key) for block in blocks]
    assert all(rig.is_exact(block) for block in blocks)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    assert node.call(lambda inside: len(inside.hot.shelf)) == 3, "they can be had from memory now"


def test_an_abandoned_get_receives_nothing_and_its_memory_is_kept_until_the_drive_is_done(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    record = held.record(held.entry(block))
    paint(rig)
    before = rig.client._core.link
    getting = Getting(rig, [block], SHORT_S)
    held.wait_asked(1)
    (outcome,) = getting.wait()
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.NODE_AWAY
    assert rig.client._core.link is before, "the node has confirmed it, though the drive has not answered"
    size = record_bytes(LENGTH)
    assert state(node) == (size, size, 1, 2), "the drive may write there still"
    held.give(record)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    assert untouched(rig)
    assert node.call(lambda inside: inside.hot.pages.statistics().kept) == 0


def test_memory_of_a_closed_client_is_kept_until_the_drive_is_done_with_it(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    record = held.record(held.entry(block))
    paint(rig)
    getting = Getting(rig, [block], 1.0)
    held.wait_asked(1)
    node.call(detach_all)
    size = record_bytes(LENGTH)
    assert state(node) == (size, size, 1, 2)
    held.give(record)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    (outcome,) = getting.wait()
    assert isinstance(outcome, Miss)
    assert untouched(rig)


def test_a_block_deleted_while_it_is_read_is_not_cached_and_its_pages_are_not_reused_before(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    entry = held.entry(block)
    record = held.record(entry)
    getting = Getting(rig, [block])
    held.wait_asked(1)
    deleting = threading.Thread(target=lambda: rig.client.delete([block.key]))
    deleting.start()

    def is_gone(inside: Node) -> bool:
        (connection,) = inside.connections.values()
        return inside.store.lookup([(connection.tenant, block.key)]) == [None]

    wait_until(lambda: node.call(is_gone), "it is deleted")
    assert node.call(lambda inside: inside.store.drives[0]._extents.is_pinned(entry.offset // PAGE_BYTES))
    held.give(record)
    assert getting.wait() == [Hit(block.key)], "it was there when it was asked for"
    deleting.join(WAIT_S)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    statistics = node.call(lambda inside: (inside.hot.pages.statistics().kept, len(inside.hot.shelf)))
    assert statistics == (0, 0)
    (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)
    assert isinstance(outcome, Miss)


@pytest.mark.parametrize("damage", ["another record", "a short read"])
def test_the_store_looks_up_a_block_that_a_reader_does_not_find(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held, damage: str
) -> None:
    """The block on the drive is intact; only the reader was given a wrong place."""
    block, other = rig.block(0, LENGTH), rig.block(1, LENGTH)
    put(rig, [block, other])
    getting = Getting(rig, [block])
    held.wait_asked(1)
    record = held.record(held.entry(other))
    held.give(record if damage == "another record" else record[:700])
    assert getting.wait() == [Hit(block.key)]
    assert rig.is_exact(block)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")


def test_a_payload_that_differs_from_the_written_one_is_a_miss_and_forgotten(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    record = bytearray(held.record(held.entry(block)))
    record[PAGE_BYTES + LENGTH - 1] ^= 1
    paint(rig)
    getting = Getting(rig, [block])
    held.wait_asked(1)
    held.give(bytes(record))
    (outcome,) = getting.wait()
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT
    assert untouched(rig)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    assert rig.client.status().corrupt_found == 1


def test_of_blocks_read_together_only_the_damaged_one_is_a_miss(
    node: NodeInProcess, rig: ClientWithBuffers, held: Held
) -> None:
    blocks = [rig.block(number, LENGTH) for number in range(3)]
    put(rig, blocks)
    records = [bytearray(held.record(held.entry(block))) for block in blocks]
    records[1][PAGE_BYTES] ^= 1
    getting = Getting(rig, blocks)
    held.wait_asked(3)
    for record in records:
        held.give(bytes(record))
    first, second, third = getting.wait()
    assert (first, third) == (Hit(blocks[0].key), Hit(blocks[2].key))
    assert isinstance(second, Miss)
    assert second.reason is MissReason.CORRUPT
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    assert node.call(lambda inside: inside.counters.hits_drive) == 2


def test_the_store_reads_blocks_that_the_fabric_does_not_accept(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    blocks = [rig.block(number, LENGTH) for number in range(2)]
    put(rig, blocks)

    def refusing(*_: object) -> None:
        raise FabricError("It takes nothing more.")

    def swap(inside: Node) -> None:
        (drive,) = inside.store.drives
        vars(inside.fetches.readers._of[drive])["put"] = refusing

    node.call(swap)
    for block in blocks:
        assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
        assert rig.is_exact(block)
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")


def test_without_a_reader_an_abandoned_get_is_not_sent_either(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """As on a drive that may not have another ring."""
    block = rig.block(0, LENGTH)
    put(rig, [block])
    node.call(lambda inside: inside.fetches.readers._of.clear())
    drive = HeldDrive(node)
    paint(rig)
    (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=SHORT_S)
    assert isinstance(outcome, Miss)
    assert drive.release() == 1
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    assert untouched(rig)
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]


def test_without_a_reader_nothing_is_sent_to_a_closed_client(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    node.call(lambda inside: inside.fetches.readers._of.clear())
    drive = HeldDrive(node)
    paint(rig)
    getting = Getting(rig, [block], 1.0)
    wait_until(lambda: drive.waiting() == 1, "it is to be read")
    node.call(detach_all)
    assert drive.release() == 1
    wait_until(lambda: state(node) == (0, 0, 0, 0), "all is given back")
    (outcome,) = getting.wait()
    assert isinstance(outcome, Miss)
    assert untouched(rig)


def test_each_of_several_drives_has_a_reader(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "node", drives=2) as several:
        rig = ClientWithBuffers(several)
        blocks = [rig.block(number, LENGTH) for number in range(12)]
        put(rig, blocks)
        asked: set[int] = set()

        def watch(inside: Node) -> None:
            for drive, reader in inside.fetches.readers._of.items():
                vars(reader)["put"] = partial(noted, drive.number, reader.put)

        def noted(number: int, real: Any, *arguments: Any) -> None:
            asked.add(number)
            real(*arguments)

        several.call(watch)
        assert rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S) == [
            Hit(block.key) for block in blocks
        ]
        assert all(rig.is_exact(block) for block in blocks)
        assert asked == {0, 1}
        rig.close()
