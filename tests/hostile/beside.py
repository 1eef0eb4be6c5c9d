"""A well-behaved neighbour beside an attack, and how much the neighbour and the node may be affected.

What always holds: the neighbour is compared with itself alone, some seconds before in the same run, and, call by call,
with a second neighbour that does the same on another node of the machine, which is not attacked. The second one's
losses are due to the machine, whose few cores also run the attackers. Nothing is measured twice. An attack is a
separate process with its own address, and is ended by its process id. The first moments of an attack, in which the node
identifies its source, are measured separately: calls may be slow, and may not fail.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from math import sqrt
from pathlib import Path
from statistics import median
from threading import Timer
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvstore.client import Block, Hit
from kvstore.errors import KvError
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from nic_offload.memory import allocate
from tests.conftest import small_client, small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client import Client
    from kvstore.demo.node_process import NodeProcess
    from nic_offload.fabric import Region

SHORT_S = 2.4
SECONDS = float(os.environ.get("TRIGGERKV_HOSTILE_S", SHORT_S))
ALONE_S = 2.0  # before an attack, unless it was measured just now
ALONE_LASTS_S = 15.0
BEHIND_S = 0.3  # after each attack no error may come, either
FIRST_S = 2.0  # in which the node finds out who attacks it
SLOWER_MAX = 2.0  # than alone, 99 of 100 calls
SIGMAS = 3.0  # that slow calls may exceed those elsewhere by, as two counts of the same do by chance
NOISE_S = 0.010  # a p99 below this says nothing: so much comes of other work on the machine,
NOISE_OF_P50 = 4  # or below so many times the p50, on a machine that is slow as a whole
MEMORY_MAX = 64 << 20  # that a node may keep of an attack, beyond what it takes elsewhere
MEMORY_BACK_S = 30
ATTACKERS = range(2, 255)  # the last bytes of their addresses: what one did is not held against the next
PAGE = 4096
_ROOT = Path(__file__).resolve().parents[2]


class Times(NamedTuple):
    """The durations of the neighbour's calls and, in alternation, of calls to the other node; its errors."""

    here: list[float]
    elsewhere: list[float]
    errors: list[str]

    def __str__(self) -> str:
        ms = [f"{1000 * one:.1f}" for one in (median(self.here), p99(self.here), p99(self.elsewhere))]
        return f"{len(self.here)} calls, p50 {ms[0]} ms, p99 {ms[1]}, elsewhere {ms[2]}, {len(self.errors)} errors"


def p99(taken: Sequence[float]) -> float:
    return sorted(taken)[len(taken) * 99 // 100]


def _attackers() -> subprocess.Popen[str]:
    """A process that begins an attack at once on request."""
    attackers = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.attacks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        start_new_session=True,
    )
    assert attackers.stdout is not None
    assert attackers.stdout.readline() == "ready\n"
    return attackers


class Neighbour:
    """A well-behaved client, of the tenant `good`."""

    def __init__(self, target: str) -> None:
        self.client: Client = small_client(target, token="good")
        self._region: Region | None = None
        self.put: deque[bytes] = deque(maxlen=64)  # keys, the last
        self.keys = [block_key(b"good", bytes([number])) for number in range(8)]
        for key in self.keys:
            self.client.put_inline(key, key * 128)

    def get_inline(self, number: int) -> object:
        return self.client.get_inline(self.keys[number % len(self.keys)], PAGE)

    def put_and_get(self, number: int) -> object:
        """Put a block over the fabric, or into memory that both map, and get one."""
        if self._region is None:
            self._region = self.client.register(allocate(2 * PAGE))
        key = block_key(b"good", b"put", number.to_bytes(8))
        (ended,) = self.client.put([Block(key, self._region, 0, PAGE)])
        if ended.error is not None:
            raise ended.error
        self.put.append(key)
        return self.client.get([Block(key, self._region, PAGE, PAGE)])[0]


Work = Callable[[Neighbour, int], object]


class Beside:
    """A node with the tenants `good` and `evil` and a client of `good`, and a second such node without attacks."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.tenants = folder / "tenants.toml"
        self.audit = folder / "audit.jsonl"
        self.write_tenants("good", "evil")
        both = ("--tenants", str(self.tenants), *arguments)
        more = ("--audit", str(self.audit), "--http", "127.0.0.1:0", "--ui")
        self._undo = ExitStack()
        try:
            self.node = self._begin(folder / "node", *both, *more)
            self._attackers = _attackers()
            self._undo.callback(self._close_attackers)
            self._elsewhere = self._begin(folder / "elsewhere", *both)
            self._neighbour, self._twin = Neighbour(self.node.target), Neighbour(self._elsewhere.target)
            self._undo.callback(self._twin.client.close)
            self._undo.callback(self._neighbour.client.close)
        except BaseException:
            self._undo.close()
            raise
        self.client, self.keys, self.put = self._neighbour.client, self._neighbour.keys, self._neighbour.put
        self.port = int(self.node.target.rpartition(":")[2])
        (found,) = re.findall(r"the page at http://127.0.0.1:(\d+)", self.node.log())
        self.http_port = int(found)
        self.work: Work = Neighbour.get_inline
        self.seconds = SECONDS
        self._done = self._attacks = 0
        self._alone: tuple[float, Times] | None = None  # when it ended

    def _begin(self, folder: Path, *arguments: str) -> NodeProcess:
        node = small_node(folder, arguments=arguments)
        self._undo.callback(node.stop)
        return node

    def write_tenants(self, *names: str) -> None:
        quota = (
            f"bytes = {32 << 20}\n"  # of a drive of 64 MiB: without one a tenant may take the others' place
        )
        entries = [f'[{one}]\ntokens_sha256 = ["{token_digest(one)}"]\n{quota}' for one in names]
        self.tenants.write_text("".join(entries))

    def times(self, seconds: float) -> Times:
        """Let the neighbour work for this long, in alternation with calls to the other node."""
        times = Times([], [], [])
        start = began = time.monotonic()
        while began < start + seconds:
            try:
                found = self.work(self._neighbour, self._done)
                if not isinstance(found, Hit) and not isinstance(found, bytes):
                    times.errors.append(str(found))
            except KvError as error:
                times.errors.append(f"{type(error).__name__}: {error}")
            ended = time.monotonic()
            times.here.append(ended - began)
            self.work(self._twin, self._done)
            began = time.monotonic()
            times.elsewhere.append(began - ended)
            self._done += 1
        return times

    @contextmanager
    def attack(self, name: str, seconds: float, **told: Any) -> Iterator[dict[str, Any]]:
        """Run an attack for this long beside the `with` block; the result is complete at its end."""
        did: dict[str, Any] = {}
        source = f"127.0.0.{ATTACKERS[self._attacks % len(ATTACKERS)]}"
        self._attacks += 1
        orders, reports = self._attackers.stdin, self._attackers.stdout
        assert orders is not None
        assert reports is not None
        order = [name, time.monotonic() + seconds, source, {"port": self.port} | told]
        orders.write(json.dumps(order) + "\n")
        orders.flush()
        try:
            yield did
        except BaseException:
            self._new_attackers()
            raise
        overdue = Timer(seconds + 30, self._end_attackers)  # then the line is empty
        overdue.start()
        reported = reports.readline()
        overdue.cancel()
        if not reported.strip():
            self._new_attackers()
            raise AssertionError(f"the attack {name} failed, or did not end")
        did.update(json.loads(reported))

    def _new_attackers(self) -> None:
        self._close_attackers()
        self._attackers = _attackers()

    def _close_attackers(self) -> None:
        self._end_attackers()
        with self._attackers:  # closes its pipes
            pass

    def _end_attackers(self) -> None:
        """End the attack, which is a process group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._attackers.pid, signal.SIGKILL)
        self._attackers.wait()

    def endure(self, name: str, **told: Any) -> tuple[Times, Times, dict[str, Any]]:
        """Measure the neighbour alone, then beside an attack; it must never get an error."""
        alone = self._alone_before()
        descriptors, beyond = self.descriptors(), self.memory_beyond_elsewhere()
        first, under, did = self._under(name, **told)
        print(  # noqa: T201 - pytest shows it with -s, or when the test fails
            f"{name}: alone {alone}; at first {first}; under {under}; it did {did}"
        )
        assert not alone.errors
        wait_until(lambda: self.descriptors() <= descriptors + 2, "the node has its descriptors back", 30)
        until = time.monotonic() + MEMORY_BACK_S
        while (grown := self.memory_beyond_elsewhere() - beyond) > MEMORY_MAX and time.monotonic() < until:
            time.sleep(0.2)
        assert grown <= MEMORY_MAX, f"{MEMORY_BACK_S} s later the node has {grown >> 20} MiB more than before"
        return alone, under, did

    def _under(self, name: str, **told: Any) -> tuple[Times, Times, dict[str, Any]]:
        """The neighbour's times in the first moments of an attack and later, and the attack's report."""
        with self.attack(name, self.seconds + FIRST_S, **told) as did:
            first = self.times(FIRST_S)
            under = self.times(self.seconds)
        behind = self.times(BEHIND_S)
        assert not first.errors + under.errors + behind.errors
        return first, under, did

    def _alone_before(self) -> Times:
        """The neighbour's times alone, measured again if they are old."""
        if self._alone is None or time.monotonic() - self._alone[0] > ALONE_LASTS_S:
            self._alone = time.monotonic(), self.times(ALONE_S)
        return self._alone[1]

    def begin(self, work: Work, seconds: float) -> Self:
        """Set the work of the neighbour, and the duration of each attack."""
        self.seconds = seconds
        if work != self.work:
            self.work, self._alone = work, None
        return self

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.node.pid}/fd").iterdir()))

    def memory_bytes(self) -> int:
        return _memory_bytes(self.node)

    def memory_beyond_elsewhere(self) -> int:
        """The node's memory beyond that of the other node, which serves the same neighbour."""
        return _memory_bytes(self.node) - _memory_bytes(self._elsewhere)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory_bytes(node: NodeProcess) -> int:
    pages = Path(f"/proc/{node.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def check_speed(alone: Times, under: Times) -> None:
    """Fail if over 1 % of the calls took twice the p99 alone, beyond those at the other node; print by how much."""
    usual = max(p99(alone.here + alone.elsewhere), NOISE_S, NOISE_OF_P50 * median(alone.here))
    slow, elsewhere = (
        sum(one > SLOWER_MAX * usual for one in calls) for calls in (under.here, under.elsewhere)
    )
    worst = p99(under.here)
    assert slow - elsewhere <= len(under.here) / 100 + SIGMAS * sqrt(slow + elsewhere), (
        f"p99 {worst * 1000:.1f} ms beside the attack is {worst / usual:.1f} times {usual * 1000:.1f} ms alone:"
        f" of {len(under.here)} calls {slow} took more than {SLOWER_MAX:.0f} times that, and {elsewhere} elsewhere"
    )
