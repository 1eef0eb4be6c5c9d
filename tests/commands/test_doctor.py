"""The doctor on simulated machines, and once on this one."""

from __future__ import annotations

import errno
import json
import resource
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvstore.commands import doctor, probes
from kvstore.commands.doctor import Result
from kvstore.errors import FabricError, FabricUnavailable, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class FakeProvider:
    name: str
    rma: bool = True
    ordered: bool = False
    deferred_work: bool = False


@dataclass(frozen=True)
class FakeLibrary:
    version: str = "1.17"
    offered: list[FakeProvider] = field(default_factory=list)

    def providers(self) -> list[FakeProvider]:
        return self.offered

    def best_provider(self) -> str:
        for provider in self.offered:
            if provider.rma:
                return provider.name
        raise FabricUnavailable("libfabric 1.17 offers nothing.")


def _raising(error: Exception) -> Callable[[], FakeLibrary]:
    def load() -> FakeLibrary:
        raise error

    return load


@pytest.mark.parametrize(
    ("text", "is_huge", "found", "advice"),
    [
        ("always within_size advise [never] deny force\n", False, "not", "echo advise"),
        ("always within_size advise [never] deny force\n", True, "also", ""),
        ("always within_size [advise] never deny force\n", False, "also", ""),
        (None, False, "not", ""),
    ],
)
def test_shared_memory_in_small_pages_is_reported_with_what_to_do(
    tmp_path: Path, text: str | None, *, is_huge: bool, found: str, advice: str
) -> None:
    pages = tmp_path / "shmem_enabled"
    if text is not None:
        pages.write_text(text)
    *_, huge = doctor.check_memory(
        _proc(tmp_path, 30 << 20), 8 << 20, shared_pages=pages, is_huge=lambda: is_huge
    )
    assert (huge.check, huge.status, huge.found) == ("huge pages", "ok", f"{found} for shared memory")
    assert huge.do.startswith(advice)
    assert bool(huge.do) is bool(advice)


def test_swappable_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nic_offload.aead.library", lambda: "a library")
    bare, locked = doctor.check_encryption(tmp_path, lambda: True)
    assert (locked.status, locked.found, locked.do) == ("ok", "can be locked", "")
    assert (bare.status, bare.found, bare.do) == ("ok", "AES-256-GCM of a library; no swap", "")
    (tmp_path / "cpuinfo").write_text("flags\t: avx2 vaes vpclmulqdq\n")
    slow, unlocked = doctor.check_encryption(tmp_path, lambda: False)
    assert unlocked.status == "warn"
    assert "may be swapped" in unlocked.found
    assert "ulimit -l" in unlocked.do
    assert slow.status == "ok"
    assert "apt install libipsec-mb1" in slow.do
    (tmp_path / "swaps").write_text("Filename Type Size Used Priority\n/dev/vda2 partition 1 0 -2\n")
    swapped, _ = doctor.check_encryption(tmp_path, lambda: True)
    assert (swapped.status, swapped.found) == (
        "warn",
        "AES-256-GCM of a library; memory is swapped to /dev/vda2",
    )
    assert "swapoff" in swapped.do


def test_each_usable_provider_reports_what_fires_its_puts() -> None:
    offered = [
        FakeProvider("net", ordered=True),
        FakeProvider("sockets", deferred_work=True),
        FakeProvider("cxi", deferred_work=True),
        FakeProvider("udp", rma=False),
    ]
    library, *providers = doctor.check_fabric(lambda: FakeLibrary(offered=offered))
    assert library == Result("libfabric", "ok", "version 1.17", "Blocks can be sent by remote writes.")
    assert [result.check for result in providers] == ["provider net", "provider sockets", "provider cxi"]
    assert "agent" in providers[0].means
    assert "uses this provider" in providers[0].means
    assert "in software" in providers[1].means
    assert "has not tested real hardware" in providers[2].means
    assert providers[0].found == "remote writes, ordered"
    assert providers[1].found == "remote writes, triggered operations"


@pytest.mark.parametrize(
    ("error", "check", "status"),
    [
        (FabricUnavailable("no library"), "libfabric", "warn"),
        (FabricError("it broke"), "libfabric", "fail"),
        (ImportError("no _core"), "C core", "fail"),
    ],
)
def test_a_missing_fabric_says_what_to_do(error: Exception, check: str, status: str) -> None:
    (result,) = doctor.check_fabric(_raising(error))
    assert (result.check, result.status, result.found) == (check, status, str(error))
    assert result.do


def test_a_libfabric_without_a_usable_provider_warns() -> None:
    _, result = doctor.check_fabric(lambda: FakeLibrary(offered=[FakeProvider("udp", rma=False)]))
    assert (result.check, result.status) == ("providers", "warn")


@pytest.mark.parametrize(("setting", "do"), [("2", "sysctl"), ("0", "seccomp"), (None, "seccomp")])
def test_refused_io_uring_names_the_switch_that_refuses_it(
    setting: str | None, do: str, tmp_path: Path
) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    if setting:
        (tmp_path / "sys/kernel/io_uring_disabled").write_text(setting + "\n")
    (result,) = doctor.check_io_uring(tmp_path, lambda: errno.EPERM, proc=tmp_path)
    assert result.status == "fail"
    assert "Operation not permitted" in result.found
    assert do in result.do


def test_working_io_uring_counts_more_than_the_switch(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/io_uring_disabled").write_text("1\n")
    (result,) = doctor.check_io_uring(tmp_path, lambda: 0, lambda _: None, tmp_path)
    assert result.status == "ok"


@pytest.mark.parametrize(
    ("error", "do"),
    [(StorageError("it came back torn"), "data folder"), (ImportError("no _uring"), "make setup")],
)
def test_a_ring_that_is_allowed_and_does_not_work_fails(error: Exception, do: str, tmp_path: Path) -> None:
    def exercise(_: Path) -> None:
        raise error

    (result,) = doctor.check_io_uring(tmp_path, lambda: 0, exercise, tmp_path)
    assert result.status == "fail"
    assert str(error) in result.found
    assert do in result.do


def _measured(write: float, read: float) -> Callable[[Path], tuple[float, float]]:
    return lambda _: (write, read)


def test_a_slow_drive_warns_and_a_fast_one_does_not(tmp_path: Path) -> None:
    *_, quick = doctor.check_drive(tmp_path, _measured(3, 6))
    *_, slow = doctor.check_drive(tmp_path, _measured(3, 0.1))
    assert (quick.status, quick.found) == ("ok", "write 3.00 GB/s, read 6.00 GB/s")
    assert slow.status == "warn"


@pytest.mark.parametrize(
    ("code", "check"), [(errno.EINVAL, "O_DIRECT"), (errno.EACCES, "data folder"), (errno.EROFS, "O_DIRECT")]
)
def test_a_drive_that_refuses_fails(code: int, check: str, tmp_path: Path) -> None:
    def refuse(_: Path) -> tuple[float, float]:
        raise OSError(code, "refused")

    (result,) = doctor.check_drive(tmp_path, refuse)
    assert (result.check, result.status) == (check, "fail")


def test_a_missing_folder_is_judged_by_its_parent_and_not_created(tmp_path: Path) -> None:
    seen: list[Path] = []

    def measure(folder: Path) -> tuple[float, float]:
        seen.append(folder)
        return 1, 1

    first, *_ = doctor.check_drive(tmp_path / "a" / "b", measure)
    assert seen == [tmp_path]
    assert "does not exist yet" in first.found
    assert list(tmp_path.iterdir()) == []


def test_measuring_a_drive_leaves_nothing_behind(tmp_path: Path) -> None:
    write_gbps, read_gbps = probes.measure_drive(tmp_path, 8 << 20)
    assert write_gbps > 0
    assert read_gbps > 0
    assert list(tmp_path.iterdir()) == []


def _proc(root: Path, available_kib: int, capabilities: str = "0") -> Path:
    (root / "self").mkdir()
    (root / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    lines = f"MemTotal: 33554432 kB\nMemAvailable: {available_kib} kB\n"
    (root / "meminfo").write_text(lines)
    return root


def test_a_small_memlock_warns_unless_the_process_is_exempt(tmp_path: Path) -> None:
    proc = _proc(tmp_path, 30 << 20)
    _, bound, *_ = doctor.check_memory(proc, 8 << 20)
    assert (bound.status, bound.found) == ("warn", "8.0 MiB")
    assert "LimitMEMLOCK" in bound.do
    _, unlimited, *_ = doctor.check_memory(proc, resource.RLIM_INFINITY)
    assert (unlimited.status, unlimited.found) == ("ok", "unlimited")


def test_cap_ipc_lock_is_read_from_the_kernel(tmp_path: Path) -> None:
    _, exempt, *_ = doctor.check_memory(_proc(tmp_path, 30 << 20, f"{1 << 14:016x}"), 8 << 20)
    assert exempt.status == "ok"
    assert "CAP_IPC_LOCK" in exempt.found


def test_little_memory_warns(tmp_path: Path) -> None:
    memory, *_ = doctor.check_memory(_proc(tmp_path, 1 << 20), 0)
    assert memory.status == "warn"


def test_a_gpu_is_named_and_none_is_fine() -> None:
    (some,) = doctor.check_gpu(lambda: ["H200", "H200"])
    (none,) = doctor.check_gpu(list)
    assert (some.found, none.found) == ("H200, H200", "none")
    assert {some.status, none.status} == {"ok"}


def test_one_broken_check_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Iterator[Result]:
        raise KeyError("MemTotal")

    monkeypatch.setattr(doctor, "check_memory", broken)
    monkeypatch.setattr(doctor, "check_drive", lambda _: iter(()))
    results = {result.check: result for result in doctor.examine(tmp_path)}
    assert results["memory"].status == "fail"
    assert "GPU" in results


def test_the_table_is_aligned_and_coloured_only_on_request() -> None:
    results = [Result("a", "ok", "found", "means"), Result("longer", "fail", "x", "y", "do it")]
    assert doctor.table(results, colour=False).splitlines() == [
        "ok    a       found",
        "              means",
        "fail  longer  x",
        "              y",
        "              -> do it",
        "",
        "1 ok, 0 warn, 1 fail",
    ]
    assert "\x1b[31mfail\x1b[0m  longer" in doctor.table(results, colour=True)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 3)])
def test_only_a_fail_changes_the_exit_status(
    status: doctor.Status, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: [Result("c", status, "f", "m", "d")])
    assert doctor.main(["--json"]) == code
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry == {"check": "c", "status": status, "found": "f", "means": "m", "do": "d"}


def test_this_machine_can_be_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(["--data", str(tmp_path)])
    text = capsys.readouterr().out
    assert status in {0, 1}
    for check in ("io_uring", "memory", "RLIMIT_MEMLOCK", "GPU"):
        assert check in text
    assert "\x1b" not in text
    assert list(tmp_path.iterdir()) == []
