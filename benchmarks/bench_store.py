"""The store compared with the drive: puts and gets with a plain io_uring loop over another file, the index with LMDB.

Both sides move the same bytes in records of the same size at the same depth, in alternation. The store's side includes
the CRC of every payload, headers, the index and the reports; it runs without a fabric, driven as by the node's loop.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import select
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from kvstore.bench.bare import BareDrive
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.limits import BATCH_BLOCKS_MAX, FINGERPRINT_BYTES, HEADER_BYTES, KEY_BYTES, TENANT_BYTES
from kvstore.node.hot_pages import HotPages
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.index import Entry, Index
from kvstore.storage.items import DeleteItem, GetItem, PutItem
from kvstore.storage.store import Store
from nic_offload.checksum import crc32c_at
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.form import Form
    from kvstore.storage.items import DeleteDone, GetDone, PutDone

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = ((32 * _KIB, None), (256 * _KIB, 0.85), (_MIB, 0.9), (4 * _MIB, 0.9))
_TOTAL = 128 * _MIB
_FEED, _AHEAD = 2, 32  # blocks given to the store at a time, and how many may be under way
_WIPED_BYTES = 512 << 20
_CAPACITY = 2 << 30  # the largest that is filled with zeros when it is made
_TENANT = b"t" * TENANT_BYTES
_FINGERPRINT = b"f" * FINGERPRINT_BYTES
_INDEX_BATCH = 64
_INDEX_ENTRIES = 100_000
_LATENCIES = 3000
_WAIT_S = 60.0


class _Blocks:
    """A store and a batch of slots, put and got repeatedly under new names."""

    def __init__(self, store: Store, length: int, *, keeps: int | None = None) -> None:
        """Of more than `keeps` puts of all the oldest is deleted first, untimed, so that nothing has to be evicted."""
        self._store, self._length, self._keeps = store, length, keeps
        self._slot_bytes = HEADER_BYTES + length
        self._count = min(_TOTAL // self._slot_bytes, BATCH_BLOCKS_MAX)
        self._memory = allocate(self._slot_bytes * self._count)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._names, self._last = itertools.count(), 0
        self._runs: deque[int] = deque()
        self._salt = secrets.token_bytes(KEY_BYTES - 16)
        self._ended = 0

    def _key(self, run: int, i: int) -> bytes:
        return self._salt + run.to_bytes(8) + i.to_bytes(8)

    def _slot(self, i: int) -> int:
        return self._address + i * self._slot_bytes

    def _poll_once(self) -> None:
        if not select.select([self._store], [], [], _WAIT_S)[0]:
            message = "the store stands still"
            raise TimeoutError(message)
        self._store.poll()

    def _wait(self) -> None:
        while self._ended < self._count:
            self._poll_once()

    def _kept(self, batch: Sequence[PutDone]) -> None:
        for done in batch:
            if done.error is not None:
                raise done.error
        self._ended += len(batch)

    def put_gbps(self) -> float:
        """Put all; the CRC of a block is computed while the drive writes earlier ones."""
        if self._keeps is not None and len(self._runs) >= self._keeps:
            self._forget(self._runs.popleft())
        run, self._ended = next(self._names), 0
        start_ns = time.monotonic_ns()
        for first in range(0, self._count, _FEED):
            while first - self._ended > _AHEAD:
                self._poll_once()
            some = range(first, min(first + _FEED, self._count))
            self._store.put([self._item(run, i) for i in some], self._kept)
        self._wait()
        self._last = run
        self._runs.append(run)
        return self._count * self._length / (time.monotonic_ns() - start_ns)

    def _forget(self, run: int) -> None:
        self._ended = 0
        items = [DeleteItem(_TENANT, self._key(run, i), Durability.WRITTEN, i) for i in range(self._count)]
        self._store.delete(items, self._deleted)
        self._wait()

    def _deleted(self, batch: Sequence[DeleteDone]) -> None:
        self._ended += len(batch)

    def latencies_us(self, count: int, per_s: float) -> list[float]:
        """Get blocks one by one, starting at this rate whether or not earlier gets have ended; return each time."""
        begun_ns: dict[int, int] = {}
        spent_us: list[float] = []

        def read(batch: Sequence[GetDone]) -> None:
            now_ns = time.monotonic_ns()
            self._read(batch)
            spent_us.extend((now_ns - begun_ns.pop(done.tag)) / 1000 for done in batch)

        start_ns = time.monotonic_ns()
        for number in range(count):
            due_ns = start_ns + int(number * 1e9 / per_s)
            while (left_ns := due_ns - time.monotonic_ns()) > 0 or number % self._count in begun_ns:
                if select.select([self._store], [], [], max(0, left_ns) / 1e9)[0]:
                    self._store.poll()
            i = number % self._count
            begun_ns[i] = max(due_ns, start_ns)
            self._store.get([self._get_item(i)], read)
        while begun_ns:
            self._poll_once()
        return spent_us

    def _get_item(self, i: int) -> GetItem:
        name = (_TENANT, self._key(self._last, i), _FINGERPRINT, self._length)
        return GetItem(*name, self._slot(i), self._slot_bytes, i)

    def _item(self, run: int, i: int) -> PutItem:
        crc32c = crc32c_at(self._slot(i) + HEADER_BYTES, self._length)
        name = (_TENANT, self._key(run, i), _FINGERPRINT, self._length)
        return PutItem(*name, crc32c, self._slot(i), 0, Durability.WRITTEN, i)

    def _read(self, batch: Sequence[GetDone]) -> None:
        for done in batch:
            assert done.miss is None, done
            assert crc32c_at(self._slot(done.tag) + HEADER_BYTES, done.length) == done.crc32c
        self._ended += len(batch)

    def get_gbps(self) -> float:
        self._ended = 0
        start_ns = time.monotonic_ns()
        self._store.get([self._get_item(i) for i in range(self._count)], self._read)
        self._wait()
        return self._count * self._length / (time.monotonic_ns() - start_ns)


def run(form: Form) -> None:
    """Measure all points."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        home = Path(folder).resolve()
        for length, goal in _SIZES:
            _against_the_drive(form, home / str(length), length, goal)
        for length in (256 * _KIB, _MIB):
            _evicting(form, home / f"evicting-{length}", length)
        _half_load(form, home / "half")
        _index(form, home)
    _hot(form)


def _label(length: int) -> str:
    return f"{length // _MIB} MiB" if length >= _MIB else f"{length // _KIB} KiB"


def _against_the_drive(form: Form, home: Path, length: int, goal: float | None) -> None:
    home.mkdir()
    record = length + HEADER_BYTES
    with (
        Store.open(home / "store", capacity_bytes=_CAPACITY, clock=SystemClock()) as store,
        BareDrive(home, 128 << 20) as drive,
    ):
        blocks = _Blocks(store, length)
        form.compare(
            f"put, {_label(length)}",
            "GB/s",
            blocks.put_gbps,
            lambda: drive.gbps(DiskOpKind.WRITE, record),
            goal=goal,
        )
        form.compare(
            f"get, {_label(length)}",
            "GB/s",
            blocks.get_gbps,
            lambda: drive.gbps(DiskOpKind.READ, record),
            goal=goal,
        )


def _evicting(form: Form, home: Path, length: int) -> None:
    """Puts that evict other blocks, compared with puts for which room was made before, and with the drive.

    Both stores fill their drives. For each block that is evicted a page is wiped: the drive alone does that as well.
    """
    home.mkdir()
    with (
        Store.open(home / "full", capacity_bytes=_CAPACITY, clock=SystemClock()) as full,
        Store.open(home / "roomy", capacity_bytes=_CAPACITY, clock=SystemClock()) as roomy,
        BareDrive(home, _WIPED_BYTES) as drive,
    ):
        runs = _CAPACITY // _TOTAL
        pushing, lonely = _Blocks(full, length), _Blocks(roomy, length, keeps=runs - 2)
        for _ in range(1 + runs):
            pushing.put_gbps()
            lonely.put_gbps()
        form.compare(
            f"put, {_label(length)}, evicting, against room enough",
            "GB/s",
            pushing.put_gbps,
            lonely.put_gbps,
            pairs=9,
        )
        form.compare(
            f"put, {_label(length)}, evicting, against the drive with wipes",
            "GB/s",
            pushing.put_gbps,
            lambda: drive.gbps(DiskOpKind.WRITE, length + HEADER_BYTES, wipes=True),
            goal=0.85,
            pairs=9,
        )


def _half_load(form: Form, home: Path) -> None:
    """The latency of a get of 1 MiB if gets arrive at half the rate that the store can sustain."""
    with Store.open(home, capacity_bytes=_CAPACITY, clock=SystemClock()) as store:
        blocks = _Blocks(store, _MIB)
        blocks.put_gbps()
        per_s = statistics.median(blocks.get_gbps() for _ in range(5)) * 1e9 / _MIB
        spent_us = sorted(blocks.latencies_us(_LATENCIES, per_s / 2))
        middle, late = spent_us[len(spent_us) // 2], spent_us[len(spent_us) * 99 // 100]
    form.note("get, 1 MiB, at half load, p50", middle, "us")
    form.note("get, 1 MiB, at half load, p99 against p50", late / middle, "x", goal=3.0, lower_is_better=True)


class _Names:
    """New names in batches of 64, as the node makes them, and the rate at which they are added or looked up."""

    def __init__(self, take: Callable[[list[bytes]], object], find: Callable[[list[bytes]], object]) -> None:
        self._take, self._find = take, find
        self._batches: list[list[bytes]] = []

    def inserts(self) -> float:
        names = [secrets.token_bytes(KEY_BYTES) for _ in range(_INDEX_ENTRIES)]
        self._batches = [names[i : i + _INDEX_BATCH] for i in range(0, len(names), _INDEX_BATCH)]
        return self._rate(self._take)

    def look_ups(self) -> float:
        return self._rate(self._find)

    def _rate(self, what: Callable[[list[bytes]], object]) -> float:
        start = time.perf_counter()
        for batch in self._batches:
            what(batch)
        return _INDEX_ENTRIES / (time.perf_counter() - start)


def _index(form: Form, home: Path) -> None:
    """Compare with LMDB with the same keys and values and nothing else."""
    (home / "bare").mkdir()
    index = Index.empty(home / "index", 1 << 30)
    bare = lmdb.open(
        str(home / "bare"), map_size=1 << 30, sync=False, lock=False, readahead=False, meminit=False
    )
    entry, value = Entry(0, _MIB, 0, 1, 0, _FINGERPRINT), bytes(48)
    generations = itertools.count(1)

    def put_bare(keys: list[bytes]) -> None:
        with bare.begin(write=True) as transaction:
            for key in keys:
                transaction.put(_TENANT + key, value)

    def get_bare(keys: list[bytes]) -> list[bytes | None]:
        with bare.begin() as transaction:
            return [transaction.get(_TENANT + key) for key in keys]

    ours = _Names(
        lambda keys: index.publish(
            [((_TENANT, key), entry._replace(generation=next(generations))) for key in keys]
        ),
        lambda keys: index.lookup([(_TENANT, key) for key in keys]),
    )
    theirs = _Names(put_bare, get_bare)
    inserted = form.compare("index: inserts, 64 a batch", "1/s", ours.inserts, theirs.inserts)
    found = form.compare("index: look-ups, 64 a batch", "1/s", ours.look_ups, theirs.look_ups)
    form.note("index: inserts", inserted.value, "1/s", goal=250_000)
    form.note("index: look-ups", found.value, "1/s", goal=400_000)
    index.abandon()
    bare.close()


def _hot(form: Form) -> None:
    """The cost of finding a block in memory, from where its bytes are sent."""
    pages, wanted = HotPages(1 << 16, lambda: None), 10_000
    for generation in range(1, wanted + 1):
        piece = pages.take(2)
        assert piece is not None
        pages.keep(piece, generation)
        pages.release(piece)
    spent_us = []
    for _ in range(9):
        start = time.perf_counter()
        for generation in range(1, wanted + 1):
            piece = pages.find(generation)
            assert piece is not None
            pages.release(piece)
        spent_us.append((time.perf_counter() - start) / wanted * 1e6)
    form.note("hot: finding a block", statistics.median(spent_us), "us", goal=5.0, lower_is_better=True)
