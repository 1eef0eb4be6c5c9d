"""A client of a node or a cluster, on a host; it takes commands and answers in lines of JSON."""

from __future__ import annotations

import json
import mmap
import random
import sys
import time
from typing import Any

from kvstore.client import Block, Client, ClusterBlock, ClusterClient
from kvstore.errors import KvError
from kvstore.names import block_key
from nic_offload.flags import FlagWords

MIB = 1 << 20


def _bytes_of(name: str, length: int) -> bytes:
    return random.Random(name).randbytes(length)


class Caller:
    """One client, and memory to put from and to get into."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._length, self._most = settings.pop("length", MIB), settings.pop("blocks", 8)
        settings |= {"slots": self._most, "block_bytes_max": self._length}
        self._client: Any
        self._kind: type[Block | ClusterBlock]
        if "nodes" in settings:
            self._client, self._kind = (
                ClusterClient(settings.pop("nodes"), replicas=2, **settings),
                ClusterBlock,
            )
        else:
            self._client, self._kind = Client(settings.pop("target"), **settings), Block
        self._memory = mmap.mmap(-1, self._length * self._most)
        self._region = self._client.register(self._memory)
        self._flags = FlagWords.create(1)

    def _keys(self, name: str, count: int) -> list[bytes]:
        return [block_key(name.encode(), bytes([i])) for i in range(count)]

    def _blocks(self, name: str, count: int) -> list[Any]:
        return [
            self._kind(
                key,
                self._region,
                i * self._length,
                self._length,
                threshold=1,
            )
            for i, key in enumerate(self._keys(name, count))
        ]

    def _expected(self, name: str, count: int) -> list[bytes]:
        return [_bytes_of(f"{name} {i}", self._length) for i in range(count)]

    def put(self, name: str, count: int, timeout_s: float = 20.0) -> object:
        """Put blocks by the flag, and wait until they are written; returns WRITTEN or the kind of error for each."""
        self._memory[: count * self._length] = b"".join(self._expected(name, count))
        self._flags[0].store(0)
        puts = self._client.arm(self._blocks(name, count), self._flags[0])
        self._flags[0].store(1)
        return [
            str(result.durability and result.durability.name)
            if result.error is None
            else type(result.error).__name__
            for result in puts.wait(timeout_s=timeout_s)
        ]

    def get(self, name: str, count: int, timeout_s: float = 20.0) -> object:
        """Get blocks; returns `exact` or the reason for each."""
        self._memory[:] = bytes(len(self._memory))
        found = self._client.get(self._blocks(name, count), timeout_s=timeout_s)
        told = []
        for i, (one, expected) in enumerate(zip(found, self._expected(name, count), strict=True)):
            exact = self._memory[i * self._length : (i + 1) * self._length] == expected
            reason = getattr(one, "reason", None)
            told.append("exact" if reason is None and exact else "WRONG" if reason is None else str(one))
        return told

    def members(self) -> object:
        return {one.node: one.zone for one in self._client.nodes.map.members}

    def owners(self, name: str, count: int) -> object:
        return [self._client.owners(key) for key in self._keys(name, count)]

    def status(self) -> object:
        """The node's number of clients, by gRPC."""
        return self._client.status().connections

    def inline(self, name: str) -> object:
        key = block_key(name.encode())
        self._client.put_inline(key, name.encode())
        got = self._client.get_inline(key, len(name))
        return got.decode() if isinstance(got, bytes) else str(got)


def main() -> None:
    """Execute each line of standard input, and print its answer."""
    caller = Caller(json.loads(sys.argv[1]))
    print(json.dumps("here"), flush=True)  # noqa: T201 - the test reads it
    for line in sys.stdin:
        name, *words = json.loads(line)
        began = time.monotonic()
        try:
            answer: object = getattr(caller, name)(*words)
        except KvError as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps([answer, time.monotonic() - began]), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
