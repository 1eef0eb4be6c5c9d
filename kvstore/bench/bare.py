"""The machine without the store: a bare fabric to another process, and a bare drive.

The fabric is measured by armed puts of blocks, back to back, into another process's memory, fired by one flag store,
until an 8-byte acknowledgement of the last one arrives. (`bench_fabric` compares that with the provider's own
writes.) The drive is measured by io_uring at depth 16 over the same kind of file.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.uring import UringDisk
from nic_offload.fabric import EventKind, Fabric
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.trigger import AckWatch, Landing, TriggeredPut, arm, watch_acks, watch_landings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BareDrive", "BareFabric", "sink"]

_DEPTH = 16
_SLOTS_BYTES = 64 << 20
_WAIT_S = 60.0
_OPERATION_BYTES, _OPERATIONS_MAX = 64 << 20, 500
_STRIDE = 7919  # a prime: consecutive operations are not neighbours on the drive
_GENERATIONS = 1_000_000  # the sink watches for 1, 2, 3, ... in one flag word


def sink(
    provider: str, peer_address: bytes, ack_base: int, ack_key: int, slots_bytes: int, *, deferred: bool
) -> None:
    """The other process: the target memory, and an acknowledgement for each flag."""
    memory, words = allocate(slots_bytes), mmap.mmap(-1, PAGE_BYTES)
    with Fabric(provider, address="127.0.0.1", deferred_work=deferred) as fabric:
        endpoint = fabric.open_endpoint()
        target, flag = fabric.register(memory), fabric.register(words)
        peer = fabric.add_peer(peer_address)
        about = (endpoint.address().hex(), target.base, target.key, flag.base, flag.key)
        try:
            print(*about, flush=True)  # noqa: T201 - for the process that measures
        except BrokenPipeError:
            os._exit(1)  # it has exited, and nothing is left to flush
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
                if sys.stdin in select.select([fabric, sys.stdin], [], [])[0]:
                    return  # the measuring process has exited


class BareFabric:
    """Armed puts into another process."""

    def __init__(
        self,
        provider: str,
        block_bytes: int,
        blocks: int,
        *,
        slots_bytes: int = _SLOTS_BYTES,
        deferred_work: bool = False,
    ) -> None:
        self._block_bytes, self._blocks, self._slots_bytes = block_bytes, blocks, slots_bytes
        self._memory, self._words = allocate(block_bytes * blocks), mmap.mmap(-1, PAGE_BYTES)
        self._fabric = Fabric(provider, address="127.0.0.1", deferred_work=deferred_work)
        self._endpoint = self._fabric.open_endpoint()
        self._source, self._acks = self._fabric.register(self._memory), self._fabric.register(self._words)
        self._flags = FlagWords.create(1)
        self._counter = self._fabric.open_counter(self._flags[0])
        self._generations, self._tags = itertools.count(1), itertools.count(1)
        address = self._endpoint.address()
        arguments = (provider, address, self._acks.base, self._acks.key, slots_bytes)
        program = f"from kvstore.bench.bare import sink; sink(*{arguments!r}, deferred={deferred_work})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process: the other one ends after it
        )
        assert self._process.stdout is not None
        said, *numbers = self._process.stdout.readline().split()
        self._target, self._target_key, self._flag, self._flag_key = map(int, numbers)
        self._peer = self._fabric.add_peer(bytes.fromhex(said))

    def gbps(self) -> float:
        """Write all blocks once."""
        return self._block_bytes * self._blocks / self.nanoseconds()

    def staged_gbps(self) -> float:
        """The same with a CPU copy: into registered memory, then the puts."""
        return self._block_bytes * self._blocks / self.nanoseconds(staging=True)

    def _puts(self, generation: int) -> list[TriggeredPut]:
        puts = [
            TriggeredPut(
                tag=next(self._tags),
                endpoint=self._endpoint,
                peer=self._peer,
                region=self._source,
                source=self._source.address + i * self._block_bytes,
                length=self._block_bytes,
                target=self._target + i * self._block_bytes % self._slots_bytes,
                target_key=self._target_key,
                trigger=self._counter,
                threshold=generation,
                acked=True,
            )
            for i in range(self._blocks)
        ]
        last = puts[-1]._replace(flag_target=self._flag, flag_key=self._flag_key, flag_value=generation)
        return [*puts[:-1], last]

    def nanoseconds(self, *, staging: bool = False, fired: bool = False) -> int:
        """The time from the flag's store, or from arming, to the last acknowledgement."""
        generation = next(self._generations)
        watch_acks(
            self._fabric,
            [AckWatch(next(self._tags), self._endpoint, self._acks.address, generation, 0, 1)],
        )
        puts = self._puts(generation)
        if fired:
            self._flags[0].store(generation)  # the threshold is already met when they are armed
            start_ns = time.monotonic_ns()
            arm(self._fabric, puts)
        elif staging:
            start_ns = time.monotonic_ns()
            ctypes.memmove(self._source.address, self._kv_address(), self._source.length)
            arm(self._fabric, puts)
        else:
            arm(self._fabric, puts)
            start_ns = time.monotonic_ns()
        self._flags[0].store(generation)  # calling it twice is harmless
        while select.select([self._fabric], [], [], _WAIT_S)[0]:
            for event in self._fabric.reap():
                if event.kind == EventKind.ACKED:
                    return event.time_ns - start_ns
        message = "the sink did not acknowledge"
        raise TimeoutError(message)

    @functools.cache  # noqa: B019 - as long as the bench
    def _kv_address(self) -> int:
        """The KV's own memory, from which the CPU copies."""
        self._kv = allocate(self._source.length)
        return _address_of(self._kv)

    def close(self) -> None:
        """End the other process too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
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

    def gbps(self, kind: DiskOpKind, length: int, *, wipes: bool = False) -> float:
        """Read or write the whole file in records of this length, or write a page of another place after each."""
        offsets = range(0, self._size_bytes - length + 1, length)
        ops = [DiskOp(kind, self._address + offset, length, offset, length) for offset in offsets]
        if wipes:
            headers = [*offsets[len(offsets) // 2 :], *offsets[: len(offsets) // 2]]
            pages = [DiskOp(kind, self._address, PAGE_BYTES, offset, PAGE_BYTES) for offset in headers]
            ops = [op for pair in zip(ops, pages, strict=True) for op in pair]
        start_ns = time.monotonic_ns()
        begun = ended = 0
        while ended < len(ops):
            begun += self._disk.submit(ops[begun : min(len(ops), ended + _DEPTH)])
            select.select([self._disk], [], [], _WAIT_S)
            for done in self._disk.reap():
                assert done.result == done.tag, done
                ended += 1
        return len(offsets) * length / (time.monotonic_ns() - start_ns)

    def operation_ns(self, kind: DiskOpKind, length: int, depth: int) -> int:
        """The mean time of one operation with `depth` in flight, at most 64 MiB of them."""
        count = max(2 * depth, min(_OPERATION_BYTES // length, _OPERATIONS_MAX))
        places = self._size_bytes // length
        took_ns = ended = begun = 0
        waiting: dict[int, int] = {}
        while ended < count:
            ops = [
                DiskOp(
                    kind,
                    self._address + (i * length) % (places * length),
                    length,
                    (i * _STRIDE % places) * length,
                    i,
                )
                for i in range(begun, min(count, ended + depth))
            ]
            now_ns = time.monotonic_ns()
            accepted = self._disk.submit(ops)
            waiting.update((op.tag, now_ns) for op in ops[:accepted])
            begun += accepted
            select.select([self._disk], [], [], _WAIT_S)
            for done in self._disk.reap():
                assert done.result == length, done
                took_ns += time.monotonic_ns() - waiting.pop(done.tag)
                ended += 1
        return took_ns // count

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
