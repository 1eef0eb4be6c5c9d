"""`kvstore put`, `get`, `delete`, `pin` and `watch`, as a person and as a program use them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvcli.running import Status
from kvstore.cli import main
from kvstore.client import Happened
from kvstore.commands.block_commands import _line, parse_key
from kvstore.errors import ConfigError
from kvstore.limits import WATCH_HEARTBEAT_MS
from kvstore.lookups import HITS, Kind, Outcome
from kvstore.names import block_key
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

DATA = bytes(range(256)) * 16
KEY = block_key(b"hello")


@pytest.fixture
def ours(shared_node: NodeProcess, tenant: str) -> list[str]:
    """Options for the node, and for a tenant of the test's own."""
    return ["--node", shared_node.target, "--tenant", tenant]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(DATA)
    return path


def test_a_block_is_put_fetched_and_deleted(
    ours: list[str], file: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["put", "name:hello", str(file), "--layout", "bf16", *ours]) == 0
    assert capfdbinary.readouterr().out == f"{KEY.hex()} written, 4 KiB\n".encode()
    assert main(["get", KEY.hex(), *ours]) == 0, "of any layout"
    assert capfdbinary.readouterr().out == DATA
    out = tmp_path / "out"
    assert main(["get", "name:hello", str(out), *ours]) == 0
    assert out.read_bytes() == DATA
    assert main(["delete", "name:hello", "name:none", *ours]) == Status.NO
    assert capfdbinary.readouterr().out.decode().split() == [
        *(KEY.hex(), "deleted"),
        *(block_key(b"none").hex(), "not", "stored"),
    ]
    assert main(["get", "name:hello", str(tmp_path / "none"), *ours]) == Status.NO
    out_, err = capfdbinary.readouterr()
    assert (out_, err) == (b"", b"kvstore: name:hello: MISS(not stored): it was deleted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "page"]
    assert main(["get", "name:never", *ours]) == Status.NO
    assert capfdbinary.readouterr().err.startswith(b"kvstore: name:never: MISS(not stored): ")


def test_a_get_that_misses_is_among_the_nodes_misses(ours: list[str], shared_node: NodeProcess) -> None:
    with small_client(shared_node.target) as client:
        before = sum(one.blocks for one in client.statistics().misses)
        assert main(["get", "name:never put", *ours]) == Status.NO
        assert sum(one.blocks for one in client.statistics().misses) > before


def test_a_program_reads_json(ours: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["put", "name:hello", str(file), "--json", *ours]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": KEY.hex(), "bytes": 4096, "durability": "written"}
    assert main(["get", "name:hello", str(file), "--json", *ours]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": KEY.hex(), "found": True, "bytes": 4096}
    assert main(["delete", "name:hello", "--json", *ours]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": KEY.hex(), "deleted": True}
    assert main(["get", "name:hello", "--json", *ours]) == Status.NO
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "key": KEY.hex(),
        "found": False,
        "reason": "unknown",
        "detail": "it was deleted",
    }
    assert err == "kvstore: name:hello: MISS(not stored): it was deleted\n"


def test_an_empty_user_is_not_an_owner(
    ours: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["put", "name:hello", str(file), "--user", "", *ours]) == Status.USAGE
    assert "A user's name is not empty." in capsys.readouterr().err


def test_a_get_is_one_look_up(ours: list[str], file: Path, shared_node: NodeProcess, tenant: str) -> None:
    assert main(["put", "name:hello", str(file), "--layout", "bf16", *ours]) == 0
    assert main(["get", "name:hello", str(file), *ours]) == 0
    assert main(["get", "name:never put", *ours]) == Status.NO
    with small_client(shared_node.target, tenant=tenant) as client:
        recorded = client.looked_up(last=9).lookups
    assert [(one.kind, [run.outcome for run in one.runs]) for one in recorded] == [
        (Kind.GET, [recorded[0].runs[0].outcome]),
        (Kind.GET, [Outcome.NEVER]),
    ]
    assert recorded[0].runs[0].outcome in HITS


def test_a_pin_outlives_the_command(
    ours: list[str], file: Path, shared_node: NodeProcess, tenant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["put", "name:hello", str(file), *ours]) == 0
    with small_client(shared_node.target, tenant=tenant) as client:
        before = client.statistics().pins
        assert main(["pin", "name:hello", *ours]) == 0
        assert client.statistics().pins == before + 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{KEY.hex()} pinned"
    assert main(["pin", "name:none", *ours]) == Status.NO


def test_a_watch_shows_events(ours: list[str], file: Path, shared_node: NodeProcess, tenant: str) -> None:
    command = [sys.executable, "-m", "kvstore", "watch", "--json", "--seconds", "60", *ours]
    with (
        small_client(shared_node.target, tenant=tenant) as client,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        wait_until(lambda: client.statistics().watchers > 0, "the watch has begun")
        client.put_inline(KEY, file.read_bytes())
        client.session("ada", "chat").append([KEY], tokens=1)
        assert process.stdout is not None
        stored, changed = (json.loads(process.stdout.readline()) for _ in range(2))
        process.terminate()
        assert process.wait(30) == Status.TERMINATED
    assert (stored["what"], stored["key"]) == ("STORED", KEY.hex())
    assert (changed["what"], changed["blocks"]) == ("CHANGED", 1)


def test_a_watch_ends_when_nobody_reads_it(ours: list[str], shared_node: NodeProcess, tenant: str) -> None:
    """Without an event: a tenant has few watchers, and the next event may be hours away."""
    command = [sys.executable, "-m", "kvstore", "watch", "--seconds", "3600", *ours]
    with (
        small_client(shared_node.target, tenant=tenant) as client,
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
    ):
        wait_until(lambda: client.statistics().watchers > 0, "the watch has begun")
        assert process.stdout is not None
        process.stdout.close()
        try:
            assert process.wait(12 * WATCH_HEARTBEAT_MS / 1000) == Status.DONE
        finally:
            process.kill()


def test_a_watch_shows_times_like_other_commands() -> None:
    event = Happened("STORED", 1_700_000_000_123, KEY)
    assert _line(event) == f"2023-11-14 22:13:20.123 UTC  STORED {KEY.hex()}"


def test_an_unusable_file_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    wrong = ["--node", "127.0.0.1:1", "--token-file", str(tmp_path / "empty")]
    assert main(["get", "name:x", *wrong]) == Status.USAGE
    assert capfd.readouterr().err == f"kvstore: {tmp_path}/empty does not contain a valid token.\n"
    assert caplog.records == []


@pytest.mark.parametrize("text", ["", "00", "name", "zz" * 32, "00" * 33, " " + "00" * 32, "0 " + "00" * 31])
def test_an_invalid_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits, or name:TEXT"):
        parse_key(text)


def test_a_file_that_is_not_a_block_is_refused(
    ours: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, word in ((0, "none"), ((64 << 20) + 1, "more")):
        path = tmp_path / str(size)
        with path.open("wb") as made:
            made.truncate(size)
        assert main(["put", "name:hello", str(path), *ours]) == Status.USAGE
        assert capsys.readouterr().err == f"kvstore: A block has 1 byte to 64 MiB, and {path} has {word}.\n"


def test_the_default_node_is_used_unless_another_is_given(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRIGGERKV_NODE", raising=False)
    monkeypatch.setattr("kvstore.commands.node_commands.DEFAULT_NODE", shared_node.target)
    monkeypatch.delenv("TRIGGERKV_CONFIG", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    assert main(["stats"]) == 0
    monkeypatch.setenv("TRIGGERKV_NODE", "127.0.0.1:1")
    assert main(["stats", "--call-timeout-ms", "2000"]) == Status.FAILED
    assert "127.0.0.1:1" in capsys.readouterr().err
