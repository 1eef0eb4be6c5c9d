"""A second process, `python -m tests.nic_offload.far PROVIDER LENGTH`, for its peer's operations.

Peers may write to its memory and read from it.

It prints one line of JSON about itself, and reads one about its peer. If that names slots, it puts each of them
repeatedly. Then it waits until its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nic_offload.fabric import MEMORY
from tests.nic_offload.rig import PAGE, Side, Way, skip

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOT_BYTES = 64 << 10
_PATIENCE_S = 5.0


def slot_block(slot: int) -> bytes:
    """The bytes that a far process puts into a slot, made from its number."""
    rng = random.Random(slot)
    return rng.randbytes(rng.randrange(1, SLOT_BYTES))


def about(side: Side) -> dict[str, Any]:
    return {
        "address": side.endpoint.address().hex(),
        "base": side.region.base,
        "key": side.region.key,
        "length": side.length,
        "memory": side.region.address,
    }


def way_to(near: Side, said: dict[str, Any]) -> Way:
    return Way(near, bytes.fromhex(said["address"]), said["base"], said["key"], said["length"])


class Far:
    def __init__(self, provider: str, length: int) -> None:
        if provider == MEMORY:
            skip("the provider memory reaches no other process")
        self.provider = provider
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nic_offload.far", provider, str(length)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline())

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Stop all threads of the process."""
        self._needs_more_than_shm()
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._needs_more_than_shm()
        self._end()

    def _needs_more_than_shm(self) -> None:
        if self.provider == "shm":
            skip("shm: a process that dies or stops in it may keep a lock that all others wait for")

    def _end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for left in Path("/dev/shm").glob(f"{self.process.pid}:*"):  # a killed process can't remove its own
            left.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        if self.provider == "shm":
            self.process.stdin.close()  # it ends by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self._end()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _ended(side: Side, tag: int) -> bool:
    """Wait for a put's end; on shm there is none once the target is closed."""
    with contextlib.suppress(AssertionError):
        side.final(tag, _PATIENCE_S)
        return True
    return False


def main(arguments: Sequence[str]) -> None:
    provider, length = arguments
    with Side(provider, int(length), remote_read=True) as side:
        print(json.dumps(about(side)), flush=True)  # noqa: T201 - this is how it talks
        for line in sys.stdin:
            told = json.loads(line)
            way = way_to(side, told)
            for slot in range(told.get("slots", 0)):
                block = slot_block(slot)
                at = slot * SLOT_BYTES % side.length
                if slot * SLOT_BYTES >= side.length and not _ended(side, slot - side.length // SLOT_BYTES):
                    return
                side.fill(at, block)
                way.arm(way.put(slot, len(block), source=at, target=slot * SLOT_BYTES, flag=(slot, slot + 1)))


if __name__ == "__main__":
    assert PAGE // 8 > 1
    main(sys.argv[1:])
