"""Gets from a node on the same machine: from its memory where it shares that, otherwise over the fabric."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import secrets
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit, shared
from kvstore.client import link as links
from kvstore.client.shared import MappedMemory, map_shared
from kvstore.durability import Durability
from kvstore.limits import SHARE_CALLERS_MAX, SHARE_PASS_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.node.tenants import token_digest
from tests.client.test_fabric_caller import get, link_of
from tests.client.test_seal import areas
from tests.conftest import MIB, ClientWithBuffers, small_node
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node
    from kvstore.wire import kvstore_pb2 as pb
    from nic_offload.fabric import Region


@pytest.fixture(autouse=True)
def no_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients here make a call for each get; those that make none are in `test_direct_reads`."""
    monkeypatch.setattr(links.Link, "_open_direct", lambda *_: None)


def shared_blocks(rig: ClientWithBuffers) -> int:
    calls = link_of(rig.client).calls
    assert calls is not None
    return calls.caller.shared_blocks


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "node", shares_memory=True) as node:
        yield node


def put(rig: ClientWithBuffers, blocks: list[Block], durability: Durability = Durability.WRITTEN) -> None:
    results = rig.client.put(blocks, durability=durability)
    assert [result.error for result in results] == [None] * len(blocks)


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


def test_a_landed_block_is_read_from_the_nodes_memory(rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number, length) for number, length in enumerate((1, 4096, 100_000, MIB))]
    put(rig, blocks)
    assert get(rig, blocks) == [Hit(block.key) for block in blocks]
    assert all(map(rig.is_exact, blocks))
    assert shared_blocks(rig) == len(blocks)
    assert rig.client.status().mapped == 1


def test_blocks_only_on_the_drive_are_read_along_with_those_in_memory(
    rig: ClientWithBuffers, node: NodeProcess
) -> None:
    blocks = [rig.block(number) for number in range(4)]
    put(rig, blocks)
    node.stop()
    node.start()
    with rig_of(node) as later:

        def are_shared() -> bool:
            before = shared_blocks(later)
            later.target[:] = bytes(len(later.target))
            wanted = [Block(block.key, later.to_region, block.offset, block.length) for block in blocks]
            assert later.client.get(wanted) == [Hit(block.key) for block in blocks]
            assert later.target[: 4 * MIB] == rig.source[: 4 * MIB]
            return shared_blocks(later) - before == len(blocks)

        assert are_shared(), "from the drive"
        wait_until(are_shared, "all are kept in memory")  # of a call for some that are, these are sent


def test_parts_of_blocks(rig: ClientWithBuffers) -> None:
    block = rig.block(0)
    put(rig, [block])
    part = Block(block.key, rig.to_region, 0, 300_001, whole=MIB, skip=70_000)
    assert rig.client.get([part]) == [Hit(block.key)]
    assert rig.target[:300_001] == rig.source[70_000:370_001]
    assert shared_blocks(rig) == 1


def test_a_block_whose_bytes_changed_in_memory_is_a_miss_and_then_read_from_the_drive(
    inside: ClientWithBuffers, inner: NodeInProcess
) -> None:
    block = inside.block(0, 100_000)
    put(inside, [block])

    def spoil(node: Node) -> None:
        at = bytes(node.hot.view).index(inside.source[:64])
        node.hot.view[at + 50_000] ^= 1

    # Until then it may list the block once more.
    wait_until(lambda: inner.call(lambda node: node.hot.pages.statistics().kept) == 1, "the node knows it")
    inner.call(spoil)
    (outcome,) = get(inside, [block])
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT
    (outcome,) = get(inside, [block])
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT, "the node has looked at it itself, and lists it no more"
    assert get(inside, [block]) == [Hit(block.key)]
    assert inside.is_exact(block)
    assert shared_blocks(inside) == 0


class Churn:
    """Blocks of a writer's, twice as many as the node's memory holds, that come and go; and clients that read them."""

    NAMES = 300

    def __init__(self, node: NodeInProcess, writer: ClientWithBuffers) -> None:
        self._node, self._writer = node, writer
        self._stop = threading.Event()
        draw = random.Random(1)
        self._whole = [draw.randbytes(1000 + number * 7919 % 200_000) for number in range(self.NAMES)]
        self.failures: list[str] = []
        self.hits = self.shared = 0

    def _blocks(self, numbers: Iterable[int], region: Region) -> list[Block]:
        at, blocks = 0, []
        for number in numbers:
            blocks.append(Block(self._writer.key(number), region, at, len(self._whole[number])))
            at += len(self._whole[number])
        return blocks

    def _write(self, draw: random.Random) -> None:
        numbers = draw.sample(range(self.NAMES), 40)
        blocks = self._blocks(numbers, self._writer.from_region)
        for number, block in zip(numbers, blocks, strict=True):
            self._writer.source[block.offset : block.offset + block.length] = self._whole[number]
        put(self._writer, blocks, Durability.LANDED)
        self._writer.client.delete([block.key for block in blocks[::4]])

    def _read(self, rig: ClientWithBuffers, draw: random.Random) -> None:
        numbers = draw.sample(range(self.NAMES), draw.choice((1, 1, 2, 12)))
        blocks = self._blocks(numbers, rig.to_region)
        for number, block, outcome in zip(numbers, blocks, rig.client.get(blocks), strict=True):
            if isinstance(outcome, Hit):
                self.hits += 1
                if rig.target[block.offset : block.offset + block.length] != self._whole[number]:
                    self.failures.append(f"block {number} has other bytes")

    def _reader(self, seed: int) -> None:
        draw = random.Random(seed)
        with rig_of(self._node) as rig:
            while not self._stop.is_set():
                self._read(rig, draw)
            self.shared += shared_blocks(rig)

    def run(self, seconds: float) -> None:
        readers = [threading.Thread(target=self._reader, args=(seed,)) for seed in range(3)]
        for one in readers:
            one.start()
        draw, until = random.Random(7), time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                self._write(draw)
        finally:
            self._stop.set()
            for one in readers:
                one.join()


def test_no_wrong_byte_while_blocks_enter_and_leave_memory_under_readers(tmp_path: Path) -> None:
    with (
        NodeInProcess(tmp_path / "node", hot_bytes=16 * MIB, shares_memory=True) as node,
        rig_of(node) as writer,
    ):
        churn = Churn(node, writer)
        churn.run(4)
    assert not churn.failures
    assert churn.shared > 100, f"of {churn.hits} hits, out of the node's memory"


def test_a_node_that_dies_under_a_reader_causes_misses_and_no_wrong_byte(
    rig: ClientWithBuffers, node: NodeProcess
) -> None:
    blocks = [rig.block(number) for number in range(16)]
    put(rig, blocks)
    assert all(isinstance(one, Hit) for one in get(rig, blocks))
    killing = threading.Timer(0.05, node.kill)
    killing.start()
    for _ in range(2000):
        outcomes = get(rig, blocks)
        for block, outcome in zip(blocks, outcomes, strict=True):
            assert isinstance(outcome, Miss) or rig.is_exact(block)
        if any(isinstance(outcome, Miss) for outcome in outcomes):
            break
    killing.join()
    (outcome, *_) = get(rig, blocks)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.NODE_AWAY
    node.start()
    wait_until(lambda: isinstance(get(rig, blocks)[0], Hit), "the node is back", 20)
    assert rig.is_exact(blocks[0])


def test_where_the_memory_cannot_be_mapped_blocks_are_sent_over_the_fabric(
    inner: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(told: pb.SharedMemory, puts: pb.PutArea) -> MappedMemory:
        told.socket += "-of-another-machine"
        return map_shared(told, puts)

    monkeypatch.setattr(links, "map_shared", elsewhere)
    with rig_of(inner) as rig:
        block = rig.block(0)
        put(rig, [block])
        assert get(rig, [block]) == [Hit(block.key)]
        assert rig.is_exact(block)
        assert shared_blocks(rig) == 0


def test_idle_readers_delay_a_get_from_the_drive_for_two_seconds_at_most(
    tmp_path: Path,
) -> None:
    """The blocks they read last fill the hot memory, and nothing shows that they are done with them."""
    with (
        NodeInProcess(tmp_path / "node", hot_bytes=16 * MIB, shares_memory=True) as node,
        ExitStack() as open_rigs,
    ):
        writer, *readers = [open_rigs.enter_context(rig_of(node)) for _ in range(10)]
        cold = [writer.block(number) for number in range(4)]
        put(writer, cold)
        hot = [writer.block(number) for number in range(16, 32)]
        put(writer, hot)
        for number, reader in enumerate(readers[:8]):
            blocks = [
                Block(block.key, reader.to_region, 0, MIB) for block in hot[2 * number : 2 * number + 1]
            ]
            reader.client.get(blocks)
        assert sum(map(shared_blocks, readers[:8])) >= 6
        began = time.monotonic()
        assert get(writer, cold) == [Hit(block.key) for block in cold]
        assert time.monotonic() - began < 5
        assert all(map(writer.is_exact, cold))


# --- the door to the memory


@pytest.fixture
def offer(
    inner: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[pb.SharedMemory, ClientWithBuffers]]:
    """The memory that a client was offered and has not mapped."""
    told = areas(monkeypatch)
    monkeypatch.setattr(links, "map_shared", lambda *_: MappedMemory())
    with rig_of(inner) as rig:
        link_of(rig.client)
        yield told[-1].shared, rig


def ask(name: str, shown: bytes) -> int | None:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(5)
        one.connect(f"\0{name}")
        with suppress(BrokenPipeError):
            one.sendall(shown)
        with suppress(ConnectionResetError):
            _, fds, _, _ = socket.recv_fds(one, 1, 1)
            return fds[0] if fds else None
    return None


def test_a_pass_works_once_and_gives_memory_that_only_the_node_can_change(
    offer: tuple[pb.SharedMemory, ClientWithBuffers],
) -> None:
    told, _ = offer
    fd = ask(told.socket, told.pass_once)
    assert fd is not None
    assert ask(told.socket, told.pass_once) is None
    assert os.fstat(fd).st_size == told.size_bytes
    with pytest.raises(PermissionError):
        mmap.mmap(fd, told.size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for size in (0, told.size_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_other_passes_and_passes_of_closed_connections_are_refused(
    offer: tuple[pb.SharedMemory, ClientWithBuffers], inner: NodeInProcess
) -> None:
    told, rig = offer
    assert ask(told.socket, secrets.token_bytes(SHARE_PASS_BYTES)) is None
    assert ask(told.socket, told.pass_once[:-1]) is None
    rig.client.close()
    wait_until(lambda: inner.call(len) == 0, "the connection is closed")
    assert ask(told.socket, told.pass_once) is None


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_slots_that_cannot_be_mapped_for_lack_of_descriptors_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fds = [os.memfd_create("slots", os.MFD_ALLOW_SEALING), *(os.eventfd(0) for _ in range(2))]
    os.ftruncate(fds[0], 4096)
    fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    had, dup = open_descriptors(), os.dup

    def second_fails(fd: int) -> int:
        if fd == fds[2]:
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(fd)

    monkeypatch.setattr(os, "dup", second_fails)
    ours, node = socket.socketpair()
    told: Any = SimpleNamespace(slots_bytes=4096)
    with ours, node, pytest.raises(OSError, match="Too many"):
        shared._map_slots(ours, told, fds, MappedMemory())
    assert open_descriptors() == had
    for fd in fds:
        os.close(fd)


def test_callers_that_present_no_pass_are_disconnected(
    offer: tuple[pb.SharedMemory, ClientWithBuffers],
) -> None:
    told, rig = offer
    silent = [socket.socket(socket.AF_UNIX) for _ in range(SHARE_CALLERS_MAX)]
    for one in silent:
        one.settimeout(10)
        one.connect(f"\0{told.socket}")
    began = time.monotonic()
    assert [one.recv(1) for one in silent] == [b""] * len(silent)
    assert time.monotonic() - began < 5
    for one in silent:
        one.close()
    fd = ask(told.socket, told.pass_once)
    assert fd is not None
    os.close(fd)
    assert rig.client.status().node


def test_a_node_with_tenants_shares_only_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise clients could read everything in its hot memory."""
    told, tenants = areas(monkeypatch), tmp_path / "tenants.toml"
    tenants.write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\n')
    with (
        small_node(tmp_path / "node", arguments=("--tenants", str(tenants))) as node,
        Client(node.target, token="acme", slots=1) as client,
    ):
        client.attach()
        assert told[-1].shared.slots_bytes
        assert not told[-1].shared.size_bytes
        assert not told[-1].shared.directory_bytes
        assert not told[-1].shared.owner
