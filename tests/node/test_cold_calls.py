"""Gets that the C core answers from the drive: exact, and equal to Python's answers."""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.errors import KvError
from kvstore.limits import COLD_BYTES_MAX, DRIVE_CAPACITY_BYTES_MIN, PAGE_BYTES, ROOMS_IDLE_TICKS
from kvstore.lookups import Outcome
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED
from kvstore.node.cold_calls import COLD_TAG
from kvstore.storage.index_layout import rows_of_entries
from nic_offload.memory import allocate
from nic_offload.reader import Reader
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess, kept_in
from tests.node.test_erasing_under_load import made_opener
from tests.node.test_lookup_history import outcomes, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.node.node import Node
    from kvstore.storage.index import Entry

WAIT_S = 20.0
LENGTH, BLOCKS = 32 << 10, 64
STRESS_S = 4.0


class Cold:
    """A client of a restarted node with blocks on its drive and none in its memory."""

    def __init__(self, node: NodeInProcess, blocks: dict[bytes, bytes]) -> None:
        self.node, self.blocks = node, blocks
        self.client = Client(node.target, slots=BLOCKS, block_bytes_max=LENGTH)
        self.memory = allocate(BLOCKS * LENGTH)
        self.region = self.client.register(self.memory)

    def get(self, *keys: bytes, **more: Any) -> list[Hit | Miss]:
        self.memory[:] = bytes(len(self.memory))
        wanted = [Block(key, self.region, at * LENGTH, LENGTH) for at, key in enumerate(keys)]
        found = self.client.get(wanted, **({"timeout_s": WAIT_S} | more))
        for at, (key, one) in enumerate(zip(keys, found, strict=True)):
            there = self.memory[at * LENGTH : (at + 1) * LENGTH]
            assert there == (self.blocks[key] if isinstance(one, Hit) else bytes(LENGTH)), (at, one)
        return found

    def come_to_python(self) -> int:
        """The number of blocks that Python has queued to fetch so far."""

        def queued(inside: Node) -> int:
            inside.catch_up()
            return getattr(inside, "test_queued", 0)

        return int(self.node.call(queued))


def watched(node: NodeInProcess) -> None:
    def watch(inside: Node) -> None:
        enqueue = inside.fetches.enqueue

        def noted(connection: Any, requests: Any, *more: Any, **by_name: Any) -> None:
            vars(inside)["test_queued"] = vars(inside).get("test_queued", 0) + len(requests)
            enqueue(connection, requests, *more, **by_name)

        vars(inside.fetches)["enqueue"] = noted

    node.call(watch)


def warmed(cold: Cold, key: bytes) -> None:
    """Make the first get of a size, for which Python gives the core rooms."""
    assert cold.get(key) == [Hit(key)]
    assert cold.come_to_python() == 1


def entry_of(inside: Node, key: bytes) -> tuple[tuple[bytes, bytes], Entry]:
    tenant = next(iter(inside.connections.values())).tenant
    (entry,) = inside.store.lookup([(tenant, key)])
    assert entry is not None
    return (tenant, key), entry


def stored(node: NodeInProcess, numbers: range, **more: Any) -> dict[bytes, bytes]:
    dice = random.Random(11)
    blocks = {bytes([number]) * 32: dice.randbytes(LENGTH) for number in numbers}
    with Client(node.target) as client:
        for result in client.put_many_inline(list(blocks.items()), **more):
            assert result.error is None
    return blocks


@pytest.fixture(params=["plain", "encrypted", "two drives"])
def cold(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cold]:
    how: dict[str, Any] = {"drives": 2} if request.param == "two drives" else {}
    if request.param == "encrypted":
        how["open_keys"] = made_opener(tmp_path)
    more: dict[str, Any] = {"domain": SHARED} if request.param == "encrypted" else {}
    with NodeInProcess(tmp_path / "data", **how) as node:
        blocks = stored(node, range(BLOCKS), **more)
    with NodeInProcess(tmp_path / "data", **how) as node:
        watched(node)
        one = Cold(node, blocks)
        yield one
        one.client.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Cold]:
    with NodeInProcess(tmp_path / "node") as node:
        blocks = stored(node, range(8))
    with NodeInProcess(tmp_path / "node") as node:
        watched(node)
        one = Cold(node, blocks)
        yield one
        one.client.close()


def test_blocks_are_read_from_the_drive_without_python_and_are_hot_afterwards(cold: Cold) -> None:
    first, *keys = cold.blocks
    warmed(cold, first)
    for some in ([keys[0]], keys[1:30], keys[20:]):  # the last ones are hot in part
        assert cold.get(*some) == [Hit(key) for key in some]
    assert cold.come_to_python() == 1
    counted = cold.client.statistics()
    assert counted.hits_memory + counted.hits_drive == 1 + 1 + 29 + 43
    assert counted.hits_drive >= len(cold.blocks)
    assert counted.got_bytes == (1 + 1 + 29 + 43) * LENGTH
    kept = cold.node.call(lambda inside: inside.hot.pages.statistics().kept)
    assert kept == len(cold.blocks)
    assert cold.get(*keys[:40]) == [Hit(key) for key in keys[:40]]
    assert cold.client.statistics().hits_drive == counted.hits_drive, "they are in memory now"


def test_a_look_up_records_that_the_blocks_were_on_the_drive_and_the_time_it_took(plain: Cold) -> None:
    first, *keys = plain.blocks
    warmed(plain, first)
    plain.get(first, *keys)
    *_, lookup = told(plain.node, tenant="")
    assert outcomes(lookup) == [(1, Outcome.MEMORY), (7, Outcome.DRIVE)]
    assert lookup.drive_us > 0
    assert lookup.size_bytes == 8 * LENGTH


def test_newer_blocks_that_were_evicted_from_memory_are_found_on_the_drive(plain: Cold) -> None:
    warmed(plain, next(iter(plain.blocks)))
    new = stored(plain.node, range(100, 104))
    plain.blocks |= new

    def drop(inside: Node) -> None:
        for piece in kept_in(inside):
            inside.hot.pages.forget(piece)

    plain.node.call(drop)
    assert plain.get(*new) == [Hit(key) for key in new]
    assert plain.come_to_python() == 1


def test_a_deleted_block_is_a_miss_and_its_replacement_is_served(plain: Cold) -> None:
    first, gone, *_ = plain.blocks
    warmed(plain, first)
    plain.client.delete([gone])
    (miss,) = plain.get(gone)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.UNKNOWN
    plain.blocks[gone] = bytes(reversed(plain.blocks[gone]))
    plain.client.put_inline(gone, plain.blocks[gone])
    assert plain.get(gone) == [Hit(gone)]


def test_expiring_blocks_are_served_by_python_and_expire_in_time(plain: Cold) -> None:
    warmed(plain, next(iter(plain.blocks)))
    soon = int(time.time() * 1000) + 1500
    new = stored(plain.node, range(100, 102), expires_unix_ms=soon)
    plain.blocks |= new
    plain.node.call(lambda inside: inside.hot.shelf.unlist(b""))
    assert plain.get(*new) == [Hit(key) for key in new]
    assert plain.come_to_python() == 1 + 2
    wait_until(lambda: time.time() * 1000 > soon, "they are over")
    assert [str(one).split(":")[0] for one in plain.get(*new)] == ["MISS(expired)"] * 2


@pytest.mark.parametrize("where", ["header", "payload"])
def test_only_a_damaged_block_is_a_miss(tmp_path: Path, plain: Cold, where: str) -> None:
    first, bad, *rest = plain.blocks
    warmed(plain, first)

    at = plain.node.call(lambda inside: entry_of(inside, bad)[1].offset) + (
        40 if where == "header" else PAGE_BYTES + 777
    )
    with (tmp_path / "node" / "drive-0.kv").open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    found = plain.get(bad, *rest)
    assert isinstance(found[0], Miss)
    assert found[0].reason is MissReason.CORRUPT
    assert found[1:] == [Hit(key) for key in rest]
    assert plain.come_to_python() == 2, "only the damaged one"
    assert plain.client.status().corrupt_found == 1
    *_, lookup = told(plain.node, tenant="")
    assert outcomes(lookup) == [(1, Outcome.CORRUPT), (6, Outcome.DRIVE)]
    again = plain.get(bad)
    assert isinstance(again[0], Miss)


def test_a_block_of_another_layout_is_a_miss(plain: Cold) -> None:
    first, other, *_ = plain.blocks
    warmed(plain, first)
    with Client(plain.node.target, layout=b"another", block_bytes_max=LENGTH) as client:
        region = client.register(allocate(LENGTH))
        (miss,) = client.get([Block(other, region, 0, LENGTH)], timeout_s=WAIT_S)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.LAYOUT


def slow_drive(plain: Cold) -> int:
    """Make the core read from an empty pipe; returns its other end."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)

    def use(inside: Node) -> Reader:
        (drive,) = inside.store.drives
        reader = Reader(inside.fabric, out, 1, drive.record_format, drive.cipher)
        inside.hot.shelf.use_readers({drive.number: reader}, COLD_TAG, COLD_BYTES_MAX)
        return reader

    plain.node.call(use)
    return into


def test_a_late_read_is_cancelled_and_its_memory_returns_to_the_caller(plain: Cold) -> None:
    """The drive hangs: a get ends at its deadline, its connection stays, and nothing is written afterwards."""
    first, late, *_ = plain.blocks
    warmed(plain, first)
    into = slow_drive(plain)
    connection = plain.client._core.link
    began = time.monotonic()
    (miss,) = plain.get(late, timeout_s=0.3)
    assert isinstance(miss, Miss)
    assert time.monotonic() - began < 5
    assert plain.client._core.link is connection
    assert os.write(into, bytes(PAGE_BYTES + LENGTH)) == PAGE_BYTES + LENGTH
    plain.node.call(lambda inside: inside.fabric_calls.cold.empty())
    assert plain.get(first) == [Hit(first)], "which is in memory"
    assert bytes(plain.memory[LENGTH:]) == bytes(len(plain.memory) - LENGTH)
    os.close(into)


def test_memory_for_blocks_being_read_for_a_closed_client_stays_with_the_drive(plain: Cold) -> None:
    first, late, *_ = plain.blocks
    warmed(plain, first)
    into = slow_drive(plain)

    def missing(inside: Node) -> int:
        inside.catch_up()
        return len(inside.fabric_calls.cold._rooms) - inside.hot.shelf.wanted[1]

    getting = plain.client.getting([Block(late, plain.region, 0, LENGTH)], timeout_s=WAIT_S)
    wait_until(lambda: plain.node.call(missing) == 1, "the core reads")
    plain.client.close()
    getting.wait()
    wait_until(lambda: plain.node.call(len) == 0, "the connection has ended")
    assert plain.node.call(missing) == 1, "the drive may still write to it"
    os.write(into, bytes(PAGE_BYTES + LENGTH))
    wait_until(lambda: plain.node.call(missing) == 0, "its room is back")
    os.close(into)


def test_an_idle_node_has_all_its_memory_for_blocks(plain: Cold) -> None:
    warmed(plain, next(iter(plain.blocks)))

    def idle(inside: Node) -> int:
        assert inside.hot.shelf.wanted[1] > 0
        for _ in range(ROOMS_IDLE_TICKS):
            inside.fabric_calls.cold.tick()
        return len(inside.fabric_calls.cold._rooms)

    assert plain.node.call(idle) == 0


def test_a_tenant_with_a_rate_limit_is_served_by_python(plain: Cold) -> None:
    first, *keys = plain.blocks
    warmed(plain, first)

    def limit(inside: Node) -> None:
        for area in inside.fabric_calls._areas.values():
            area.desk.answers(answers=False)

    plain.node.call(limit)
    assert plain.get(*keys) == [Hit(key) for key in keys]
    assert plain.come_to_python() == len(plain.blocks)


def test_a_full_fetch_queue_is_reported_for_blocks_that_the_core_could_not_send(
    plain: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, bad, *_ = plain.blocks
    warmed(plain, first)

    def unplace(inside: Node) -> None:
        name, entry = entry_of(inside, bad)
        moved = entry._replace(offset=entry.offset + PAGE_BYTES)
        inside.fabric_calls.cold._placed(rows_of_entries([(name, moved)]))
        monkeypatch.setattr(inside.fetches._queued, "left", lambda _: 0)

    plain.node.call(unplace)
    (miss,) = plain.get(bad)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.BUSY


def test_blocks_are_exact_while_others_delete_and_rewrite_them(tmp_path: Path) -> None:
    """On a drive so full that space is reused all the time, the bytes returned are all from one put."""
    capacity = DRIVE_CAPACITY_BYTES_MIN
    keys = [bytes([number]) * 32 for number in range(24)]
    rest = [b"r" * 28 + number.to_bytes(4) for number in range(capacity // LENGTH)]
    stop, problems = threading.Event(), list[str]()

    def content(key: bytes, version: int) -> bytes:
        return (key[:4] + version.to_bytes(4)) * (LENGTH // 8)

    with NodeInProcess(tmp_path / "node", capacity_bytes=capacity) as node:
        node.call(lambda inside: vars(inside.hot).update(keep=lambda _: None))  # each get needs the drive

        def change() -> None:
            with Client(node.target) as client:
                client.put_many_inline([(key, bytes(LENGTH)) for key in rest])
                for version in count():
                    key = keys[version % len(keys)]
                    if stop.is_set():
                        return
                    try:
                        client.delete([key])
                        client.put_inline(key, content(key, version))
                    except KvError as error:
                        problems.append(str(error))

        writer = threading.Thread(target=change)
        writer.start()
        hits, dice = 0, random.Random(5)
        with Client(node.target, slots=8, block_bytes_max=LENGTH) as client:
            memory = allocate(8 * LENGTH)
            region = client.register(memory)
            until = time.monotonic() + STRESS_S
            while time.monotonic() < until:
                some = dice.sample(keys, 8)
                wanted = [Block(key, region, at * LENGTH, LENGTH) for at, key in enumerate(some)]
                found = client.get(wanted, timeout_s=WAIT_S)
                for at, (key, one) in enumerate(zip(some, found, strict=True)):
                    if isinstance(one, Hit):
                        hits += 1
                        there = memory[at * LENGTH : (at + 1) * LENGTH]
                        assert there[:4] == key[:4]
                        assert there == there[:8] * (LENGTH // 8), "of one put"
            counted = client.statistics()
        stop.set()
        writer.join(WAIT_S)
    assert not problems
    assert hits > 100
    assert counted.hits_drive > 50
