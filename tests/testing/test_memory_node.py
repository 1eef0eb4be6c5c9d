"""`kvstore.testing.MemoryNode`: what it promises besides the contract that it shares with a real node."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import AsyncClient, Block, Hit, block_key
from kvstore.errors import NodeUnavailable, StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.testing import MemoryNode, memory_node
from kvstore.testing.memory_disk import MemoryDisk
from nic_offload.memory import address_of, set_aside

if TYPE_CHECKING:
    from kvstore.client import Client

pytest_plugins = ["kvstore.testing.fixtures"]

KEY = block_key(b"memory")
MIB = 1 << 20


def test_a_client_of_the_fixture_has_its_own_tenant(kv_node: MemoryNode, kv_client: Client) -> None:
    kv_client.put_inline(KEY, b"KV")
    assert kv_client.get_inline(KEY, 2) == b"KV"
    with kv_node.client(tenant="another") as other:
        assert not isinstance(other.get_inline(KEY, 2), bytes)


def test_it_needs_no_libfabric_and_ends_with_its_process() -> None:
    code = (
        "import atexit, threading\n"
        "from kvstore import Block\n"
        "from kvstore.testing import MemoryNode\n"
        # The last that runs, when the fabrics are closed: nothing may still take events from them.
        "atexit.register(lambda: print([one.name for one in threading.enumerate() if 'kvstore' in one.name]))\n"
        "node = MemoryNode()\n"
        "client = node.client()\n"
        "kv = client.register(bytearray(4096))\n"
        "print(client.put([Block(bytes(32), kv, 0, 4096)])[0].durability.name)\n"
    )  # neither is closed
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRIGGERKV_LIBFABRIC": "/there/is/none.so"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "WRITTEN\n[]\n"
    assert "Traceback" not in done.stderr


def test_a_closed_node_leaves_nothing_behind() -> None:
    with MemoryNode() as first, first.client() as client:
        client.put_inline(KEY, b"KV")  # what is opened once in a process is open now
    threads, open_files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    with MemoryNode() as node, node.client() as client:
        client.put_inline(KEY, b"KV")
        folder = node._data.parent
        assert folder.is_dir()
    assert not folder.exists()
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files
    node.close()  # once more is nothing


def test_a_node_that_does_not_start_says_why_and_leaves_nothing() -> None:
    before = set(Path(tempfile.gettempdir()).glob("triggerkv-*"))
    threads = threading.active_count()
    with pytest.raises(StorageError, match="smallest drive"):
        MemoryNode(drive="1KiB")
    with MemoryNode() as node:
        node.stop()
        host, _, port = node.target.rpartition(":")
        with socket.create_server((host, int(port))), pytest.raises((NodeUnavailable, RuntimeError)):
            node.start()
        node.start()
        with node.client() as client:
            client.put_inline(KEY, b"KV")
    assert threading.active_count() == threads
    assert set(Path(tempfile.gettempdir()).glob("triggerkv-*")) <= before


def test_two_nodes_in_one_process_are_separate() -> None:
    with MemoryNode() as one, MemoryNode() as other, one.client() as client, other.client() as stranger:
        kv, theirs = client.register(bytearray(4096)), stranger.register(bytearray(4096))
        client.put([Block(KEY, kv, 0, 4096)])
        assert isinstance(client.get([Block(KEY, kv, 0, 4096)])[0], Hit)
        assert not isinstance(stranger.get([Block(KEY, theirs, 0, 4096)])[0], Hit)


def test_an_asyncio_client_is_served_too() -> None:
    async def talk(target: str) -> object:
        async with AsyncClient(target, transport="memory", slots=4) as client:
            kv = await client.register(bytearray(4096))
            await client.put([Block(KEY, kv, 0, 4096)])
            return (await client.get([Block(KEY, kv, 0, 4096)]))[0]

    with MemoryNode() as node:
        assert isinstance(asyncio.run(talk(node.target)), Hit)


def test_a_client_in_another_process_is_told_that_it_cannot_use_the_fabric() -> None:
    code = (
        "import sys\n"
        "from kvstore import Block, Client, KvError\n"
        "with Client(sys.argv[1], provider='memory', slots=4) as client:\n"
        "    client.put_inline(bytes(32), b'KV')\n"
        "    print(client.get_inline(bytes(32), 2))\n"
        "    kv = client.register(bytearray(4096))\n"
        "    try:\n"
        "        client.put([Block(bytes(32), kv, 0, 4096)])\n"
        "    except KvError as error:\n"
        "        print(error)\n"
    )
    with MemoryNode() as node:
        done = subprocess.run(
            [sys.executable, "-c", code, node.target],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert done.stdout == "b'KV'\nThe provider memory reaches fabrics of its own process only.\n"


def test_a_drive_in_memory_conforms_to_the_disk_interface() -> None:
    disk = MemoryDisk(16 * MIB)
    memory = set_aside(4 * PAGE_BYTES)
    at = address_of(memory)
    disk.write_at(0, bytes(PAGE_BYTES))  # the zeros of a new drive
    assert list(disk.data_ranges(0)) == []
    memory[: 2 * PAGE_BYTES] = b"KV" * PAGE_BYTES
    assert disk.submit([DiskOp(DiskOpKind.WRITE, at, 2 * PAGE_BYTES, 3 * PAGE_BYTES, 7)]) == 1
    assert [tuple(one) for one in disk.reap()] == [(7, 2 * PAGE_BYTES)]
    assert disk.reap() == []
    disk.write_at(8 * PAGE_BYTES, b"x" * PAGE_BYTES)
    disk.write_at(9 * PAGE_BYTES, bytes(PAGE_BYTES))
    assert list(disk.data_ranges(4 * PAGE_BYTES)) == [
        (4 * PAGE_BYTES, 5 * PAGE_BYTES),
        (8 * PAGE_BYTES, 10 * PAGE_BYTES),
    ]
    disk.submit(
        [
            DiskOp(DiskOpKind.READ, at + 2 * PAGE_BYTES, PAGE_BYTES, 4 * PAGE_BYTES, 8),
            DiskOp(DiskOpKind.SYNC, 0, 0, 0, 9),
        ]
    )
    assert [tuple(one) for one in disk.reap()] == [(8, PAGE_BYTES), (9, 0)]
    assert memory[2 * PAGE_BYTES : 3 * PAGE_BYTES] == b"KV" * (PAGE_BYTES // 2)
    assert disk.read_at(4 * PAGE_BYTES, PAGE_BYTES) == b"KV" * (PAGE_BYTES // 2)
    disk.close()
    assert disk.read_at(8 * PAGE_BYTES, 1) == b"x"  # for the next store that is opened on it
    disk.free()


def test_a_start_that_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt(timeout)

    monkeypatch.setattr(memory_node, "Future", Interrupted)

    def nodes() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == "kvstore-node"}

    def start() -> None:
        with pytest.raises(KeyboardInterrupt):
            MemoryNode()

    before, starting = nodes(), threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(60)
    assert not starting.is_alive()
    assert nodes() == before
