"""The cost per block when there are many: a store of one million blocks compared with one of ten, on sparse drives.

The blocks are written to the index only, as a clean close would have left them. For the opening without an index, which
scans the drive, a smaller store also has its headers on the drive. There are no payloads, because nothing here reads
them. Each opening is measured once, because opening ten million blocks takes a minute.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import secrets
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.limits import FINGERPRINT_BYTES, HEADER_BYTES, KEY_BYTES, PAGE_BYTES, TENANT_BYTES
from kvstore.storage.folder import index_path
from kvstore.storage.index import Entry
from kvstore.storage.store import Store
from kvstore.storage.uring import UringDisk
from kvstore.wire.record import Header, Kind, record_bytes, records_begin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.form import Form
    from kvstore.storage.drive import Drive

_MILLION = 1_000_000
_TENANT = b"t" * TENANT_BYTES
_FINGERPRINT = b"f" * FINGERPRINT_BYTES
_LENGTH = 4 << 10  # the smallest that an engine would put: the most blocks on a drive
_SCANNED, _SCANNED_LENGTH = 100_000, 64 << 10
_PUBLISHED_AT_ONCE = 4096
_BATCH, _BATCHES, _ROUNDS = 64, 1000, 5
_PREFIX = 1000


def _key(number: int) -> bytes:
    """Keys as random as digests, which can be computed again from their numbers."""
    return random.Random(number).randbytes(KEY_BYTES)


def _made(data: Path, blocks: int, length: int) -> None:
    """A closed store with this many blocks."""
    data.mkdir()
    with (data / "drive-0.kv").open("wb") as drive_file:
        drive_file.truncate(_capacity_bytes(blocks, length))
    with Store.open(data, capacity_bytes=None, clock=SystemClock()) as store:
        (drive,) = store.drives
        for batch in _batches(drive, blocks, length):
            drive._index.publish(batch)


def _capacity_bytes(blocks: int, length: int) -> int:
    wanted = blocks * record_bytes(length) * 5 // 4
    return (wanted + records_begin(wanted)) // PAGE_BYTES * PAGE_BYTES


def _batches(drive: Drive, blocks: int, length: int) -> Iterator[list[tuple[tuple[bytes, bytes], Entry]]]:
    offset = records_begin(drive.capacity_bytes)
    for first in range(0, blocks, _PUBLISHED_AT_ONCE):
        batch = []
        for number in range(first, min(first + _PUBLISHED_AT_ONCE, blocks)):
            entry = Entry(offset, length, 0, drive._volume.take_generation(), 0, _FINGERPRINT)
            batch.append(((_TENANT, _key(number)), entry))
            offset += record_bytes(length)
        yield batch


def _write_headers(data: Path) -> None:
    """Write the header of every block of the index to the drive."""
    with Store.open(data, capacity_bytes=None, clock=SystemClock()) as store:
        (drive,) = store.drives
        fd = os.open(data / "drive-0.kv", os.O_WRONLY)
        page = bytearray(HEADER_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for (tenant, key), entry in drive._index.entries():
            header = Header(
                Kind.BLOCK, key, tenant, _FINGERPRINT, entry.generation, entry.length, entry.crc32c, 0
            )
            drive._volume.codec.pack([(address, HEADER_BYTES, entry.offset, header)])
            os.pwrite(fd, page, entry.offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def run(form: Form) -> None:
    """Measure all points."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        home = Path(folder).resolve()
        _scanned(form, home / "scanned")
        costs = {}
        for millions in (1, 10):
            data = home / str(millions)
            _made(data, millions * _MILLION, _LENGTH)
            costs[millions] = _opened(form, data, millions)
            shutil.rmtree(data)
        for what, one in costs[1].items():
            ratio = costs[10][what] / one
            form.note(
                f"{what}: a block of 10 M against one of 1 M", ratio, "x", goal=1.2, lower_is_better=True
            )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _opened(form: Form, data: Path, millions: int) -> dict[str, float]:
    """Open the store with its index, look blocks up and put some; return the cost of each per block."""
    blocks = millions * _MILLION
    before_bytes = _resident_bytes()
    start = time.perf_counter()
    store = Store.open(data, capacity_bytes=None, clock=SystemClock())
    opening_s = time.perf_counter() - start
    with store:
        (drive,) = store.drives
        resident_bytes = _resident_bytes() - before_bytes
        form.note(f"{millions} M: opening", opening_s, "s", goal=5.0 * millions, lower_is_better=True)
        form.note(
            f"{millions} M: memory a block", resident_bytes / blocks, "B", goal=200.0, lower_is_better=True
        )
        known = [[(_TENANT, _key(random.randrange(blocks))) for _ in range(_BATCH)] for _ in range(_BATCHES)]
        look_up_us = _median_us(lambda: [store.lookup(batch) for batch in known], _BATCH * _BATCHES)
        form.note(f"{millions} M: look-ups, 64 a batch", 1e6 / look_up_us, "1/s", goal=400_000)
        chain = [_key(number) for number in range(_PREFIX)]
        prefix_us = _median_us(lambda: store.prefix(_TENANT, chain), 1)
        form.note(
            f"{millions} M: prefix of 1,000 keys", prefix_us / 1000, "ms", goal=1.0, lower_is_better=True
        )
        insert_us = _median_us(lambda: _insert(drive), _BATCH * _BATCHES)
        form.note(f"{millions} M: inserts, 64 a batch", 1e6 / insert_us, "1/s", goal=250_000)
    return {
        "opening": opening_s / blocks,
        "memory": resident_bytes / blocks,
        "look-up": look_up_us,
        "insert": insert_us,
    }


def _insert(drive: Drive) -> None:
    take = drive._volume.take_generation
    for _ in range(_BATCHES):
        keys = [secrets.token_bytes(KEY_BYTES) for _ in range(_BATCH)]
        drive._index.publish(
            [((_TENANT, key), Entry(0, _LENGTH, 0, take(), 0, _FINGERPRINT)) for key in keys]
        )


def _median_us(work: Callable[[], object], units: int) -> float:
    spent = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        spent.append((time.perf_counter() - start) * 1e6 / units)
    return statistics.median(spent)


def _scanned(form: Form, data: Path) -> None:
    """Open the store without its index, compared with plain reads of the same headers."""
    _made(data, _SCANNED, _SCANNED_LENGTH)
    _write_headers(data)

    def scan() -> float:
        shutil.rmtree(index_path(data, 0))
        start = time.perf_counter()
        store = Store.open(data, capacity_bytes=None, clock=SystemClock())
        spent_s = time.perf_counter() - start
        with store:
            assert store.statistics().blocks == _SCANNED
        return _SCANNED / spent_s

    form.compare(
        "opening without the index", "blocks/s", scan, lambda: _SCANNED / _header_reads_s(data), goal=0.8
    )


def _header_reads_s(data: Path) -> float:
    disk = UringDisk(data / "drive-0.kv")
    start = time.perf_counter()
    offset = records_begin(disk.capacity_bytes)
    for _ in range(_SCANNED):
        disk.read_at(offset, PAGE_BYTES)
        offset += record_bytes(_SCANNED_LENGTH)
    spent_s = time.perf_counter() - start
    disk.close()
    return spent_s
