"""Keys are rotated while a node serves puts, gets and erasures; it is killed meanwhile, and continues."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.clock import SystemClock
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import KvError, NodeUnavailable
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.node.audit import Audit
from kvstore.node.keys_socket import ControlSocket
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.keyring_state import read_status
from kvstore.sealing.masters import new_master_file, open_master
from tests.sealing.rig import users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAYLOAD = b"-- what ada said to the model --" * 100
WAIT_S = 120
RESUMED_S = 30
ROUNDS = 2


class Served:
    """A node with a master key and an audit log, and `kvstore keys` for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        for name in ("old", "new"):
            new_master_file(folder / f"{name}.key")
        self.in_use = "old"
        self.node = NodeProcess(self.data, capacity="64MiB", arguments=self.arguments())

    def arguments(self) -> list[str]:
        return ["--master-key", self.key(self.in_use), "--audit", str(self.folder / "audit")]

    def key(self, name: str) -> str:
        return f"file:{self.folder / name}.key"

    def other(self) -> str:
        return "new" if self.in_use == "old" else "old"

    def start_keys(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvstore", "keys", *words, "--data", str(self.data)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def keys(self, *words: str) -> tuple[int, str, str]:
        process = self.start_keys(*words)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def rotate(self, what: str, *more: str) -> tuple[int, str, str]:
        return self.keys(what, "--master-key", self.key(self.in_use), *more)

    def restart(self) -> None:
        """Restart the node with the master key that seals the keyring."""
        sealed_with = read_status(keyring_path(self.data)).master_id
        ids = {open_master(self.key(name)).id: name for name in ("old", "new")}
        self.in_use = ids[sealed_with]
        self.node.arguments = self.arguments()
        self.node.start()

    def audit(self, what: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "audit").read_text().splitlines())
        return [line for line in lines if line["what"] == what]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
    finally:
        served.node.stop()


class Load(threading.Thread):
    """Puts of new users, gets of all stored blocks, and erasures of some users, until stopped."""

    def __init__(self, target: str, first: int) -> None:
        super().__init__()
        self.target, self.number = target, first
        self.there: dict[int, bytes] = {}
        self.wrong: list[str] = []
        self.rounds = 0
        self.is_away = False  # the node
        self.enough, self.warm = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            with Client(self.target, shared=True) as client:
                while not self.enough.is_set():
                    self.turn(client)
        except NodeUnavailable:
            self.is_away = True  # it is killed in one of the tests
        except KvError as error:
            self.wrong.append(str(error))
        finally:
            self.warm.set()

    def turn(self, client: Client) -> None:
        self.number += 1
        key, payload = block_key(b"%d" % self.number), b"%d" % self.number + PAYLOAD
        client.put_inline(key, payload)
        self.there[self.number] = payload
        user = f"user {self.number}"
        assert client.session(user, "chat").append([key], tokens=1) == 1  # the record makes a domain's key
        for number in list(self.there)[-8:]:
            got = client.get_inline(block_key(b"%d" % number), len(self.there[number]))
            if isinstance(got, Miss) and got.reason is MissReason.NODE_AWAY:
                raise NodeUnavailable(got.detail)
            if got != self.there[number]:
                self.wrong.append(f"block {number}: {got!r:.80}")
        if self.number % 5 == 0:
            client.erase_user(user)
            del self.there[self.number]
        self.rounds += 1
        if self.rounds >= ROUNDS:
            self.warm.set()


def checked(target: str, there: dict[int, bytes]) -> None:
    with Client(target, shared=True) as client:
        for number, payload in there.items():
            assert client.get_inline(block_key(b"%d" % number), len(payload)) == payload


def test_keys_are_rotated_under_load_and_no_get_fails(served: Served) -> None:
    load = Load(served.node.target, 0)
    load.start()
    try:
        assert load.warm.wait(WAIT_S)
        for _ in range(2):
            status, out, err = served.rotate("rotate-tenant")
            assert (status, err) == (0, "")
            assert "keys wrapped by a new key" in out
            status, out, err = served.rotate("rotate-master", "--new-master-key", served.key(served.other()))
            assert (status, err) == (0, "")
            assert open_master(served.key(served.other())).id in out
            served.in_use = served.other()
    finally:
        load.enough.set()
        load.join(WAIT_S)
    assert (load.wrong, load.is_away) == ([], False)
    assert load.rounds > ROUNDS
    versions = {version for _, version in read_status(keyring_path(served.data)).tenants}
    assert versions == {3}
    assert [line["outcome"] for line in served.audit("rotate master")] == ["ok", "ok"]
    assert {line["peer"].split(",")[0] for line in served.audit("rotate tenant")} == {
        f"unix:uid={os.getuid()}"
    }
    served.node.kill()
    served.restart()
    checked(served.node.target, load.there)


def test_a_node_killed_during_a_rotation_continues_with_the_key_that_status_names(served: Served) -> None:
    there: dict[int, bytes] = {}
    for turn in range(ROUNDS):
        load = Load(served.node.target, turn * 10_000)
        load.start()
        assert load.warm.wait(WAIT_S)
        tenants = served.start_keys("rotate-tenant", "--master-key", served.key(served.in_use))
        new = ("--new-master-key", served.key(served.other()))
        master = served.start_keys("rotate-master", "--master-key", served.key(served.in_use), *new)
        if turn % 2:
            master.wait(WAIT_S)
        else:  # one of them may be under way, or over
            before = load.rounds
            while load.rounds == before and load.is_alive():
                load.join(0.01)
        served.node.kill()
        load.enough.set()
        for process in (tenants, master):
            process.communicate(timeout=WAIT_S)
        load.join(WAIT_S)
        assert load.wrong == []
        there |= load.there
        there.pop(load.number, None)  # its put, or its erasure, was cut off
        served.restart()
        checked(served.node.target, there)


def test_an_interrupted_rotation_continues_at_the_next_start(served: Served) -> None:
    with Client(served.node.target, shared=True) as client:
        client.put_inline(block_key(b"1"), PAYLOAD)
    served.node.stop()
    path, master = keyring_path(served.data), open_master(served.key("old"))
    with Keyring.open(path, master, read_status(path).store_uuid) as ring:
        (tenant,) = ring.tenants
        ring.ensure(users(*range(3000), tenant=tenant))
        answers = iter([True, False])
        with pytest.raises(KvError, match="interrupted"):
            ring.rotate_tenant(tenant, lambda: next(answers))
    status, out, _ = served.keys("status")
    assert status == 0
    assert f"The rotation of tenant {tenant.hex()} was interrupted" in out
    served.restart()
    until = time.monotonic() + RESUMED_S
    while not served.audit("rotate tenant") and time.monotonic() < until:
        time.sleep(0.02)
    (line,) = served.audit("rotate tenant")
    assert (line["peer"], line["tenant"], line["keys"]) == ("the node", tenant.hex(), 3001 - 1024)
    assert read_status(path).rotating == ()


def test_rotation_requires_the_master_key(served: Served) -> None:
    before = keyring_path(served.data).read_bytes()
    status, _, err = served.keys(
        "rotate-master", "--master-key", served.key("new"), "--new-master-key", served.key("new")
    )
    assert status == 1
    assert "is sealed with master key" in err
    assert ((served.data / "control").stat().st_mode & 0o777) == 0o600
    for said in (
        b'{"do":"rotate-master","new_master_key":"%s"}' % served.key("new").encode(),
        b"[]",
        b"\xff",
    ):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(WAIT_S)
            caller.connect(str(served.data / "control"))
            lines = caller.makefile("rb")
            assert b"challenge" in lines.readline()
            caller.sendall(said + b"\n")
            answer = lines.readline()
            assert b"done" not in answer
    refused = served.audit("rotate master")
    assert [line["outcome"] for line in refused] == ["refused"]
    assert keyring_path(served.data).read_bytes() == before
    status, _, err = served.rotate("rotate-tenant", "--tenant", "00" * 16)
    assert status == 2
    assert "has no tenant" in err

    status, _, err = served.rotate("rotate-master", "--new-master-key", f"file:{served.folder}/none")
    assert status == 2
    assert "none" in err
    assert keyring_path(served.data).read_bytes() == before


def test_after_a_time_without_descriptors_callers_are_accepted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def doing() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

        async def accept_later(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", accept_later)
        keys: Any = SimpleNamespace(rotating=(), status=SimpleNamespace(damaged=0))
        control = ControlSocket(tmp_path, keys, Audit(SystemClock(), None), dict)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "control")
        assert b"challenge" in await asyncio.wait_for(reader.readline(), RESUMED_S)
        writer.close()
        await control.close()

    asyncio.run(doing())
    assert "Too many open files" in caplog.text
