"""A client in a process of its own, which puts blocks in three ways until its parent kills it.

    python -m tests.mixed.departing_client HOST:PORT < plan.json

The plan has the client's arguments, and key, bytes and domain of each block. It prints a line before its first put.
What it doesn't do: wait for a put, or report one.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from kvstore.client import Block, Client
from kvstore.errors import KvError
from nic_offload.memory import allocate

SLOTS, ROOM_BYTES = 8, 1 << 19


def main() -> None:
    plan = json.load(sys.stdin)
    client = Client(sys.argv[1], slots=SLOTS, block_bytes_max=ROOM_BYTES, **plan["client"])
    memory = allocate(SLOTS * ROOM_BYTES)
    region = client.register(memory)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number, (key, data, domain) in enumerate(map(bytes.fromhex, one) for one in plan["blocks"]):
        offset = number % SLOTS * ROOM_BYTES
        memory[offset : offset + len(data)] = data
        block = Block(key, region, offset, len(data), domain=domain)
        with suppress(KvError):
            if number % 3 == 0:
                client.reserve([block]).arm(None)
            elif number % 3 == 1:
                client.arm([block])
            else:
                client.put_inline(key, data, domain=domain)


if __name__ == "__main__":
    main()
