"""What the machine gives without us: a bare fabric to another process, and a bare drive.

The fabric's ceiling is the provider's own write of blocks, back to back, into another process's memory, known to have
arrived when an 8-byte acknowledgement of the last one comes back. The drive's is io_uring at depth 16 over the
same kind of file.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.uring import UringDisk
from nic_offload.fabric import EventKind, Fabric
from nic_offload.memory import allocate
from nic_offload.trigger import AckWatch, Landing, TriggeredPut, arm, watch_acks, watch_landings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BareDrive", "BareFabric", "sink"]

_DEPTH = 16
_SLOTS_BYTES = 64 << 20
_WAIT_S = 60.0
_GENERATIONS = 1_000_000  # the sink watches for 1, 2, 3, ... in one flag word


def sink(provider: str, peer_address: bytes, ack_base: int, ack_key: int) -> None:
    """The other process: memory that is written into, and an acknowledgement for each flag."""
    memory, words = allocate(_SLOTS_BYTES), mmap.mmap(-1, PAGE_BYTES)
    with Fabric(provider, address="127.0.0.1") as fabric:
        endpoint = fabric.open_endpoint()
        target, flag = fabric.register(memory), fabric.register(words)
        peer = fabric.add_peer(peer_address)
        print(endpoint.address().hex(), target.base, target.key, flag.base, flag.key, flush=True)
        for generation in range(1, _GENERATIONS):
            watch_landings(
                fabric,
                [
                    Landing(
                        tag=generation,
                        endpoint=endpoint,
                        word=flag.address,
                        generation=generation,
                        payload=flag.address,
                        length=8,
                        peer=peer,
                        ack_target=ack_base,
                        ack_key=ack_key,
                        ack_value=generation << 8 | 1,
                        deadline_ns=0,
                    )
                ],
            )
            while not fabric.reap():
                if select.select([fabric, sys.stdin], [], [])[0] == [sys.stdin]:
                    return  # whoever measured is gone


class BareFabric:
    """Plain writes of the provider into another process."""

    def __init__(self, provider: str, block_bytes: int, blocks: int) -> None:
        self._block_bytes, self._blocks = block_bytes, blocks
        self._memory, self._words = allocate(block_bytes * blocks), mmap.mmap(-1, PAGE_BYTES)
        self._fabric = Fabric(provider, address="127.0.0.1")
        self._endpoint = self._fabric.open_endpoint()
        self._source, self._acks = self._fabric.register(self._memory), self._fabric.register(self._words)
        self._generations, self._tags = itertools.count(1), itertools.count(1)
        arguments = (provider, self._endpoint.address(), self._acks.base, self._acks.key)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.bench.ceilings import sink; sink(*{arguments!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        address, *numbers = self._process.stdout.readline().split()
        self._target, self._target_key, self._flag, self._flag_key = map(int, numbers)
        self._peer = self._fabric.add_peer(bytes.fromhex(address))

    def gbps(self) -> float:
        """Write all blocks once."""
        return self._block_bytes * self._blocks / self.nanoseconds()

    def nanoseconds(self) -> int:
        """How long that took, the last one's acknowledgement included."""
        generation = next(self._generations)
        watch_acks(
            self._fabric,
            [AckWatch(next(self._tags), self._endpoint, self._acks.address, generation, 0, 1)],
        )
        puts = [
            TriggeredPut(
                tag=next(self._tags),
                endpoint=self._endpoint,
                peer=self._peer,
                region=self._source,
                source=self._source.address + i * self._block_bytes,
                length=self._block_bytes,
                target=self._target + i * self._block_bytes % _SLOTS_BYTES,
                target_key=self._target_key,
            )
            for i in range(self._blocks)
        ]
        last = puts[-1]._replace(flag_target=self._flag, flag_key=self._flag_key, flag_value=generation)
        start_ns = time.monotonic_ns()
        arm(self._fabric, [*puts[:-1], last])
        while select.select([self._fabric], [], [], _WAIT_S)[0]:
            for event in self._fabric.reap():
                if event.kind == EventKind.ACKED:
                    return event.time_ns - start_ns
        message = "the sink did not acknowledge"
        raise TimeoutError(message)

    def close(self) -> None:
        """End the other process too."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_WAIT_S)
        self._fabric.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BareDrive:
    """io_uring at depth 16 over a file beside the store's, first filled so that no write meets a hole."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._path = folder / "bare-drive"
        self._size_bytes = size_bytes
        with self._path.open("wb") as file:
            for _ in range(size_bytes >> 20):
                file.write(b"\xff" * (1 << 20))
        self._disk = UringDisk(self._path)
        self._memory = allocate(size_bytes)
        self._address = _address_of(self._memory)

    def gbps(self, kind: DiskOpKind, length: int) -> float:
        """Read or write the whole file in records of this length."""
        ops = [
            DiskOp(kind, self._address + offset, length, offset, offset)
            for offset in range(0, self._size_bytes - length + 1, length)
        ]
        start_ns = time.monotonic_ns()
        begun = ended = 0
        while ended < len(ops):
            begun += self._disk.submit(ops[begun : min(len(ops), ended + _DEPTH)])
            select.select([self._disk], [], [], _WAIT_S)
            for done in self._disk.reap():
                assert done.result == length, done
                ended += 1
        return len(ops) * length / (time.monotonic_ns() - start_ns)

    def close(self) -> None:
        """Remove the file."""
        self._disk.close()
        self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
