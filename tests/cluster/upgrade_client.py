"""A client of a cluster, of the imported version. It takes commands and answers in lines of JSON.

It uses only what both versions have.
"""

from __future__ import annotations

import json
import mmap
import random
import sys
from typing import Any

import kvstore.client
from kvstore.client import ClusterBlock, ClusterClient
from kvstore.errors import KvError
from kvstore.names import block_key

COUNT, BYTES = 24, 32 << 10
USER = "ada"


class Engine:
    """A client, and memory to put from and to get into."""

    def __init__(self, node: str) -> None:
        self._client = ClusterClient([node], replicas=2, slots=16, block_bytes_max=1 << 20)
        self._memory = mmap.mmap(-1, COUNT * BYTES)
        self._kv = self._client.register(self._memory)

    def _keys(self, name: str) -> list[bytes]:
        return [block_key(name.encode(), bytes([i])) for i in range(COUNT)]

    def _blocks(self, name: str) -> list[ClusterBlock]:
        return [ClusterBlock(key, self._kv, i * BYTES, BYTES) for i, key in enumerate(self._keys(name))]

    def where(self) -> str:
        return kvstore.client.__file__

    def put(self, name: str) -> list[str]:
        """Put the blocks of a name; returns the kinds of outcomes."""
        self._memory[:] = random.Random(name).randbytes(len(self._memory))
        results = self._client.put(self._blocks(name), timeout_s=20)
        return sorted({str(one.durability and one.durability.name) for one in results})

    def get(self, name: str) -> list[str]:
        """Get the blocks; returns `exact`, or the reason."""
        self._memory[:] = bytes(len(self._memory))
        outcomes = self._client.get(self._blocks(name), timeout_s=20)
        expected = random.Random(name).randbytes(len(self._memory))
        told = set()
        for at, one in enumerate(outcomes):
            piece = slice(at * BYTES, (at + 1) * BYTES)
            reason = getattr(one, "reason", None)
            exact = "exact" if self._memory[piece] == expected[piece] else "WRONG"
            told.add(exact if reason is None else reason.name)
        return sorted(told)

    def delete(self, name: str) -> bool:
        return all(self._client.delete(self._keys(name)))

    def copies(self, name: str) -> int:
        """The number of copies on all nodes."""
        nodes = self._client.nodes
        each = [nodes.at(one.node).exists(self._keys(name)) for one in nodes.map.members]
        return sum(getattr(one, "reason", None) is None for some in each for one in some)

    def members(self) -> list[str]:
        return sorted(one.node for one in self._client.nodes.map.members)

    def say(self, number: int) -> int:
        """Put a block of a session and append it, unless that is done; returns the session's length."""
        if number and self.said() > number:
            return number + 1
        key = block_key(b"session", number.to_bytes(4))
        nodes = self._client.nodes
        nodes.of(USER).put_inline(key, key * 8)
        return nodes.session(USER, "chat").append([key], tokens=16)

    def said(self) -> int:
        """The number of the session's blocks, after reading each of them."""
        nodes = self._client.nodes
        keys = nodes.session(USER, "chat").keys()
        assert keys == [block_key(b"session", number.to_bytes(4)) for number in range(len(keys))]
        assert all(nodes.of(USER).get_inline(key, 256) == key * 8 for key in keys)
        return len(keys)


def main() -> None:
    """Execute each line of standard input, and print its answer."""
    engine = Engine(sys.argv[1])
    for line in sys.stdin:
        what, *words = json.loads(line)
        try:
            answer: Any = getattr(engine, what)(*words)
        except KvError as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
