"""`kvstore doctor`: what this machine offers the store, what that means, and what to do about it.

What always holds: every check ends in a `Result`, even if what it checks is missing or broken; no check can stop
another. The machine is left as it was. The exit status is 3 if a check fails.

What it doesn't do: change settings, install anything, create the data folder, or test another machine.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from kvcli import running
from kvcli.progress import bars
from kvstore.commands.probes import (
    MEASURE_BYTES,
    can_lock_keys,
    exercise_ring,
    gpu_names,
    may_lock,
    measure_drive,
    try_io_uring,
)
from kvstore.errors import FabricError, FabricUnavailable, KvError, StorageError
from kvstore.limits import LANDING_BYTES_MAX
from nic_offload.memory import shares_huge_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvcli.progress import Progress

__all__ = [
    "Library",
    "Provider",
    "Result",
    "check_drive",
    "check_encryption",
    "check_fabric",
    "check_gpu",
    "check_io_uring",
    "check_keyring",
    "check_memory",
    "examine",
    "main",
    "run",
    "show",
    "table",
]

Status = Literal["ok", "warn", "fail"]

_PROC = Path("/proc")
_SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_DRIVE_SLOW_GBPS = 0.5
_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Result:
    """One check: the finding, what it means here, and what to do (empty: nothing)."""

    check: str
    status: Status
    found: str
    means: str
    do: str = ""


class Provider(Protocol):
    """What the doctor needs from a provider; `nic_offload.library.ProviderInfo` has it."""

    @property
    def name(self) -> str: ...  # noqa: D102 - documented there
    @property
    def rma(self) -> bool: ...  # noqa: D102 - documented there
    @property
    def ordered(self) -> bool: ...  # noqa: D102 - documented there
    @property
    def deferred_work(self) -> bool: ...  # noqa: D102 - documented there


class Library(Protocol):
    """What the doctor needs from libfabric; `nic_offload.library.Library` has it."""

    @property
    def version(self) -> str: ...  # noqa: D102 - documented there
    def providers(self) -> Sequence[Provider]: ...  # noqa: D102 - documented there
    def best_provider(self) -> str: ...  # noqa: D102 - documented there


def _load_library() -> Library:
    from nic_offload import library  # noqa: PLC0415 - a core that is not built is a finding, not a crash

    return library.load()


def check_fabric(load: Callable[[], Library] = _load_library) -> Iterator[Result]:
    """Check libfabric, and what each of its providers can carry."""
    without = "Clients can still send blocks over gRPC, without triggers."
    try:
        library = load()
        providers = library.providers()
    except ImportError as error:
        yield Result("C core", "fail", str(error), "Nothing works without the C core.", "Run `make setup`.")
        return
    except FabricUnavailable as error:
        yield Result("libfabric", "warn", str(error), without, "apt-get install libfabric1")
        return
    except FabricError as error:
        yield Result("libfabric", "fail", str(error), without, "Run `fi_info` on this machine.")
        return
    yield Result("libfabric", "ok", f"version {library.version}", "Blocks can be sent by remote writes.")
    try:
        best = library.best_provider()
    except FabricUnavailable as error:
        yield Result("providers", "warn", str(error), without, "apt-get install libfabric1")
        return
    for provider in providers:
        name = f"provider {provider.name}"
        if provider.rma:
            chosen = " The data plane uses this provider." if provider.name == best else ""
            yield Result(name, "ok", _abilities(provider), _trigger_words(provider) + chosen)


def _abilities(provider: Provider) -> str:
    words = ["remote writes"]
    words += ["ordered"] if provider.ordered else []
    words += ["triggered operations"] if provider.deferred_work else []
    return ", ".join(words)


def _trigger_words(provider: Provider) -> str:
    if provider.name == "cxi":
        return "The NIC fires by itself (this project has not tested real hardware)."
    if provider.deferred_work:
        return "The library fires in software, over TCP; good for tests of triggered operations."
    return "Our agent, a C thread, fires."


def check_io_uring(
    data: Path,
    attempt: Callable[[], int] = try_io_uring,
    exercise: Callable[[Path], None] = exercise_ring,
    proc: Path = _PROC,
) -> Iterator[Result]:
    """Whether this process may use io_uring, and whether the store's own ring works with this drive."""
    switch = proc / "sys/kernel/io_uring_disabled"
    setting = switch.read_text().strip() if switch.exists() else "0"
    means = "A storage node cannot write to its drive here."
    if error := attempt():
        found = f"refused: {os.strerror(error)}; kernel.io_uring_disabled is {setting}"
        do = (
            "Raise ulimit -l (LimitMEMLOCK= in the unit): io_uring locks its rings in memory."
            if error == errno.ENOMEM
            else "sysctl kernel.io_uring_disabled=0"
            if setting != "0"
            else "In a container, allow io_uring in seccomp."
        )
        yield Result("io_uring", "fail", found, means, do)
        return
    try:
        exercise(_existing(data))
    except ImportError as broken:
        yield Result("io_uring", "fail", str(broken), means, "Run `make setup`.")
    except (StorageError, OSError) as broken:
        do = "See the lines for the data folder below."
        yield Result("io_uring", "fail", f"the kernel allows it, but: {broken}", means, do)
    else:
        found = "a page was written and read back through the store's ring"
        yield Result("io_uring", "ok", found, "Writes to the drive don't block.")


def _existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def check_drive(
    data: Path, measure: Callable[[Path], tuple[float, float]] = measure_drive
) -> Iterator[Result]:
    """Check O_DIRECT and speed on the file system of the data folder."""
    folder = _existing(data)
    where = f"{folder}" if folder == data.absolute() else f"{folder} ({data} does not exist yet)"
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 2 * MEASURE_BYTES:
        found = f"{free_bytes / 1e9:.1f} GB free on {where}"
        yield Result("data folder", "fail", found, "There is no room for blocks.", "Name another --data.")
        return
    try:
        write_gbps, read_gbps = measure(folder)
    except PermissionError:
        yield Result(
            "data folder", "fail", f"{where} cannot be written", "The node could not start.", "chown it."
        )
        return
    except OSError as error:
        means = "The node needs O_DIRECT, which this file system refuses."
        yield Result(
            "O_DIRECT", "fail", f"{where}: {error.strerror}", means, "Use ext4, xfs or a block device."
        )
        return
    yield Result(
        "data folder", "ok", f"{where}, {free_bytes / 1e9:,.0f} GB free", "There is room for blocks."
    )
    yield Result("O_DIRECT", "ok", f"works on {folder}", "Writes to the drive bypass the page cache.")
    slow = min(write_gbps, read_gbps) < _DRIVE_SLOW_GBPS
    yield Result(
        "drive speed",
        "warn" if slow else "ok",
        f"write {write_gbps:.2f} GB/s, read {read_gbps:.2f} GB/s",
        "One sequential stream at depth 1; a node with many requests in flight gets more.",
        "Compare this with the drive's data sheet; network and virtual disks are often this slow."
        if slow
        else "",
    )


def check_memory(
    proc: Path = _PROC,
    memlock_bytes: int | None = None,
    *,
    privileged: bool | None = None,
    shared_pages: Path = _SHARED_PAGES,
    is_huge: Callable[[], bool] = shares_huge_pages,
) -> Iterator[Result]:
    """Check RAM, how much of it may be pinned for the fabric, and huge pages."""
    facts = {line.split(":")[0]: int(line.split()[1]) for line in (proc / "meminfo").read_text().splitlines()}
    total_bytes, free_bytes = facts["MemTotal"] * 1024, facts["MemAvailable"] * 1024
    enough = free_bytes >= LANDING_BYTES_MAX
    yield Result(
        "memory",
        "ok" if enough else "warn",
        f"{total_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB available",
        f"A node lands blocks in at most {LANDING_BYTES_MAX >> 30} GiB.",
        "" if enough else "Run a node with fewer clients or smaller blocks.",
    )
    if memlock_bytes is None:
        memlock_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if privileged is None:
        privileged = may_lock(proc)
    unlimited = memlock_bytes == resource.RLIM_INFINITY
    free_of_it = unlimited or memlock_bytes >= LANDING_BYTES_MAX or privileged
    limit = "unlimited" if unlimited else f"{memlock_bytes / 2**20:,.1f} MiB"
    yield Result(
        "RLIMIT_MEMLOCK",
        "ok" if free_of_it else "warn",
        limit + (" (this process has CAP_IPC_LOCK and is exempt)" if privileged and not unlimited else ""),
        "RDMA NICs pin registered memory and count it against this limit; software providers pin nothing.",
        "" if free_of_it else "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit.",
    )
    chosen = shared_pages.read_text().partition("[")[2].partition("]")[0] if shared_pages.exists() else ""
    has_huge = chosen not in {"", "never", "deny"} or is_huge()
    faster = f"echo advise > {shared_pages}, or Linux 6.1 or later: virtual drives are up to twice as fast."
    yield Result(
        "huge pages",
        "ok",
        f"{'also' if has_huge else 'not'} for shared memory",
        "The hot memory is shared with clients on this machine. Nothing has to be set aside.",
        faster if chosen and not has_huge else "",
    )


def check_encryption(proc: Path = _PROC, locks_keys: Callable[[], bool] = can_lock_keys) -> Iterator[Result]:
    """Check whether a node can encrypt stored data, and whether memory may be swapped to a drive in the clear."""
    from nic_offload import aead  # noqa: PLC0415 - as in check_fabric

    swaps = proc / "swaps"
    places = [line.split()[0] for line in swaps.read_text().splitlines()[1:]] if swaps.exists() else []
    why_not = aead.available()
    yield Result(
        "encryption",
        "warn" if why_not or places else "ok",
        why_not
        or f"AES-256-GCM of {aead.library()}; {'memory is swapped to ' + ', '.join(places) if places else 'no swap'}",
        "With --master-key a node encrypts stored data. Swapped memory is written to a drive in the clear.",
        "swapoff -a, or encrypt the swap." if places else _faster_encryption(proc),
    )
    locks = locks_keys()
    yield Result(
        "keys in memory",
        "ok" if locks else "warn",
        "can be locked" if locks else "can't all be locked (RLIMIT_MEMLOCK), so they may be swapped",
        "A node with --master-key locks its keys in memory, out of swap.",
        "" if locks else "ulimit -l 8192 or more, or LimitMEMLOCK= in the unit.",
    )


def _faster_encryption(proc: Path) -> str:
    from nic_offload import aead  # noqa: PLC0415 - as in check_fabric

    has_vaes = " vaes " in (proc / "cpuinfo").read_text() if (proc / "cpuinfo").exists() else False
    if not has_vaes or aead.available() or "IPSec" in aead.library():
        return ""
    return "apt install libipsec-mb1: encryption takes less than half of OpenSSL 3.0's time on this CPU."


def check_keyring(data: Path) -> Iterator[Result]:
    """The keyring of a data folder whose records are encrypted: whether a node would start with it."""
    from kvstore.commands.keyring_check import keyring_flaw  # noqa: PLC0415 - as in check_fabric

    try:
        flaw = keyring_flaw(data)
    except KvError as error:
        flaw = str(error)
    if flaw is not None:
        yield Result(
            "keyring", "fail", flaw, "No node starts with this data folder.", "Restore the newest keyring."
        )


def check_gpu(names: Callable[[], list[str]] = gpu_names) -> Iterator[Result]:
    """Check for a GPU; none is fine."""
    if found := names():
        yield Result("GPU", "ok", ", ".join(found), "Its kernels can store to the flags.")
    else:
        yield Result("GPU", "ok", "none", "Any process can store to the flags instead.")


def examine(data: Path, progress: Progress = lambda _what, _done, _total: None) -> list[Result]:
    """Run every check by itself: one that breaks becomes a `fail` and the next one runs."""
    checks: tuple[tuple[str, Callable[[], Iterable[Result]]], ...] = (
        ("libfabric", check_fabric),
        ("io_uring", lambda: check_io_uring(data)),
        ("data folder", lambda: check_drive(data)),
        ("memory", check_memory),
        ("encryption", check_encryption),
        ("keyring", lambda: check_keyring(data)),
        ("GPU", check_gpu),
    )
    results: list[Result] = []
    for number, (name, check) in enumerate(checks):
        progress("examining this machine", number, len(checks))
        try:
            results.extend(check())
        except (OSError, KeyError, ValueError, IndexError) as error:
            found = f"{type(error).__name__}: {error}"
            results.append(Result(name, "fail", found, "The check failed.", "Report it with this line."))
    return results


def table(results: Sequence[Result], *, colour: bool) -> str:
    """The results for people: status, check, finding; below, what it means and what to do."""
    width = max(len(result.check) for result in results)
    margin = " " * (6 + width + 2)
    lines = []
    for result in results:
        status = result.status.ljust(4)
        if colour:
            status = f"\x1b[{_COLOURS[result.status]}m{status}\x1b[0m"
        head, *rest = textwrap.wrap(result.found, _WIDTH - len(margin)) or [""]
        lines.append(f"{status}  {result.check.ljust(width)}  {head}".rstrip())
        for text in (*rest, result.means, f"-> {result.do}" if result.do else ""):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin)
    counts = ", ".join(f"{sum(r.status == word for r in results)} {word}" for word in _COLOURS)
    return "\n".join([*lines, "", counts])


def run(data: Path, *, as_json: bool) -> int:
    """Examine this machine and print the results; returns the exit status."""
    with bars() as progress:
        results = examine(data, progress)
    return show(results, as_json=as_json)


def show(results: Sequence[Result], *, as_json: bool) -> int:
    """Print results; returns the exit status."""
    if as_json:
        text = json.dumps([asdict(result) for result in results], indent=2)
    else:
        text = table(results, colour=sys.stdout.isatty())
    sys.stdout.write(text + "\n")
    return running.Status.NO if any(result.status == "fail" for result in results) else running.Status.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run as `python -m kvstore.commands.doctor`."""
    parser = argparse.ArgumentParser(
        prog="kvstore doctor", description="Check what this machine offers the store."
    )
    parser.add_argument("--data", type=Path, default=Path(), help="the node's data folder (default: here)")
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args(argv)
    return run(arguments.data, as_json=arguments.as_json)


if __name__ == "__main__":
    sys.exit(main())
