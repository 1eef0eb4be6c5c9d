"""A plain node gets a master key: its data is encrypted while it serves, and while it is killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from kvstore.client import Client
from kvstore.demo.node_process import NodeProcess
from kvstore.sealing.keys_protocol import find_control
from kvstore.sealing.masters import new_master_file
from kvstore.sealing.store_keys import keys_opener
from kvstore.storage.encrypting import Encrypting
from tests.node.in_process import NodeInProcess
from tests.node.test_erasing_service import BOTH, MARK, WHOLE, files_with, got, keys_of, put

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KILLS = 2
WAIT_S = 60
LABEL = "what ada calls her chat"
USERS = ("ada", "bob", "eve")


def status(data: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstore", "keys", "status", "--data", str(data), "--json"]
    said: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S).stdout
    )
    return said


def test_an_erasure_removes_labels_even_if_nothing_is_encrypted_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has them in the clear until the node gets its master key."""
    monkeypatch.setattr(Encrypting, "step", lambda _: None)
    data, other = tmp_path / "data", "what bob calls his"
    new_master_file(tmp_path / "master.key")
    with NodeInProcess(data) as node, Client(node.target) as client:
        for user, label in (("ada", LABEL), ("bob", other)):
            put(client, user)
            client.session(user, label).append(keys_of(user), tokens=1)
    assert files_with(data / "index-0", LABEL.encode())
    open_keys = keys_opener(data, f"file:{tmp_path / 'master.key'}")
    with NodeInProcess(data, open_keys=open_keys) as node, Client(node.target) as client:
        assert {one.session for one in client.sessions("ada")} == {LABEL, "chat"}
        erased = client.erase_user("ada")
        assert erased.sessions == 2
        said = json.loads(erased.receipt)
        assert (said["how"], said["overwritten"]) == (BOTH, erased.blocks), (
            "of the drive nothing is encrypted"
        )
        assert said["clear_bytes"] > 0
        assert files_with(data / "index-0", LABEL.encode()) == []
        assert files_with(data / "index-0", other.encode()) == []
        assert {one.session for one in client.sessions("bob")} == {other, "chat"}
        assert got(client, "bob") == WHOLE


def clear_bytes(data: Path) -> int:
    node = find_control(data)
    assert node is not None
    with closing(node):
        return node.clear[0][0]


def test_a_plain_drive_is_encrypted_under_load_and_across_kills(tmp_path: Path) -> None:
    data = tmp_path / "data"
    node = NodeProcess(data, capacity="64MiB")
    try:
        with Client(node.target) as client:
            for user in (*USERS, "gone"):
                put(client, user)
            assert client.session("ada", LABEL).append(keys_of("ada"), tokens=1) == len(WHOLE)
            client.erase_user("eve")
            client.delete(keys_of("gone"))
        assert files_with(data, MARK) == ["drive-0.kv"]
        assert "drive-0.kv" in files_with(data, LABEL.encode())
        node.stop()
        new_master_file(tmp_path / "master.key")
        node.arguments = ["--master-key", f"file:{tmp_path / 'master.key'}"]
        node.start()
        seen = [clear_bytes(data)]  # at once: a command may take longer than the encryption
        chance = random.Random(7)
        (drive,) = status(data)["in_the_clear"]
        assert drive["drive"] == 0
        assert drive["bytes"] <= seen[0]
        for kill in range(KILLS):
            with Client(node.target) as client:
                until = time.monotonic() + chance.uniform(0.0, 0.4)
                while time.monotonic() < until:
                    assert got(client, "ada") == got(client, "bob") == WHOLE
                put(client, f"later {kill}")
            node.kill()
            node.start()
        until = time.monotonic() + WAIT_S
        with Client(node.target) as client:
            while (left := clear_bytes(data)) and time.monotonic() < until:
                seen.append(left)
                assert got(client, "ada") == got(client, "bob") == WHOLE
            for kill in range(KILLS):
                assert got(client, f"later {kill}") == WHOLE
        assert left == 0
        assert seen[0] > 3 * sum(map(len, WHOLE))
        node.kill()
        drive = (data / "drive-0.kv").read_bytes()
        assert MARK not in drive
        assert LABEL.encode() not in drive
        node.start()
        assert clear_bytes(data) == 0
        with Client(node.target) as client:
            assert got(client, "ada") == got(client, "bob") == WHOLE
            assert LABEL in {session.session for session in client.sessions("ada")}
    finally:
        node.stop()
