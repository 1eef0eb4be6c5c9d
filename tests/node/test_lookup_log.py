"""The log of look-ups: what survives, the cost of a torn tail, its bound, and that no caller waits for it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.client import as_request
from kvstore.limits import LOOKUP_LOG_FILE_BYTES_MAX, LOOKUP_LOG_FILES, LOOKUP_LOG_WAITING_BYTES_MAX
from kvstore.names import block_key
from kvstore.node.lookup_log import Kept, LookupLog
from kvstore.wire import lookups_pb2 as pb
from kvstore.wire import lookups_pb2_grpc
from tests.conftest import small_client, small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    import grpc

WAIT_S = 20.0


def kept(name: str, size_bytes: int = 100) -> Kept:
    return Kept(b"t" * 16, b"s" * 32, name.encode(), bytes(size_bytes))


def written(folder: Path, names: list[str]) -> Path:
    """Write these texts, each under its file's name."""
    with LookupLog(folder) as log:
        log.load()
        for name in names:
            log.append(kept(name))
    (path,) = folder.iterdir()
    return path


def loaded(folder: Path) -> list[str]:
    with LookupLog(folder) as log:
        return [one.request_id.decode() for one in log.load()]


def test_appended_frames_are_read_back_exactly(tmp_path: Path) -> None:
    with LookupLog(tmp_path) as log:
        assert log.load() == []
        log.append(kept("one"))
        log.append(kept("two"))
    with LookupLog(tmp_path) as log:
        assert log.load() == [kept("one"), kept("two")]
        log.append(kept("three"))
    assert loaded(tmp_path) == ["one", "two", "three"]
    assert kept("one").size_bytes == len(kept("one").frame())


@pytest.mark.parametrize("cut", [1, 7, 8, 60, 150])
def test_a_torn_tail_is_skipped_and_overwritten(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, ["one", "two", "three"])
    os.truncate(path, path.stat().st_size - cut)
    assert loaded(tmp_path) == ["one", "two"]
    with LookupLog(tmp_path) as log:
        log.load()
        log.append(kept("four"))
    assert loaded(tmp_path) == ["one", "two", "four"]


def test_any_changed_byte_ends_the_file_there_and_is_never_misread(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, ["one", "two"])
    good = path.read_bytes()
    first = kept("one").size_bytes
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        assert loaded(tmp_path) == (["one"] if at >= first else [])


def test_files_are_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
    each = 7000
    count = LOOKUP_LOG_FILES * LOOKUP_LOG_FILE_BYTES_MAX // each + 2000
    with LookupLog(tmp_path) as log:
        log.load()
        for number in range(count):
            log.append(kept(str(number), each))
            if number % 50 == 49:
                wait_until(lambda: not log._waiting, "it is written")
        assert log.unwritten == 0
    files = sorted(tmp_path.iterdir())
    assert len(files) == LOOKUP_LOG_FILES
    assert sum(path.stat().st_size for path in files) <= LOOKUP_LOG_FILES * LOOKUP_LOG_FILE_BYTES_MAX
    names = loaded(tmp_path)
    assert names == [str(number) for number in range(count - len(names), count)]


def test_a_hanging_disk_is_not_awaited_and_losses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, standing = threading.Event(), threading.Event()
    real = os.pwrite

    def slow(*arguments: Any) -> int:
        standing.set()
        go_on.wait(WAIT_S)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    with LookupLog(tmp_path) as log:
        log.load()
        log.append(kept("first"))
        assert standing.wait(WAIT_S)
        for number in range(LOOKUP_LOG_WAITING_BYTES_MAX // 1000 + 100):
            log.append(kept(str(number), 1000))
        assert 100 <= log.unwritten < 300
        assert log._waiting_bytes <= LOOKUP_LOG_WAITING_BYTES_MAX
        lost = log.unwritten
        go_on.set()
    assert len(loaded(tmp_path)) == LOOKUP_LOG_WAITING_BYTES_MAX // 1000 + 101 - lost


def test_a_failing_disk_is_counted_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LookupLog(tmp_path) as log:
        log.load()
        with monkeypatch.context() as failing:

            def fail(*_: Any) -> int:
                raise OSError(28, "No space left on device")

            failing.setattr(os, "pwrite", fail)
            log.append(kept("lost"))
            wait_until(lambda: log.unwritten == 1, "it was not written")
        log.append(kept("kept"))
    assert loaded(tmp_path) == ["kept"]


def test_a_folder_that_cannot_be_created_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with LookupLog(tmp_path / "file" / "lookups") as log:
        assert log.load() == []
        log.append(kept("nowhere"))
        wait_until(lambda: log.unwritten == 1, "it is counted")


def told(channel: grpc.Channel) -> list[str]:
    stub = lookups_pb2_grpc.LookupsStub(channel)  # type: ignore[no-untyped-call]
    answer = stub.ListLookups(pb.ListLookupsRequest(tenant="acme"), timeout=WAIT_S)
    return [one.request_id for one in answer.lookups]


def test_look_ups_survive_sigkill_of_the_node(tmp_path: Path) -> None:
    data = tmp_path / "node"
    with small_node(data) as node, small_client(node.target, tenant="acme") as client:
        for number in range(3):
            with as_request(f"before-{number}"):
                client.prefix([block_key(b"x")])
        path = data / "lookups" / "lookups-00000001.log"
        wait_until(lambda: path.exists() and b"before-2" in path.read_bytes(), "the log has the last of them")
        assert path.stat().st_mode & 0o777 == 0o600
        assert block_key(b"x") not in path.read_bytes()
        node.kill()
    with small_node(data) as node, small_client(node.target, tenant="acme") as client:
        with as_request("after"):
            client.prefix([block_key(b"x")])
        assert told(client._core.channel) == ["before-0", "before-1", "before-2", "after"]
