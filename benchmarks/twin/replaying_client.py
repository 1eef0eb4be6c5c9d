"""A client in its own process that replays requests against one or more nodes, and reports how long each took.

    python -m benchmarks.twin.replaying_client BLOCK_BYTES_MAX BLOCKS_MAX SALT HOST:PORT [HOST:PORT ...]

Each line on standard input is the name of a JSON file with the size of a block, and requests, `[user, [block, ...]]`
each. For every request it gets all blocks from the user's home at once, then puts the missing ones and waits until they
are written. It answers with the name of a file of rows, a `Row` each.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kvstore.client import Block, Hit, Nodes
from kvstore.durability import Durability
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate

__all__ = ["Row", "main"]

_WAIT_S = 60.0
_MARK_BYTES = 8


class Row(NamedTuple):
    """The result of a request."""

    started_ns: int
    ended_ns: int
    get_ns: int
    put_ns: int
    blocks: int
    lacking: int
    wrong: int  # blocks that came back with another's bytes: there must be none


class _Client:
    def __init__(self, block_bytes: int, blocks_max: int, salt: bytes, targets: list[str]) -> None:
        self._salt = salt
        self._nodes = Nodes(targets, slots=2 * blocks_max, block_bytes_max=block_bytes)
        self._flags = FlagWords.create(1)
        self._out, self._in = allocate(block_bytes * blocks_max), allocate(block_bytes * blocks_max)
        self._source, self._into = self._nodes.register(self._out), self._nodes.register(self._in)
        self._out[:] = bytes(range(256)) * (len(self._out) // 256)

    def request(self, size: int, user: int, numbers: list[int]) -> Row:
        started_ns = time.monotonic_ns()
        client, flag = self._nodes.of(f"user {user}"), self._flags[0]
        keys = [block_key(self._salt, number.to_bytes(8)) for number in numbers]
        into, source = self._into.at(client), self._source.at(client)
        wanted = [Block(key, into, i * size, size) for i, key in enumerate(keys)]
        begin_ns = time.monotonic_ns()
        outcomes = client.get(wanted, timeout_s=_WAIT_S)
        got_ns = time.monotonic_ns()
        hits = [isinstance(outcome, Hit) for outcome in outcomes]
        wrong = sum(
            self._in[i * size : i * size + _MARK_BYTES] != numbers[i].to_bytes(_MARK_BYTES)
            for i, hit in enumerate(hits)
            if hit
        )
        lacking = [i for i, hit in enumerate(hits) if not hit]
        for i in lacking:
            self._out[i * size : i * size + _MARK_BYTES] = numbers[i].to_bytes(_MARK_BYTES)
        begun_ns = time.monotonic_ns()
        if lacking:
            flag.store(0)
            blocks = [Block(keys[i], source, i * size, size) for i in lacking]
            puts = client.arm(blocks, flag, durability=Durability.WRITTEN)
            flag.store(1)
            for result in puts.wait(_WAIT_S):
                if result.error is not None:
                    raise result.error
        end_ns = time.monotonic_ns()
        return Row(
            started_ns, end_ns, got_ns - begin_ns, end_ns - begun_ns, len(numbers), len(lacking), wrong
        )

    def close(self) -> None:
        self._nodes.close()
        self._flags.close()


def main(block_bytes: str, blocks_max: str, salt: str, *targets: str) -> None:
    """Execute commands until standard input ends."""
    client = _Client(int(block_bytes), int(blocks_max), salt.encode(), list(targets))
    print("ok", flush=True)
    try:
        for line in sys.stdin:
            path = Path(line.strip())
            asked = json.loads(path.read_text())
            rows = [client.request(asked["block_bytes"], user, blocks) for user, blocks in asked["requests"]]
            answer = path.with_suffix(".rows")
            answer.write_text(json.dumps(rows))
            print(f"ok {answer}", flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
