"""Our client in its own process, used as an application would; it takes the commands that `redis_client.c` takes.

    python -m benchmarks.peers.ours HOST:PORT

And these, which Redis has no counterpart for:

    armed CALLS CADENCE_US  arm this many puts ahead, then store to the flag for one after the other: when the last one
                            has landed or, with a cadence, from another process, at this interval in microseconds
    keep NAME OTHER         use the same blocks under another name as well
    ready                   wait until the restarted node answers a get over its fabric again

Times are the caller's: from the call of `arm`, or the flag's store if puts were armed ahead, until `wait` has returned.
A put `landed` or `written` requests that durability.
"""

from __future__ import annotations

import itertools
import resource
import secrets
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from benchmarks.peers.client_process import WorkerFailed
from kvstore.client import Block, Client, Hit
from kvstore.durability import Durability
from kvstore.errors import KvError
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client import ArmedPuts

__all__ = ["main", "store_at_cadence"]

_WAIT_S = 60.0
_SLOTS_FACTOR = 2
_NO_SLOT_S = 0.0002
_HOW = {"landed": Durability.LANDED, "written": Durability.WRITTEN}


def store_at_cadence(path: str, count: int, cadence_us: int) -> None:
    """Run in the other process: store 1, 2, 3, ... and report the time of each store."""
    stored_ns = []
    with FlagWords.open(path) as flags:
        word = flags[0]
        sys.stdin.readline()
        due_ns = time.monotonic_ns()
        for i in range(count):
            due_ns += cadence_us * 1000
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            now_ns = time.monotonic_ns()
            word.store(i + 1)
            stored_ns.append(now_ns)
        time.sleep(cadence_us / 1e6)  # its own end is not timed
    print(*stored_ns, flush=True)


def _cpu_ns() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int((used.ru_utime + used.ru_stime) * 1e9)


class _Ours:
    """A client, and the memory of its blocks."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._client: Client | None = None
        self._salt, self._numbers = secrets.token_bytes(8), itertools.count()
        self._sets: dict[str, list[bytes]] = {}
        self._flags = FlagWords.create(1)
        self._stores = 0

    def open(self, size: str, slots: str) -> str:
        """Allocate memory, here and on the node, for this many blocks of this size."""
        self.close()
        self._size, self._slots = int(size), int(slots)
        self._client = Client(
            self._target, slots=_SLOTS_FACTOR * self._slots, block_bytes_max=self._size
        )  # blocks that have landed and are not written yet keep theirs
        source, self._memory = (
            allocate(self._size * self._slots),
            allocate(self._size * self._slots),
        )
        source[:] = self._content = secrets.token_bytes(self._size * self._slots)
        self._source, self._into = self._client.register(source), self._client.register(self._memory)
        return ""

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _blocks(self, keys: Sequence[bytes], first: int, *, put: bool, threshold: int = 0) -> list[Block]:
        region = self._source if put else self._into
        return [
            Block(key, region, (first + i) % self._slots * self._size, self._size, threshold)
            for i, key in enumerate(keys)
        ]

    def _fresh(self, count: int) -> list[bytes]:
        return [block_key(self._salt, next(self._numbers).to_bytes(8)) for _ in range(count)]

    def _calls(self, begin: Callable[[int], Callable[[], None]], calls: int, window: int) -> str:
        """Begin this many calls, keep `window` under way, and wait for each in order."""
        begun_ns, calls_ns = [0] * calls, [0] * calls
        under_way: deque[tuple[int, Callable[[], None]]] = deque()

        def take() -> None:
            call, wait = under_way.popleft()
            wait()
            calls_ns[call] = time.monotonic_ns() - begun_ns[call]

        start_ns, start_cpu_ns = time.monotonic_ns(), _cpu_ns()
        for call in range(calls):
            begun_ns[call] = time.monotonic_ns()
            under_way.append((call, begin(call)))
            if len(under_way) == window:
                take()
        while under_way:
            take()
        end_ns = time.monotonic_ns()
        return " ".join(map(str, (start_ns, end_ns, _cpu_ns() - start_cpu_ns, *calls_ns)))

    def put(self, name: str, how: str, batch: str, window: str, calls: str) -> str:
        """Put new blocks; each call arms, stores to the flag word, and waits for the result."""
        client, flag, durability, width = self._client, self._flags[0], _HOW[how], int(batch)
        assert client is not None
        keys = self._sets[name] = self._fresh(width * int(calls))
        before, self._stores = self._stores, self._stores + int(calls)
        blocks = [
            self._blocks(keys[i : i + width], i, put=True, threshold=before + i // width + 1)
            for i in range(0, len(keys), width)
        ]

        def begin(call: int) -> Callable[[], None]:
            puts = client.arm(blocks[call], flag, durability=durability)
            flag.store(before + call + 1)
            return lambda: _told(puts)

        return self._calls(begin, int(calls), int(window))

    def get(self, name: str, batch: str, window: str) -> str:
        """Get the blocks of this name; every call is one get."""
        client, keys, width = self._client, self._sets[name], int(batch)
        assert client is not None

        blocks = [self._blocks(keys[i : i + width], i, put=False) for i in range(0, len(keys), width)]

        def begin(call: int) -> Callable[[], None]:
            getting = client.getting(blocks[call], timeout_s=_WAIT_S)

            def wait() -> None:
                for outcome in getting.wait():
                    if not isinstance(outcome, Hit):
                        raise WorkerFailed(f"a block of {name} did not come back: {outcome}")

            return wait

        return self._calls(begin, len(blocks), int(window))

    def armed(self, count: str, cadence_us: str) -> str:
        """Put one block per value of the flag; 32 KiB, or the open size."""
        assert self._client is not None
        keys = self._sets["armed"] = self._fresh(int(count))
        with FlagWords.create(1) as flags:
            puts = [
                self._client.arm(
                    self._blocks([key], i, put=True, threshold=i + 1),
                    flags[0],
                    durability=Durability.LANDED,
                )
                for i, key in enumerate(keys)
            ]
            cpu_ns = _cpu_ns()
            if int(cadence_us):
                stored_ns, reported_ns = self._stored_elsewhere(flags.path, puts, int(cadence_us))
            else:
                stored_ns, reported_ns = [], []
                for i, one in enumerate(puts):
                    stored_ns.append(time.monotonic_ns())
                    flags[0].store(i + 1)
                    _told(one)
                    reported_ns.append(time.monotonic_ns())
        calls_ns = [told - stored for stored, told in zip(stored_ns, reported_ns, strict=True)]
        return " ".join(map(str, (stored_ns[0], reported_ns[-1], _cpu_ns() - cpu_ns, *calls_ns)))

    @staticmethod
    def _stored_elsewhere(
        path: str, puts: Sequence[ArmedPuts], cadence_us: int
    ) -> tuple[list[int], list[int]]:
        program = (
            f"from benchmarks.peers.ours import store_at_cadence as s; s({path!r}, {len(puts)}, {cadence_us})"
        )
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("\n")
            other.stdin.flush()
            reported_ns = []
            for one in puts:
                _told(one)
                reported_ns.append(time.monotonic_ns())
            return [int(word) for word in other.stdout.readline().split()], reported_ns

    def check(self, name: str) -> str:
        """Count the blocks that are stored, compared byte for byte."""
        assert self._client is not None
        there = 0
        for i, key in enumerate(self._sets[name]):
            [block] = self._blocks([key], i, put=False)
            if isinstance(self._client.get([block], timeout_s=_WAIT_S)[0], Hit):
                end = block.offset + block.length
                there += self._memory[block.offset : end] == self._content[block.offset : end]
        return str(there)

    def forget(self, name: str) -> str:
        """Delete the blocks."""
        assert self._client is not None
        self._client.delete(self._sets.pop(name))
        return ""

    def keep(self, name: str, other: str) -> str:
        self._sets[other] = self._sets[name]
        return ""

    def ready(self) -> str:
        """Wait until one of our blocks comes back, which shows that the link works."""
        assert self._client is not None
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            try:
                self._client.status(wait_s=_WAIT_S)
                self.put("ready", "written", "1", "1", "1")
                self.forget("ready")
            except KvError:
                time.sleep(0.05)
            else:
                return ""
        raise WorkerFailed("the node does not come back")

    def obey(self, what: str, words: Sequence[str]) -> str:
        obeyed: dict[str, Callable[..., str]] = {
            "open": self.open,
            "put": self.put,
            "get": self.get,
            "armed": self.armed,
            "check": self.check,
            "forget": self.forget,
            "keep": self.keep,
            "ready": self.ready,
        }
        return obeyed[what](*words)


def _told(puts: ArmedPuts) -> None:
    for result in puts.wait(_WAIT_S):
        if result.error is not None:
            raise result.error


def main(target: str) -> int:
    """Execute commands from standard input; an error is reported and ends the process."""
    ours = _Ours(target)
    print("ok", flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        try:
            print("ok", ours.obey(what, words), flush=True)
        except (KvError, WorkerFailed) as error:
            print("error", type(error).__name__, " ".join(str(error).split()), flush=True)
            return 1
    ours.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
