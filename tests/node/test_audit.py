"""Lines of the audit log that could not be written whole, or synced."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.clock import SystemClock
from kvstore.errors import StorageError
from kvstore.miss import Miss
from kvstore.names import block_key
from kvstore.node.audit import Audit
from tests.node.in_process import NodeInProcess


def test_a_truncated_line_is_a_failure_and_does_not_corrupt_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a nearly full file system: the first bytes are written, and there is no error."""
    path, write = tmp_path / "audit.jsonl", os.write
    log = Audit(SystemClock(), path)
    assert log.note("erase-domain", tenant="ada", peer="ipv4:10.0.0.7:1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:30]))
        assert not log.note("erase-domain", tenant="bob", peer="ipv4:10.0.0.7:1")
    assert log.note("erase-domain", tenant="cyd", peer="ipv4:10.0.0.7:1")
    log.close()
    with path.open("ab") as file:
        file.write(b'{"at_ms":1')  # and its node was killed
    log = Audit(SystemClock(), path)
    assert log.note("erase-domain", tenant="dan", peer="ipv4:10.0.0.7:1")
    log.close()
    lines = path.read_text().splitlines()
    assert [json.loads(lines[at])["tenant"] for at in (0, 2, 4)] == ["ada", "cyd", "dan"]
    assert len(lines) == 5


def test_a_failed_sync_is_reported_to_all_whose_lines_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports it only once; a later sync knows nothing of it."""

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Audit(SystemClock(), tmp_path / "audit.jsonl") as log:
        lines = []
        for tenant in ("ada", "bob"):
            assert log.note("erase-domain", tenant=tenant, peer="ipv4:10.0.0.7:1")
            lines.append(log.lines)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            assert not log.sync(lines[0])
        assert log.note("erase-domain", tenant="cyd", peer="ipv4:10.0.0.7:1")
        assert not log.sync(lines[1])
        assert log.sync(log.lines)


def test_the_name_of_a_log_is_synced_before_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    with Audit(SystemClock(), path := tmp_path / "audit.jsonl") as log:
        assert synced == [str(tmp_path)]
        assert log.note("erase-domain", tenant="ada", peer="ipv4:10.0.0.7:1")
        assert log.sync(log.lines)
        assert synced == [str(tmp_path), str(path)]
    os.mkfifo(pipe := tmp_path / "pipe")
    with Audit(SystemClock(), pipe) as log:  # what can't be synced
        assert log.note("erase-domain", tenant="ada", peer="ipv4:10.0.0.7:1")
        assert log.sync(log.lines)
    assert len(synced) == 2


def test_a_receipt_is_issued_once_its_line_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync, is_broken = tmp_path / "audit.jsonl", os.fsync, True
    synced: list[str] = []

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink() == path:
            if is_broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synced.append(path.read_text())
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("tests.node.in_process.Audit", lambda clock, _: Audit(clock, path))
    key = block_key(b"what ada said")
    with NodeInProcess(tmp_path / "data") as node, Client(node.target) as client:
        client.put_inline(key, key)
        client.session("ada", "chat").append([key], tokens=1)
        with pytest.raises(StorageError, match="so there is no receipt; repeat the call"):
            client.erase_user("ada")
        assert isinstance(client.exists([key])[0], Miss)
        is_broken = False
        receipt = client.erase_user("ada").receipt
        assert len(synced) == 1
        assert json.loads(synced[0].splitlines()[-1]) == json.loads(receipt)
