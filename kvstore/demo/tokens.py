"""The process that stands in for a GPU: it writes a block's bytes, then stores the flag.

    python -m kvstore.demo.tokens FLAGS KV BLOCKS BLOCK_BYTES INTERVAL_MS

It prints the nanosecond of each store (CLOCK_MONOTONIC, which all processes share) and the digest of each
block.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from hashlib import blake2b

from nic_offload.flags import FlagWords

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Generate."""
    flags_path, kv_path = arguments[:2]
    blocks, block_bytes, interval_ms = (int(text) for text in arguments[2:])
    stored_ns, digests = [], []
    with open(kv_path, "r+b") as file, mmap.mmap(file.fileno(), 0) as kv, FlagWords.open(flags_path) as flags:  # noqa: PTH123 - a path of /proc
        for token in range(blocks):
            data = os.urandom(block_bytes)
            kv[token * block_bytes : (token + 1) * block_bytes] = data
            digests.append(blake2b(data).hexdigest())
            stored_ns.append(time.monotonic_ns())
            flags[0].store(token + 1)
            time.sleep(interval_ms / 1000)
    json.dump({"stored_ns": stored_ns, "digests": digests}, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
