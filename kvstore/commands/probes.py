"""The doctor's probes of the machine; `kvstore.commands.doctor` judges their results.

What always holds: a probe leaves nothing behind. It writes only to its own files, at most 256 MiB, and removes them;
the large one is unlinked before its first byte is written. Every probe is bounded in time.

What it doesn't do: decide what is good.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES, PROBE_TIMEOUT_S, VAULT_KEYS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MEASURE_BYTES",
    "can_lock_keys",
    "exercise_ring",
    "gpu_names",
    "may_lock",
    "measure_drive",
    "try_io_uring",
]

MEASURE_BYTES = 256 << 20

_TEMPORARY = ".triggerkv-doctor-"
_CHUNK_BYTES = 4 << 20
_IO_URING_SETUP = 425  # the same number on every architecture
_CAP_IPC_LOCK = 14


def try_io_uring() -> int:
    """Set a ring of one entry up and close it; 0 or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params, all zero
    descriptor = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), parameters)
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def can_lock_keys() -> bool:
    """Lock as much memory as a node does for its keys, and release it."""
    from nic_offload.secret_keys import are_locked, new_key, wipe  # noqa: PLC0415 - as in `exercise_ring`
    from nic_offload.vault import Vault  # noqa: PLC0415

    with Vault(VAULT_KEYS_MAX) as vault:
        wipe(new_key())
        return vault.is_locked and are_locked()


def exercise_ring(folder: Path) -> None:
    """Write one page through the store's own ring, and read it back."""
    from kvstore.storage.disk import DiskOp, DiskOpKind  # noqa: PLC0415 - a core that is not built is a finding
    from kvstore.storage.uring import UringDisk  # noqa: PLC0415

    with (
        tempfile.NamedTemporaryFile(prefix=_TEMPORARY, dir=folder) as file,
        mmap.mmap(-1, PAGE_BYTES) as page,
    ):
        file.truncate(PAGE_BYTES)
        page[:] = content = os.urandom(PAGE_BYTES)
        disk = UringDisk(Path(file.name), queue_depth=1)
        try:
            with memoryview(page) as view:
                address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            disk.submit([DiskOp(DiskOpKind.WRITE, address, PAGE_BYTES, offset=0, tag=1)])
            ready, _, _ = select.select([disk.fileno()], [], [], PROBE_TIMEOUT_S)
            done = disk.reap() if ready else []
            if [entry.result for entry in done] != [PAGE_BYTES] or disk.read_at(0, PAGE_BYTES) != content:
                raise StorageError("A page written through the ring was read back with other bytes.")
        finally:
            disk.close()


def _pace(size_bytes: int, step: Callable[[int], int]) -> tuple[int, float]:
    """Run steps until all are done or time is up; returns bytes done and seconds taken."""
    start, done = time.perf_counter(), 0
    while done < size_bytes and time.perf_counter() - start < PROBE_TIMEOUT_S:
        moved = step(done)
        if moved <= 0:
            break
        done += moved
    return done, time.perf_counter() - start


def measure_drive(folder: Path, size_bytes: int = MEASURE_BYTES) -> tuple[float, float]:
    """Sequential GB/s of O_DIRECT writes (with fsync) and reads, in a private file."""
    made, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
    os.close(made)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    finally:
        Path(name).unlink()
    try:
        with mmap.mmap(-1, _CHUNK_BYTES) as chunk:
            chunk.write(os.urandom(_CHUNK_BYTES))  # a drive may compress zeros away
            start = time.perf_counter()
            written, _ = _pace(size_bytes, lambda at: os.pwrite(descriptor, chunk, at))
            os.fsync(descriptor)
            write_s = time.perf_counter() - start
            read, read_s = _pace(written, lambda at: os.preadv(descriptor, [chunk], at))
    finally:
        os.close(descriptor)
    return written / write_s / 1e9, read / read_s / 1e9


def may_lock(proc: Path) -> bool:
    """Whether this process has CAP_IPC_LOCK, with which RLIMIT_MEMLOCK does not bind."""
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def gpu_names() -> list[str]:
    """The CUDA devices by name; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        if not (cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetName(name, 256, device)):
            names.append(name.value.decode(errors="replace"))
    return names
