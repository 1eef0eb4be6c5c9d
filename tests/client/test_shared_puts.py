"""Puts to a node on the same machine: into its memory, or over the fabric if it can't be mapped."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import secrets
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Hit
from kvstore.client import link as links
from kvstore.client.shared import MappedMemory, map_shared
from kvstore.durability import Durability
from kvstore.errors import Corrupt, FabricError, KvError
from kvstore.limits import GRANTED_PUTS, GRANTED_SLOTS, PAGE_BYTES, SHARE_REST_MS
from kvstore.node import same_machine
from kvstore.node.fair_queue import Places
from kvstore.node.shared_slots import SharedSlots
from kvstore.wire.ack import ack_word
from kvstore.wire.sharing import HAS_SLOTS
from tests.client.test_fabric_caller import link_of
from tests.client.test_seal import areas
from tests.conftest import MIB, ClientWithBuffers, small_node
from tests.nic_offload.rig import happens_more_often, wait_until
from tests.node.in_process import NodeInProcess
from tests.stopping import stop

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

    from kvstore.node.node import Node
    from kvstore.wire import kvstore_pb2 as pb

WAIT_S = 20.0
LENGTH = 64 << 10


def shared_puts(rig: ClientWithBuffers) -> int:
    sender = link_of(rig.client).sender
    assert sender is not None
    return sender.shared_puts


def memory_of(rig: ClientWithBuffers) -> mmap.mmap:
    slots = link_of(rig.client).mapped.slots
    assert slots is not None
    return slots.memory


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "node", shares_memory=True) as node:
        yield node


@contextmanager
def rig_of(node: Any) -> Iterator[ClientWithBuffers]:
    rig = ClientWithBuffers(node)
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture
def inside(inner: NodeInProcess) -> Iterator[ClientWithBuffers]:
    with rig_of(inner) as rig:
        yield rig


def put(rig: ClientWithBuffers, block: Block, durability: Durability = Durability.WRITTEN) -> KvError | None:
    (result,) = rig.client.put([block], durability=durability, timeout_s=WAIT_S)
    return result.error


def is_there(rig: ClientWithBuffers, block: Block) -> bool:
    return rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)] and rig.is_exact(block)


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- the way there


def test_a_put_goes_into_the_nodes_memory_and_stays_there(tmp_path: Path) -> None:
    with small_node(tmp_path / "node") as node, rig_of(node) as rig:
        blocks = [rig.block(n, length) for n, length in enumerate((1, 4096, 4097, 100_000, MIB))]
        for block, durability in zip(blocks, [*Durability, *Durability], strict=False):
            assert put(rig, block, durability) is None
        assert shared_puts(rig) == len(blocks)
        assert all(is_there(rig, block) for block in blocks)
        node.kill()
        node.start()
        wait_until(lambda: is_there(rig, blocks[1]), "the node is back", WAIT_S)
        assert all(is_there(rig, block) for block in blocks[1:3]), "what was written survives"
        assert put(rig, rig.block(9)) is None
        assert shared_puts(rig) >= 1, "the new connection has its slots mapped, too"


def test_many_puts_armed_on_one_flag_pass_through_eight_slots(inside: ClientWithBuffers) -> None:
    blocks = [
        Block(inside.key(n), inside.from_region, n * 4096, 4000, threshold=n % 5 + 1) for n in range(1000)
    ]
    puts = inside.client.arm(blocks, inside.flags[0])
    for value in range(1, 6):
        inside.flags[0].store(value)
    assert {result.error for result in puts.wait(WAIT_S)} == {None}
    assert shared_puts(inside) == 1000
    assert all(is_there(inside, block) for block in blocks[::37])


@pytest.mark.parametrize(("length", "ahead"), [(MIB, 4), (4096, GRANTED_SLOTS)])
def test_large_puts_that_the_node_has_not_read_are_few(tmp_path: Path, length: int, ahead: int) -> None:
    """So the node reads them from the processor's cache."""
    with small_node(tmp_path / "node") as node, rig_of(node) as rig:
        assert put(rig, rig.block(0)) is None

        def put_to_a_stopped_node(blocks: list[Block]) -> None:
            expected = shared_puts(rig) + ahead
            stop(node.pid)
            try:
                puts = rig.client.arm(blocks, rig.flags[0])
                rig.flags[0].store(blocks[-1].threshold)
                wait_until(lambda: shared_puts(rig) == expected, "the client has put so many")
                assert not puts.wait_landed(0.05)
                assert shared_puts(rig) == expected
            finally:
                os.kill(node.pid, signal.SIGCONT)
            assert {result.error for result in puts.wait(WAIT_S)} == {None}
            assert all(is_there(rig, block) for block in blocks)

        for first in (1, 9):
            put_to_a_stopped_node([rig.block(number, length) for number in range(first, first + 8)])


def test_an_idle_peer_is_woken(inside: ClientWithBuffers) -> None:
    """Without the doorbells each would wait for the end of a sleep: 20 ms at the node, and every fifth up to 4 ms."""
    numbers = itertools.count()

    def is_soon() -> bool:
        time.sleep(0.06)
        began = time.monotonic()
        assert put(inside, inside.block(next(numbers), 4096), Durability.LANDED) is None
        return time.monotonic() - began < 0.004

    assert happens_more_often(is_soon, 1 / 5)


def test_a_block_overwritten_during_its_put_is_complete_or_refused(inside: ClientWithBuffers) -> None:
    """The checksum is that of the application's bytes: a block torn on its way to the slot is not stored."""
    ends = threading.Event()

    def scribble() -> None:
        while not ends.is_set():
            inside.source[:MIB] = secrets.token_bytes(4096) * (MIB // 4096)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for number in range(60):
            error = put(inside, inside.block(number, MIB, offset=0), Durability.LANDED)
            assert error is None or isinstance(error, Corrupt), error
    finally:
        ends.set()
        thread.join()


# --- a client that lies, or a process that writes where it should not


def test_bytes_overwritten_after_the_flag_are_refused_or_were_read_before(inside: ClientWithBuffers) -> None:
    """The node reads a slot once: the stored bytes match the checksum of the put."""
    assert put(inside, inside.block(0)) is None
    memory, ends = memory_of(inside), threading.Event()
    words = len(memory) - GRANTED_PUTS * 8

    def scribble() -> None:
        dice = random.Random(4)
        while not ends.is_set():  # at payloads alone, in the middle of each slot
            slot = dice.randrange(GRANTED_SLOTS)
            at = PAGE_BYTES + slot * (PAGE_BYTES + MIB) + PAGE_BYTES + dice.randrange(LENGTH - 64)
            assert at + 64 < words
            memory[at : at + 64] = dice.randbytes(64)

    thread = threading.Thread(target=scribble)
    thread.start()
    kept = 0
    try:
        for number in range(1, 200):
            block = inside.block(number, LENGTH)
            error = put(inside, block, Durability.LANDED)
            assert error is None or isinstance(error, Corrupt), error
            kept += error is None
            if error is None:
                assert is_there(inside, block)
    finally:
        ends.set()
        thread.join()
    assert kept


def test_an_invalid_put_does_not_affect_other_clients(inner: NodeInProcess) -> None:
    """Flags of another client are ignored, as over the fabric; invalid headers are not processed."""
    with rig_of(inner) as bad, rig_of(inner) as good:
        assert put(bad, bad.block(0)) is None
        assert put(good, good.block(0)) is None
        memory, link = memory_of(bad), link_of(bad.client)
        slots = link.mapped.slots
        assert slots is not None
        due = inner.call(lambda node: node.granted._areas[link.number].area.first_generation)
        for generation in (due, due + 1, 2**64 - 1):
            for slot in range(GRANTED_SLOTS):
                start = PAGE_BYTES + slot * (PAGE_BYTES + MIB)
                memory[start : start + PAGE_BYTES] = b"\xff" * PAGE_BYTES
                memory[slot * 8 : slot * 8 + 8] = generation.to_bytes(8, "little")
            os.eventfd_write(slots.node_doorbell, 1)
            time.sleep(0.02)
        assert put(good, good.block(1)) is None
        assert put(bad, bad.block(1)) is None
        assert is_there(bad, bad.block(1))
        assert inner.call(len) == 2


def test_a_word_of_another_generation_ends_no_put(tmp_path: Path) -> None:
    """Words in shared memory have no tag, and still only the expected one counts."""
    with small_node(tmp_path / "node") as node, rig_of(node) as rig:
        assert put(rig, rig.block(0)) is None
        memory = memory_of(rig)
        slots = link_of(rig.client).mapped.slots
        assert slots is not None
        stop(node.pid)
        try:
            puts = rig.client.arm([rig.block(1)])
            time.sleep(0.1)
            for word in range(GRANTED_PUTS):
                at = slots.words_offset + word * 8
                memory[at : at + 8] = ack_word(12345, int(Durability.WRITTEN)).to_bytes(8, "little")
            time.sleep(0.1)
            assert not puts.has_ended
        finally:
            os.kill(node.pid, signal.SIGCONT)
        assert puts.wait(WAIT_S)[0].error is None
        assert is_there(rig, rig.block(1))


def show(told: pb.SharedMemory) -> tuple[int, list[int], socket.socket]:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(5)
    one.connect(f"\0{told.socket}")
    one.sendall(told.pass_once)
    has, given, _, _ = socket.recv_fds(one, 1, 8)
    return has[0] if has else 0, list(given), one


@pytest.fixture
def offer(
    inner: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[pb.SharedMemory, ClientWithBuffers]]:
    told = areas(monkeypatch)
    monkeypatch.setattr(links, "map_shared", lambda *_: MappedMemory())
    with rig_of(inner) as rig:
        link_of(rig.client)
        yield told[-1].shared, rig


def passes(inner: NodeInProcess) -> int:
    return int(inner.call(lambda node: len(node.sharing._offers)))  # type: ignore[union-attr]


def test_a_pass_works_once_and_for_its_own_connection(
    offer: tuple[pb.SharedMemory, ClientWithBuffers], inner: NodeInProcess
) -> None:
    told, rig = offer
    has, given, first = show(told)
    assert has & HAS_SLOTS
    refused, nothing, second = show(told)
    assert (refused, nothing) == (0, []), "while the first has not said anything yet"
    for one in (first, second):
        one.close()
    for fd in given:
        os.close(fd)
    rig.client.close()
    with rig_of(inner) as other:
        link_of(other.client)
        assert passes(inner) == 1
    wait_until(lambda: inner.call(len) == 0, "both have left")
    assert passes(inner) == 0


def test_the_size_of_the_memory_cannot_be_changed(
    offer: tuple[pb.SharedMemory, ClientWithBuffers], inner: NodeInProcess
) -> None:
    told, rig = offer
    has, given, asked = show(told)
    assert has & HAS_SLOTS
    memory = given[-3]
    assert os.fstat(memory).st_size == told.slots_bytes
    for size in (0, PAGE_BYTES, told.slots_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    asked.close()
    for fd in given:
        os.close(fd)
    assert put(rig, rig.block(0)) is None, "who does not say that it has it mapped goes on over the fabric"
    assert shared_puts(rig) == 0
    assert inner.call(len) == 1


def test_the_node_survives_any_misuse_of_its_doorbells(inner: NodeInProcess) -> None:
    """Full, blocking, and never read: no call of the node waits for them."""
    with rig_of(inner) as bad, rig_of(inner) as good:
        assert put(bad, bad.block(0)) is None
        slots = link_of(bad.client).mapped.slots
        assert slots is not None
        bad.client.fabric.ignore(slots.own_doorbell)
        os.set_blocking(slots.own_doorbell, True)
        fcntl.fcntl(slots.own_doorbell, fcntl.F_SETPIPE_SZ, PAGE_BYTES)  # room for 512 rings
        os.eventfd_write(slots.node_doorbell, 2**63)
        for number in range(1, 800):
            assert put(bad, bad.block(number, 4096)) is None
        assert put(good, good.block(1)) is None


@pytest.mark.parametrize("deletes", [False, True])
def test_clients_put_the_same_names_concurrently(tmp_path: Path, *, deletes: bool) -> None:
    """One is written by the drive's lane, the others by the store, which must be told of it first."""
    with small_node(tmp_path / "node") as node, ExitStack() as stack:
        rigs = [stack.enter_context(rig_of(node)) for _ in range(3)]
        together = threading.Barrier(len(rigs))
        errors: list[KvError | None] = []

        def go_on(rig: ClientWithBuffers) -> None:
            rig.name = b"the same"
            rig.source[:4096] = bytes(4096)
            for turn in range(150):
                together.wait(WAIT_S)
                blocks = [Block(rig.key(turn * 4 + n), rig.from_region, 0, 4096) for n in range(4)]
                ended = rig.client.put(blocks, timeout_s=WAIT_S)
                errors.extend(result.error for result in ended if result.error)
                if deletes and turn % 3 == 0:
                    rig.client.delete([block.key for block in blocks])

        threads = [threading.Thread(target=go_on, args=(rig,)) for rig in rigs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert "Error" not in node.log()


# --- what stands in the way


def test_a_pass_expires(inner: NodeInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_machine, "SHARE_PASS_MS", 30)

    def late(told: pb.SharedMemory, puts: pb.PutArea) -> MappedMemory:
        time.sleep(0.3)
        return map_shared(told, puts)

    monkeypatch.setattr(links, "map_shared", late)
    with rig_of(inner) as rig:
        assert put(rig, rig.block(0)) is None
        assert shared_puts(rig) == 0
        area = inner.call(lambda node: next(iter(node.granted._areas.values())))
        assert area.shared._fd == -1, "nobody can map it any more"
        assert is_there(rig, rig.block(0))


def test_a_client_in_doubt_requests_its_slots(inner: NodeInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may write the words of its puts into memory that the client hasn't mapped."""
    mapped = SharedSlots.mapped

    def and_says_nothing(self: SharedSlots, *arguments: Any, looks: bool) -> None:
        mapped(self, *arguments, looks=looks)
        raise FabricError("no answer")

    monkeypatch.setattr(SharedSlots, "mapped", and_says_nothing)
    with rig_of(inner) as rig:
        assert put(rig, rig.block(0)) is None
        assert link_of(rig.client).sender is None
        assert is_there(rig, rig.block(0))


def test_a_size_that_does_not_match_the_grant_is_not_used(
    inner: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:

    def altered(told: pb.SharedMemory, puts: pb.PutArea) -> MappedMemory:
        told.words_offset += 8
        return map_shared(told, puts)

    monkeypatch.setattr(links, "map_shared", altered)
    with rig_of(inner) as rig:
        assert put(rig, rig.block(0)) is None
        assert shared_puts(rig) == 0


def divide(node: Node, places: int, tenants: int) -> None:
    assert node.sharing is not None
    node.sharing._places = Places(places, lambda: tenants)


def test_a_bounded_number_of_connections_share_and_others_use_the_fabric(inner: NodeInProcess) -> None:
    inner.call(lambda one: divide(one, 2, 1))
    with ExitStack() as stack:
        rigs = [stack.enter_context(rig_of(inner)) for _ in range(3)]
        for number, rig in enumerate(rigs):
            assert put(rig, rig.block(number)) is None
        assert [shared_puts(rig) for rig in rigs] == [1, 1, 0]
        rigs[0].client.close()
        wait_until(lambda: inner.call(len) == 2, "it has left")
        rigs.append(stack.enter_context(rig_of(inner)))
        assert put(rigs[-1], rigs[-1].block(9)) is None
        assert shared_puts(rigs[-1]) == 1


def test_a_tenant_with_many_connections_leaves_others_places_to_map_slots(inner: NodeInProcess) -> None:
    inner.call(lambda one: divide(one, 4, 2))
    with ExitStack() as stack:
        rigs = [stack.enter_context(rig_of(inner)) for _ in range(4)]
        for number, rig in enumerate(rigs):
            assert put(rig, rig.block(number)) is None
        assert [shared_puts(rig) for rig in rigs] == [1, 1, 0, 0]
        assert inner.call(lambda one: one.sharing is not None and one.sharing.shares_slots(b"another"))


def test_a_node_without_a_free_descriptor_pauses_and_accepts_the_caller_later(
    inner: NodeInProcess, offer: tuple[pb.SharedMemory, ClientWithBuffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that can't be accepted stays queued, and the loop would be woken over and over."""
    told, _ = offer
    tries = []

    class Full:
        def __init__(self, listener: socket.socket) -> None:
            self.fileno = listener.fileno

        def accept(self) -> None:
            tries.append(time.monotonic())
            raise OSError(errno.EMFILE, "no descriptor")

    def swap(node: Any) -> socket.socket:
        listener: socket.socket = node.sharing._listener
        monkeypatch.setattr(node.sharing, "_listener", Full(listener))
        return listener

    listener = inner.call(swap)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(WAIT_S)
        caller.connect(f"\0{told.socket}")
        wait_until(lambda: len(tries) >= 3, "it tries again", WAIT_S)
        assert tries[2] - tries[0] > 1.5 * SHARE_REST_MS / 1000
        inner.call(lambda node: monkeypatch.setattr(node.sharing, "_listener", listener))
        caller.sendall(bytes(len(told.pass_once)))
        assert caller.recv(1) == b"", "it is heard, and has no pass"


def test_connections_that_come_and_go_leave_nothing_behind(inner: NodeInProcess) -> None:
    def once() -> None:
        with rig_of(inner) as rig:
            assert put(rig, rig.block(0, 4096)) is None
            assert shared_puts(rig) == 1
        wait_until(lambda: inner.call(len) == 0, "it has left")

    once()
    before, maps = fds(), mapped_slots()
    for _ in range(10):
        once()
    assert fds() < before + 5
    assert mapped_slots() == maps


def mapped_slots() -> int:
    return Path("/proc/self/maps").read_text().count("triggerkv-slots")


def test_puts_end_when_the_node_is_killed_during_them(tmp_path: Path) -> None:
    with small_node(tmp_path / "node") as node, rig_of(node) as rig:
        assert put(rig, rig.block(0)) is None
        blocks = [Block(rig.key(n), rig.from_region, n * 4096, MIB, threshold=n + 1) for n in range(200)]
        puts = rig.client.arm(blocks, rig.flags[0], durability=Durability.WRITTEN)
        rig.flags[0].store(200)
        node.kill()
        ended = puts.wait(WAIT_S)
        node.start()
        wait_until(lambda: put(rig, rig.block(300, 4096)) is None, "the node is back", WAIT_S)
        acked = [block for block, result in zip(blocks, ended, strict=True) if result.error is None]
        for block in acked:
            wanted = Block(block.key, rig.to_region, 0, block.length)
            assert rig.client.get([wanted], timeout_s=WAIT_S) == [Hit(block.key)]
            assert rig.target[: block.length] == rig.source[block.offset : block.offset + block.length]


def test_memory_of_a_closed_client_is_its_own_again(inner: NodeInProcess) -> None:
    """Closing waits for no put: one in flight either arrives whole, or never."""
    name = secrets.token_bytes(8)
    for turn in range(6):
        with rig_of(inner) as rig:
            rig.name = name + bytes([turn])
            blocks = [Block(rig.key(n), rig.from_region, n * LENGTH, LENGTH, threshold=1) for n in range(100)]
            content = rig.source[: 100 * LENGTH]
            puts = rig.client.arm(blocks, rig.flags[0], durability=Durability.LANDED)
            rig.flags[0].store(1)
            time.sleep(0.002 * turn)
            rig.client.close()
            rig.source[: 100 * LENGTH] = bytes(100 * LENGTH)
            assert puts.has_ended
        with rig_of(inner) as other:
            other.name = name + bytes([turn])
            for n in range(100):
                (outcome,) = other.client.get(
                    [Block(other.key(n), other.to_region, 0, LENGTH)], timeout_s=WAIT_S
                )
                if isinstance(outcome, Hit):
                    assert other.target[:LENGTH] == content[n * LENGTH : (n + 1) * LENGTH]


def flags_seen(node: NodeInProcess) -> list[bool]:
    node.call(lambda node: node.catch_up())
    seen: list[bool] = node.call(lambda node: [put.flag_ns > 0 for put in node.timings.puts.values()])
    return seen


def test_the_node_knows_when_the_flag_of_a_shared_memory_put_was_stored(
    inner: NodeInProcess, inside: ClientWithBuffers
) -> None:
    assert put(inside, inside.block(0)) is None
    assert flags_seen(inner) == [True]
    assert inner.call(lambda node: node.traces.fired_blocks) == 1


def test_flag_times_of_a_client_with_a_different_clock_are_not_used(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "node") as node, rig_of(node) as rig:
        assert put(rig, rig.block(0)) is None
        assert flags_seen(node) == [False]
