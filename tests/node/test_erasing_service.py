"""A node with a master key: its data, the remains of an erasure, and its errors without its key."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvcli.running import Status
from kvstore.cli import main
from kvstore.client import Block, Client, Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import KvError
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, block_key, domain_of, in_domain
from kvstore.sealing.masters import new_master_file
from nic_offload.memory import allocate
from tests.conftest import small_node, with_master_key
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.node.node import Node
    from kvstore.storage.items import SessionItem, SessionsDone

SIZE, COUNT = 40_000, 12
BOTH = "keys destroyed, the rest overwritten"
MARK = b"-- what ada said to the model --"


@contextmanager
def node_of(folder: Path, *, encrypted: bool) -> Iterator[NodeProcess]:
    node = small_node(folder / "data", arguments=with_master_key(folder) if encrypted else ())
    try:
        yield node
    finally:
        node.stop()


def payload(number: int) -> bytes:
    return (MARK + number.to_bytes(32, "little")) * (SIZE // 64)


def keys_of(user: str) -> list[bytes]:
    return [block_key(user.encode(), bytes([number])) for number in range(COUNT)]


def put(client: Client, user: str) -> None:
    """Put shared blocks that only the user's session names."""
    with allocate(SIZE * COUNT) as memory, client.register(memory) as region:
        for number in range(COUNT):
            memory[SIZE * number : SIZE * (number + 1)] = payload(number)
        blocks = [Block(key, region, SIZE * at, SIZE, domain=SHARED) for at, key in enumerate(keys_of(user))]
        assert [one.error for one in client.put(blocks)] == [None] * COUNT
    assert client.session(user, "chat").append(keys_of(user), tokens=COUNT) == COUNT


def got(client: Client, user: str) -> list[bytes | MissReason]:
    with allocate(SIZE * COUNT) as memory, client.register(memory) as region:
        blocks = [Block(key, region, SIZE * at, SIZE) for at, key in enumerate(keys_of(user))]
        return [
            bytes(memory[SIZE * at : SIZE * (at + 1)]) if isinstance(one, Hit) else one.reason
            for at, one in enumerate(client.get(blocks))
        ]


WHOLE = [payload(number) for number in range(COUNT)]


def files_with(folder: Path, mark: bytes) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file() and mark in file.read_bytes()]


@pytest.mark.parametrize("encrypted", [True, False])
def test_blocks_of_an_erased_user_are_in_neither_memory_nor_drive_also_after_restarts(
    tmp_path: Path, *, encrypted: bool
) -> None:
    with node_of(tmp_path, encrypted=encrypted) as node:
        with Client(node.target) as client:
            put(client, "ada")
            put(client, "bob")
            assert got(client, "ada") == got(client, "bob") == WHOLE
        assert files_with(tmp_path / "data", MARK) == ([] if encrypted else ["drive-0.kv"])
        node.kill()
        node.start()
        with Client(node.target) as client:
            assert got(client, "ada") == WHOLE
            erased = client.erase_user("ada")
            assert (erased.blocks, erased.sessions) == (COUNT, 1)
            assert erased.size_bytes >= COUNT * SIZE
            assert (erased.keys > 0) is encrypted
            said = json.loads(erased.receipt)
            assert said["how"] == (BOTH if encrypted else "overwritten"), (
                "shared blocks have their tenant's key"
            )
            assert said["overwritten"] == COUNT
            assert not re.search(r"(?<![0-9a-f])ada(?![0-9a-f])", erased.receipt), (
                "but for what is part of a number"
            )
            assert got(client, "ada") == [MissReason.ERASED] * COUNT
            said = str(client.explain(keys_of("ada"))[0])
            assert "was erased" in said
            assert "key" not in said, "which a node without a master key has none of"
            assert not list(client.sessions("ada"))
            assert got(client, "bob") == WHOLE
            again = client.erase_user("ada")
            assert (again.blocks, again.sessions) == (0, 0)
        node.kill()
        shutil.rmtree(tmp_path / "data" / "index-0")
        node.start()
        with Client(node.target) as client:
            assert got(client, "ada") == [MissReason.UNKNOWN] * COUNT
            assert got(client, "bob") == WHOLE
            put(client, "ada")
            assert got(client, "ada") == WHOLE


@pytest.mark.parametrize("encrypted", [True, False])
def test_an_erased_tenant_leaves_no_byte_on_the_drive(tmp_path: Path, *, encrypted: bool) -> None:
    with node_of(tmp_path, encrypted=encrypted) as node, Client(node.target) as client:
        put(client, "ada")
        client.put_inline(block_key(b"of nobody"), MARK * 100, domain=SHARED)
        keyring = (tmp_path / "data" / "keyring").read_bytes() if encrypted else b""
        erased = client.erase_tenant()
        assert (erased.blocks, erased.sessions) == (COUNT + 1, 1)
        assert got(client, "ada") == [MissReason.ERASED] * COUNT
        assert isinstance(client.get_inline(block_key(b"of nobody"), 3200), Miss)
        assert files_with(tmp_path / "data", MARK) == []
        if encrypted:
            assert (tmp_path / "data" / "keyring").read_bytes() != keyring
        put(client, "ada")
        assert got(client, "ada") == WHOLE


def test_an_erased_user_leaves_no_session_name_on_the_drive(tmp_path: Path) -> None:
    about = "-- what this conversation was about --"
    with node_of(tmp_path, encrypted=False) as node, Client(node.target) as client:
        put(client, "ada")
        assert client.session("ada", about).append(keys_of("ada"), tokens=COUNT) == COUNT
        drive = tmp_path / "data" / "drive-0.kv"
        assert about.encode() in drive.read_bytes()
        assert client.erase_user("ada").sessions == 2
        assert about.encode() not in drive.read_bytes()


def test_an_old_index_restores_nothing_of_an_erased_user(tmp_path: Path) -> None:
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            put(client, "ada")
        node.stop()
        shutil.copytree(tmp_path / "data" / "index-0", tmp_path / "old")
        shutil.copy(tmp_path / "data" / "drive-0.kv", tmp_path / "drive")
        node.start()
        with Client(node.target) as client:
            client.erase_tenant()
        node.kill()
        shutil.rmtree(tmp_path / "data" / "index-0")
        shutil.copytree(tmp_path / "old", tmp_path / "data" / "index-0")
        shutil.copy(tmp_path / "drive", tmp_path / "data" / "drive-0.kv")
        node.start()
        with Client(node.target) as client:
            assert got(client, "ada") == [MissReason.ERASED] * COUNT, "though the index says where they were"


def test_with_a_missing_or_wrong_master_key_a_node_reports_it_and_changes_nothing(tmp_path: Path) -> None:
    with node_of(tmp_path, encrypted=True) as node, Client(node.target) as client:
        put(client, "ada")
    (tmp_path / "other.key").write_bytes(os.urandom(32))
    (tmp_path / "other.key").chmod(0o600)
    before = {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir() if file.is_file()}
    serve = [
        sys.executable,
        "-m",
        "kvstore",
        "serve",
        "--data",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
    ]
    for more, why in (
        ([], "are encrypted: give their master key"),
        (["--master-key", f"file:{tmp_path}/other.key"], "sealed with master key"),
        (["--master-key", f"file:{tmp_path}/none.key"], "none.key"),
    ):
        done = subprocess.run([*serve, *more], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode not in {0, 70}
        assert why in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 2
    after = {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir() if file.is_file()}
    assert {name for name in before if before[name] != after.get(name)} <= {"lock"}
    with node_of(tmp_path, encrypted=True) as node, Client(node.target) as client:
        assert got(client, "ada") == WHOLE


def test_blocks_are_erased_before_the_session_by_which_they_are_found(tmp_path: Path) -> None:
    """Otherwise an erasure that dies in between, and is repeated, leaves them."""
    left: list[int] = []
    with NodeInProcess(tmp_path / "data") as node, Client(node.target) as client:
        put(client, "ada")

        def watch(one: Node) -> None:
            change = one.store.change_sessions

            def look_first(items: Sequence[SessionItem], done: SessionsDone) -> None:
                names = [(items[0].name.tenant, key) for key in keys_of("ada")]
                left.append(sum(entry is not None for entry in one.store.lookup(names)))
                change(items, done)

            vars(one.store)["change_sessions"] = look_first

        node.call(watch)
        assert client.erase_user("ada").blocks == COUNT
    assert left == [0]


def test_erasing_needs_the_name_of_a_user(tmp_path: Path) -> None:
    with (
        node_of(tmp_path, encrypted=False) as node,
        Client(node.target) as client,
        pytest.raises(KvError, match="1 to 128 bytes"),
    ):
        client.erase_user("")


def test_a_key_in_two_slots_is_destroyed_in_both(tmp_path: Path) -> None:
    """A slot was damaged, its user got another key, and then the first was readable again."""
    ada = domain_of("ada")
    keys = [in_domain(block_key(bytes([number])), ada) for number in range(2)]
    path = tmp_path / "data" / "keyring"

    def put_one(number: int) -> None:
        with Client(node.target) as client:
            client.put_inline(keys[number], MARK * 100, domain=ada)

    with node_of(tmp_path, encrypted=True) as node:
        before = path.read_bytes()
        put_one(0)
        node.stop()
        good = path.read_bytes()
        (slot,) = {
            at // 128
            for at in range(8192, len(good))
            if good[at] != (before[at] if at < len(before) else 0) and good[at // 128 * 128 + 4] == 3
        }
        with path.open("r+b") as file:
            file.seek(128 * slot + 80)
            file.write(bytes([good[128 * slot + 80] ^ 1]))
        node.start()
        put_one(1)
        node.stop()
        with path.open("r+b") as file:
            file.seek(128 * slot)
            file.write(good[128 * slot : 128 * slot + 128])
        node.start()
        with Client(node.target) as client:
            assert all(isinstance(client.get_inline(key, 3200), bytes) for key in keys)
            erased = client.erase_user("ada")
            assert (erased.blocks, erased.keys) == (2, 2)
        node.kill()
        node.start()
        with Client(node.target) as client:
            for key in keys:
                missed = client.get_inline(key, 3200)
                assert isinstance(missed, Miss)
                assert missed.reason is MissReason.ERASED


def test_the_command_erases_a_whole_tenant(tmp_path: Path) -> None:
    with node_of(tmp_path, encrypted=False) as node:
        key = block_key(b"of the tenant")
        with Client(node.target) as client:
            client.put_inline(key, MARK * 100)
            assert main(["erase", "--node", node.target]) == Status.USAGE
            assert main(["erase", "--whole-tenant", "--node", node.target]) == Status.NO, "without --yes"
            assert client.get_inline(key, len(MARK) * 100) == MARK * 100
        assert main(["erase", "--whole-tenant", "--yes", "--node", node.target]) == Status.DONE
        with Client(node.target) as client:
            assert isinstance(client.get_inline(key, 3200), Miss)


def test_the_command_the_receipt_and_the_audit_log_report_the_same_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a node that encrypts, on one that doesn't, and for a user without data."""
    key = tmp_path / "master.key"
    new_master_file(key)
    for arguments, expected in (([], "overwritten"), (["--master-key", f"file:{key}"], BOTH)):
        audit = tmp_path / f"audit-{len(arguments)}"
        with NodeProcess(
            tmp_path / f"data-{len(arguments)}",
            capacity="64MiB",
            arguments=[*arguments, "--audit", str(audit)],
        ) as node:
            with Client(node.target) as client:
                put(client, "ada")
            for user, how in (("ada", expected), ("eve", "nothing was stored")):
                command = ["erase", "--user", user, "--node", node.target]
                assert main(command) == Status.DONE
                said = capsys.readouterr().out.strip()
                lines = map(json.loads, audit.read_text().splitlines())
                line = [one for one in lines if one["what"] == "erase-domain"][-1]
                assert line["how"] == how
                keys = f"{line['keys']} " if line["keys"] else ""
                assert said.endswith(f": {keys}{how}")
