"""The service compared with the plain fabric, drive, TCP and gRPC: rates, latencies, CPU time, and many sessions.

All times are the caller's. A put's latency is from the store to the flag word until `wait` returns, for a block that
was armed before; a get's is that of the whole call. `hot` is answered from the node's memory, `cold` from its drive.
"""

from __future__ import annotations

import itertools
import os
import secrets
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plain import PlainFabric, tcp_round_trip_us
from benchmarks.plain_stream import PlainStream
from kvstore.bench.bare import BareDrive
from kvstore.bench.path_blocks import PathBlocks
from kvstore.client import Block, Client
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.limits import HEADER_BYTES, HOT_BYTES_DEFAULT
from kvstore.miss import Miss
from kvstore.names import block_key
from kvstore.storage.disk import DiskOpKind
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.form import Form
    from kvstore.client import ArmedPuts

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (  # bytes of a block, blocks at a time, goal on the drive
    (256 * _KIB, 32, 0.8),
    (_MIB, 64, 0.85),
    (4 * _MIB, 16, 0.85),
)
_SMALL, _BATCH = 32 * _KIB, 64
_ROUNDS = 60
_IDLE_US = 2000
_CPU_ROUNDS = 6
_CAPACITY = "2GiB"  # the largest that is filled with zeros when it is created
_WAIT_S = 60.0
_STREAMED = 32
_LAYERS = 8
_SESSION_BLOCKS, _SESSION_BLOCK = 4, 64 * _KIB
_FEW, _MANY, _AT_ONCE, _RESUMES = 8, 1000, 8, 400


def run(form: Form) -> None:
    """Measure all points."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        home = Path(folder).resolve()
        for block_bytes, count, goal in _SIZES:
            _rates(form, home / str(block_bytes), block_bytes, count, goal)
        _small(form, home / "small")
        _inline(form, home / "inline")
        _resumed(form, home / "resumed")
        _sessions(form, home / "sessions")


def _rates(form: Form, home: Path, block_bytes: int, count: int, drive_goal: float) -> None:
    home.mkdir()
    label = (
        f"{count} x {block_bytes // _MIB} MiB"
        if block_bytes >= _MIB
        else f"{count} x {block_bytes // _KIB} KiB"
    )
    total, record = count * block_bytes, block_bytes + HEADER_BYTES
    with (
        NodeProcess(home / "node", capacity=_CAPACITY) as node,
        Client(node.target, slots=count, block_bytes_max=block_bytes) as client,
        FlagWords.create(1) as flags,
        PlainFabric(client.fabric.provider) as fabric,
        BareDrive(home, 128 * _MIB) as drive,
        PathBlocks(client, flags, block_bytes, count) as path,
    ):

        def hot() -> float:
            path.put(count)
            path.hot_ns()
            return total / path.hot_ns()

        def cold() -> float:
            return total / path.cold_ns(count)

        def slower(kind: DiskOpKind) -> float:
            return min(fabric.gbps(block_bytes, count), drive.gbps(kind, record))

        def landed() -> float:
            return total / path.put(count).landed_ns

        def written() -> float:
            return total / path.put(count).written_ns

        def bare() -> float:
            return fabric.gbps(block_bytes, count)

        form.compare(f"put, landed, {label}", "GB/s", landed, bare, goal=0.85)
        form.compare(f"get, hot, {label}", "GB/s", hot, bare, goal=0.85)
        form.compare(
            f"put, written, {label}", "GB/s", written, lambda: slower(DiskOpKind.WRITE), goal=drive_goal
        )
        form.compare(f"get, cold, {label}", "GB/s", cold, lambda: slower(DiskOpKind.READ), goal=drive_goal)
        if block_bytes == _MIB:
            _cpu(form, node.pid, path, count)


def _cpu(form: Form, pid: int, path: PathBlocks, count: int) -> None:
    """The CPU time per gigabyte, of node and client together."""
    gigabytes = count * path.block_bytes / 1e9

    def spent(work: Callable[[], object]) -> float:
        rounds = []
        for _ in range(_CPU_ROUNDS):
            before = _cpu_s(pid)
            work()
            rounds.append((_cpu_s(pid) - before) / gigabytes)
        return statistics.median(rounds)

    form.note("CPU, put written", spent(lambda: path.put(count)), "s/GB", goal=0.9, lower_is_better=True)
    path.put(count)
    path.hot_ns()
    form.note("CPU, get hot", spent(path.hot_ns), "s/GB", goal=0.5, lower_is_better=True)


def _cpu_s(pid: int) -> float:
    """User and system time of a process and of this one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    own = os.times()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + own.user + own.system


def _told(puts: ArmedPuts) -> None:
    for result in puts.wait(_WAIT_S):
        if result.error is not None:
            raise result.error


def _push_out(others: PathBlocks) -> None:
    """Evict all blocks that were put before from the node's memory."""
    for _ in range(int(1.25 * HOT_BYTES_DEFAULT) // (others.count * others.block_bytes)):
        others.put(others.count)


class _Small:
    """Blocks of 32 KiB, one at a time or 64."""

    def __init__(self, client: Client, flags: FlagWords, others: PathBlocks) -> None:
        """`others` evict blocks from the node's memory."""
        self._client, self._flag, self._others = client, flags[0], others
        self._source = client.register(allocate(_BATCH * _SMALL))
        self._target = client.register(allocate(_BATCH * _SMALL))
        self._salt, self._numbers = secrets.token_bytes(8), itertools.count()
        self._stored: list[Block] = []

    def _fresh(self, count: int, *, together: bool = False) -> list[Block]:
        return [
            Block(
                block_key(self._salt, next(self._numbers).to_bytes(8)),
                self._source,
                i * _SMALL,
                _SMALL,
                threshold=1 if together else i + 1,
            )
            for i in range(count)
        ]

    def put_us(self, *, written: bool, idle_us: int) -> float:
        """Put blocks that were armed ahead, one after the other, each by its own store."""
        self._flag.store(0)
        self._stored = self._fresh(_ROUNDS)
        armed = [self._arm([block], written=written) for block in self._stored]
        spent_ns = []
        for i, puts in enumerate(armed):
            if idle_us:
                time.sleep(idle_us / 1e6)
            start_ns = time.monotonic_ns()
            self._flag.store(i + 1)
            _told(puts)
            spent_ns.append(time.monotonic_ns() - start_ns)
        return statistics.median(spent_ns) / 1e3

    def _arm(self, blocks: list[Block], *, written: bool) -> ArmedPuts:
        durability = Durability.WRITTEN if written else Durability.LANDED
        return self._client.arm(blocks, self._flag, durability=durability)

    def get_us(self, *, cold: bool, idle_us: int) -> float:
        """Get blocks one after the other, each by its own call."""
        self.put_us(written=True, idle_us=0)
        wanted = self._wanted(cold=cold)
        spent_ns = []
        for block in wanted:
            if idle_us:
                time.sleep(idle_us / 1e6)
            start_ns = time.monotonic_ns()
            self._client.get([block])
            spent_ns.append(time.monotonic_ns() - start_ns)
        return statistics.median(spent_ns) / 1e3

    def _wanted(self, *, cold: bool) -> list[Block]:
        """The latest blocks, in the node's memory or not."""
        if cold:
            _push_out(self._others)
        return [Block(block.key, self._target, block.offset, block.length) for block in self._stored]

    def puts_per_s(self, *, written: bool) -> float:
        """The rate of batches, each from its call of `arm`."""
        blocks = self._stored = self._fresh(_BATCH, together=True)
        self._flag.store(0)
        start_ns = time.monotonic_ns()
        puts = self._arm(blocks, written=written)
        self._flag.store(1)
        _told(puts)
        return _BATCH * 1e9 / (time.monotonic_ns() - start_ns)

    def gets_per_s(self, *, cold: bool) -> float:
        self.puts_per_s(written=True)
        wanted = self._wanted(cold=cold)
        start_ns = time.monotonic_ns()
        self._client.get(wanted)
        return _BATCH * 1e9 / (time.monotonic_ns() - start_ns)


def _small(form: Form, home: Path) -> None:
    home.mkdir()
    with (
        NodeProcess(home / "node", capacity=_CAPACITY) as node,
        Client(node.target, slots=_BATCH, block_bytes_max=_SMALL) as client,
        Client(node.target, slots=_BATCH, block_bytes_max=_MIB) as other,
        FlagWords.create(1) as flags,
        FlagWords.create(1) as other_flags,
        BareDrive(home, 128 * _MIB) as drive,
        PathBlocks(other, other_flags, _MIB, _BATCH) as others,
    ):
        small = _Small(client, flags, others)
        for idle_us, goal, label in ((0, 2.0, "back to back"), (_IDLE_US, 2.5, "after 2 ms of idleness")):

            def tcp(idle_us: int = idle_us) -> float:
                return tcp_round_trip_us(_SMALL, _ROUNDS, idle_us=idle_us)

            def landed(idle_us: int = idle_us) -> float:
                return small.put_us(written=False, idle_us=idle_us)

            def hot(idle_us: int = idle_us) -> float:
                return small.get_us(cold=False, idle_us=idle_us)

            form.compare(f"32 KiB, landed, {label}", "us", landed, tcp, goal=goal, lower_is_better=True)
            form.compare(f"32 KiB, hot get, {label}", "us", hot, tcp, goal=goal, lower_is_better=True)
        for kind, what, work in (
            (DiskOpKind.WRITE, "written", partial(small.put_us, written=True, idle_us=0)),
            (DiskOpKind.READ, "cold get", partial(small.get_us, cold=True, idle_us=0)),
        ):

            def bare(kind: DiskOpKind = kind) -> float:
                return drive.operation_ns(kind, _SMALL + HEADER_BYTES, 1) / 1e3 + 100

            form.compare(
                f"32 KiB, {what}, against the drive's own + 100 us",
                "us",
                work,
                bare,
                goal=1.0,
                lower_is_better=True,
            )
        for metric, goal, rate in (
            ("landed", 50_000, partial(small.puts_per_s, written=False)),
            ("written", 25_000, partial(small.puts_per_s, written=True)),
            ("hot", 50_000, partial(small.gets_per_s, cold=False)),
            ("cold", 25_000, partial(small.gets_per_s, cold=True)),
        ):
            median = statistics.median([rate() for _ in range(15)])
            form.note(f"32 KiB, {metric}, batches of 64", median, "1/s", goal=goal)


def _inline(form: Form, home: Path) -> None:
    home.mkdir()
    with (
        NodeProcess(home / "node", capacity=_CAPACITY) as node,
        Client(node.target) as client,
        PlainStream() as stream,
    ):
        salt, numbers = secrets.token_bytes(8), itertools.count()
        data = os.urandom(_MIB)

        def put() -> float:
            blocks = [(block_key(salt, next(numbers).to_bytes(8)), data) for _ in range(_STREAMED)]
            start_ns = time.monotonic_ns()
            for result in client.put_many_inline(blocks, durability=Durability.LANDED):
                if result.error is not None:
                    raise result.error
            spent_ns = time.monotonic_ns() - start_ns
            stored[:] = [key for key, _ in blocks]
            return _STREAMED * _MIB / spent_ns

        def hot() -> float:
            wanted = [(key, _MIB) for key in stored]
            start_ns = time.monotonic_ns()
            for got in client.get_many_inline(wanted):
                assert not isinstance(got, Miss), got
            return _STREAMED * _MIB / (time.monotonic_ns() - start_ns)

        stored: list[bytes] = []
        label = f"{_STREAMED} x 1 MiB"
        form.compare(
            f"gRPC inline, put, landed, {label}", "GB/s", put, lambda: stream.gbps(data, _STREAMED), goal=0.7
        )
        hot()
        form.compare(
            f"gRPC inline, hot get, {label}", "GB/s", hot, lambda: stream.gbps(data, _STREAMED), goal=0.7
        )


def _resumed(form: Form, home: Path) -> None:
    home.mkdir()
    count = 64
    with (
        NodeProcess(home / "node", capacity=_CAPACITY) as node,
        Client(node.target, slots=count, block_bytes_max=_MIB) as client,
        FlagWords.create(1) as flags,
        PlainFabric(client.fabric.provider) as fabric,
        BareDrive(home, 128 * _MIB) as drive,
        PathBlocks(client, flags, _MIB, count) as others,
    ):
        source, target = client.register(allocate(count * _MIB)), client.register(allocate(count * _MIB))
        salt, numbers = secrets.token_bytes(8), itertools.count()
        firsts: list[float] = []

        def resume() -> float:
            number = next(numbers).to_bytes(8)
            blocks = [
                Block(block_key(salt, number, bytes([i])), source, i * _MIB, _MIB) for i in range(count)
            ]
            flags[0].store(0)
            puts = client.arm(blocks, flags[0])
            flags[0].store(1)
            for result in puts.wait(_WAIT_S):
                if result.error is not None:
                    raise result.error
            chat = client.session("ada", number.hex())
            chat.append([block.key for block in blocks], tokens=count)
            _push_out(others)
            start_ns = time.monotonic_ns()
            with chat.resuming(lambda i, key: Block(key, target, i * _MIB, _MIB)) as coming:
                assert coming.wait_blocks(count // _LAYERS)
                first_ns = time.monotonic_ns() - start_ns
                back = coming.whole()
            spent_ns = time.monotonic_ns() - start_ns
            assert back.is_whole, back
            firsts.append(first_ns / spent_ns)
            return count * _MIB / spent_ns

        form.compare(
            "resume of 64 x 1 MiB, cold",
            "GB/s",
            resume,
            lambda: min(fabric.gbps(_MIB, count), drive.gbps(DiskOpKind.READ, _MIB + HEADER_BYTES)),
            goal=0.8,
        )
        share = statistics.median(firsts)
        form.note("resume: first of 8 layers usable after", share, "of it", goal=0.5, lower_is_better=True)


def _sessions(form: Form, home: Path) -> None:
    """A thousand sessions at once compared with eight: each is resumed by one of eight threads, repeatedly."""
    home.mkdir()
    size = _SESSION_BLOCKS * _SESSION_BLOCK
    with NodeProcess(home / "node", capacity=_CAPACITY) as node, Client(node.target) as client:
        data, salt = os.urandom(_SESSION_BLOCK), secrets.token_bytes(8)
        for i in range(_SESSION_BLOCKS):
            client.put_inline(block_key(salt, bytes([i])), data)
        keys = [block_key(salt, bytes([i])) for i in range(_SESSION_BLOCKS)]
        targets = [client.register(allocate(size)) for _ in range(_AT_ONCE)]

        def begin(number: int) -> None:
            client.session(f"user {number}", "chat").append(keys, tokens=64)

        def resume(number: int, sessions: int) -> None:
            region = targets[number % _AT_ONCE]
            back = client.session(f"user {number % sessions}", "chat").resume(
                lambda i, key: Block(key, region, i * _SESSION_BLOCK, _SESSION_BLOCK)
            )
            assert back.is_whole, back

        def lane(first: int, sessions: int) -> None:
            for number in range(first, _RESUMES, _AT_ONCE):
                resume(number, sessions)

        def resumes_per_s(sessions: int) -> float:
            start_ns = time.monotonic_ns()
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for done in [pool.submit(lane, first, sessions) for first in range(_AT_ONCE)]:
                    done.result()
            return _RESUMES * 1e9 / (time.monotonic_ns() - start_ns)

        for number in range(_FEW):
            begin(number)
        resumes_per_s(_FEW)
        before = _resident_kib(node.pid)
        for number in range(_FEW, _MANY):
            begin(number)
        form.compare(
            "resumes of 1,000 sessions against 8",
            "1/s",
            lambda: resumes_per_s(_MANY),
            lambda: resumes_per_s(_FEW),
            goal=0.8,
        )
        grown = (_resident_kib(node.pid) - before) / (_MANY - _FEW)
        form.note("memory of a session", grown, "KiB", goal=64, lower_is_better=True)


def _resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
