"""A node with a damaged keyring: what an erasure removes, what others can still get, and what is reported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvcli.running import Status
from kvstore.cli import main
from kvstore.client import Client
from kvstore.demo.node_process import NodeProcess
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, block_key, domain_of, in_domain
from kvstore.node.tenants import token_digest
from kvstore.sealing.masters import new_master_file
from tests.node.test_erasing_service import MARK, node_of
from tests.sealing.rig import at

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAYLOAD = MARK * 100


def key_of(user: str) -> bytes:
    return in_domain(block_key(user.encode()), domain_of(user))


def put(client: Client, user: str) -> None:
    client.put_inline(key_of(user), PAYLOAD, domain=domain_of(user))
    client.session(user, "chat").append([key_of(user)], tokens=1)


def got(client: Client, user: str) -> bytes | MissReason:
    found = client.get_inline(key_of(user), len(PAYLOAD))
    return found.reason if isinstance(found, Miss) else bytes(found)


def slot_of(path: Path, domain: bytes) -> int:
    raw = path.read_bytes()
    return (raw.index(domain, 8192) - 8192) // 128


def write(path: Path, rows: dict[int, bytes]) -> None:
    with path.open("r+b") as file:
        for number, row in rows.items():
            file.seek(at(number).start)
            file.write(row)


def test_swapped_slots_affect_only_the_erased_user(tmp_path: Path) -> None:
    path = tmp_path / "data" / "keyring"
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            for user in ("ada", "bob", "cyd"):
                put(client, user)
        node.stop()
        raw = path.read_bytes()
        ada, bob = (slot_of(path, domain_of(user)) for user in ("ada", "bob"))
        write(path, {ada: raw[at(bob)], bob: raw[at(ada)]})
        node.start()
        with Client(node.target) as client:
            assert got(client, "ada") == got(client, "bob") == MissReason.UNREADABLE
            assert main(["keys", "status", "--data", str(tmp_path / "data")]) == Status.NO
            erased = client.erase_user("ada")
            assert (erased.blocks, erased.sessions, erased.keys) == (1, 1, 2)
            said = json.loads(erased.receipt)
            assert said["how"] == "keys destroyed"
            assert f"{ada}:{raw[at(ada)][8:16].hex()}" in said["key_ids"].split(",")
            assert "unread" not in said
            assert raw[at(ada)][76:124] not in path.read_bytes()
            assert got(client, "ada") == MissReason.ERASED
            assert got(client, "bob") == MissReason.UNREADABLE
            assert got(client, "cyd") == PAYLOAD
        node.stop()
        write(path, {bob: raw[at(bob)], ada: bytes(128)})
        node.start()
        with Client(node.target) as client:
            assert got(client, "bob") == PAYLOAD, "bob's key was never touched"
            assert got(client, "ada") == MissReason.UNKNOWN


def test_damage_under_a_running_node_stops_no_erasure(tmp_path: Path) -> None:
    path = tmp_path / "data" / "keyring"
    with node_of(tmp_path, encrypted=True) as node, Client(node.target) as client:
        for user in ("ada", "bob", "cyd"):
            put(client, user)
        raw = path.read_bytes()
        rows = {}
        for user in ("ada", "bob"):
            number = slot_of(path, domain_of(user))
            rows[number] = bytes((*raw[at(number)][:80], raw[at(number)][80] ^ 1, *raw[at(number)][81:]))
        write(path, rows)
        for user, left in (("cyd", "ada"), ("ada", "bob")):
            erased = client.erase_user(user)
            assert (erased.blocks, erased.keys) == (1, 2)
            assert "unread" not in json.loads(erased.receipt)
            assert got(client, user) == MissReason.ERASED
            assert rows[slot_of(path, domain_of(left))] in path.read_bytes()
        assert client.erase_tenant().blocks == 1
        assert not [row for row in rows.values() if row[76:124] in path.read_bytes()]


def test_a_damaged_slot_is_named_by_receipts_commands_and_lists_of_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data" / "keyring"
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            put(client, "ada")
        before = path.read_bytes()
        (session,) = (
            number
            for number in range((len(before) - 8192) // 128)
            if before[at(number)][4:5] == b"\3" and number != slot_of(path, domain_of("ada"))
        )
        node.stop()
        row = before[at(session)]
        write(path, {session: bytes((*row[:80], row[80] ^ 1, *row[81:]))})
        node.start()
        with Client(node.target) as client:
            client.session("ada", "second").append([key_of("ada")], tokens=1)
            assert [one.session for one in client.sessions("ada")] == ["second"]
            client.session("ada", "chat").append([key_of("ada")], tokens=1)
            assert got(client, "ada") == PAYLOAD
            assert main(["keys", "status", "--data", str(tmp_path / "data")]) == Status.NO
            assert "1 damaged" in capsys.readouterr().out
            assert main(["stats", "--node", node.target]) == Status.DONE
            assert "1 slot damaged" in capsys.readouterr().out.splitlines()[0]
        node.stop()
        write(path, {session: row})
        node.start()
        with Client(node.target) as client:
            assert {one.session for one in client.sessions("ada")} == {"chat", "second"}, "no label was lost"
        node.stop()
        write(path, {session: bytes((*row[:80], row[80] ^ 1, *row[81:]))})
        node.start()
        with Client(node.target) as client:
            erased = client.erase_user("bob")
            assert (erased.keys, erased.blocks, erased.sessions) == (0, 0, 0)
            said = json.loads(erased.receipt)
            assert (said["how"], said["unread_slots"], said["unread"]) == (
                "unreadable slots overwritten",
                1,
                str(session),
            )
            assert json.loads(client.erase_user("eve").receipt)["how"] == "nothing was stored"
            erased = client.erase_user("ada")
            assert (erased.blocks, erased.sessions) == (1, 2), "a session without a label goes as well"


def test_blocks_of_an_erased_user_are_removed_even_if_their_slot_was_damaged(tmp_path: Path) -> None:
    path = tmp_path / "data" / "keyring"
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            client.put_inline(key_of("ada"), PAYLOAD, domain=domain_of("ada"))  # which no session names
            put(client, "bob")
        node.stop()
        number = slot_of(path, domain_of("ada"))
        row = path.read_bytes()[at(number)]
        write(path, {number: bytes((*row[:80], row[80] ^ 1, *row[81:]))})
        node.start()
        with Client(node.target) as client:
            erased = client.erase_user("ada")
            assert (erased.blocks, erased.sessions, erased.keys) == (1, 0, 0)
            assert json.loads(erased.receipt)["unread"] == str(number)
            assert path.read_bytes()[at(number)].startswith(b"GONE")
            assert got(client, "ada") != PAYLOAD
            assert got(client, "bob") == PAYLOAD


def test_an_erasure_finds_the_blocks_of_a_lost_slot_and_spares_those_of_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data" / "keyring"
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            for user in ("ada", "bob", "eve"):
                client.put_inline(key_of(user), PAYLOAD, domain=domain_of(user))
        node.stop()
        numbers = {user: slot_of(path, domain_of(user)) for user in ("ada", "bob")}
        rows = {number: path.read_bytes()[at(number)] for number in numbers.values()}
        write(path, dict.fromkeys(rows, bytes(128)))
        node.start()
        with Client(node.target) as client:
            assert got(client, "ada") == got(client, "bob") == MissReason.UNREADABLE
            said = json.loads(client.erase_user("ada").receipt)
            assert (said["how"], said["blocks"], said["overwritten"]) == ("overwritten", 1, 1)
            assert (said["keys"], said["lost_slots"], "unread" in said) == (0, 2, False)
            assert got(client, "bob") == MissReason.UNREADABLE
            said = json.loads(client.erase_user("eve").receipt)
            assert (said["how"], said["keys"], said["lost_slots"]) == ("keys destroyed", 1, 2)
        node.stop()
        write(path, rows)
        node.start()
        with Client(node.target) as client:
            assert got(client, "bob") == PAYLOAD
            assert got(client, "ada") == MissReason.UNKNOWN


def test_only_observers_see_keys(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        "\n".join(
            f'[{name}]\ntokens_sha256 = ["{token_digest(name)}"]\n{more}'
            for name, more in (("acme", ""), ("watch", "observer = true\n"))
        )
    )
    key = tmp_path / "master.key"
    new_master_file(key)
    more = ["--master-key", f"file:{key}", "--tenants", str(tenants)]
    node = NodeProcess(tmp_path / "data", capacity="64MiB", arguments=more)
    try:
        for name in ("acme", "watch"):
            with Client(node.target, token=name) as client:
                told = client.status()
            assert told.encrypted
            assert bool(told.master_key) is bool(told.keys) is (name == "watch")
    finally:
        node.stop()


def test_a_damaged_tenant_key_stops_no_put(tmp_path: Path) -> None:
    path = tmp_path / "data" / "keyring"
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            client.put_inline(block_key(b"one"), PAYLOAD, domain=SHARED)
            put(client, "ada")
        node.stop()
        raw = path.read_bytes()
        (own,) = (one for one in range((len(raw) - 8192) // 128) if raw[at(one)][:5] == b"LIVE\2")
        row = raw[at(own)]
        write(path, {own: bytes((*row[:80], row[80] ^ 1, *row[81:]))})
        node.start()
        with Client(node.target) as client:
            assert got(client, "ada") == MissReason.UNREADABLE
            client.put_inline(block_key(b"two"), PAYLOAD, domain=SHARED)
            client.put_inline(key_of("bob"), PAYLOAD, domain=domain_of("bob"))
            assert got(client, "bob") == PAYLOAD
            client.erase_tenant()
            assert got(client, "bob") == MissReason.ERASED
            assert not client.erase_tenant().blocks
            put(client, "ada")
            assert got(client, "ada") == PAYLOAD


def test_users_can_see_whether_a_node_encrypts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for encrypted, line in (
        (False, "off: stored data is in the clear"),
        (True, "on, 4 keys, sealed with"),
    ):
        folder = tmp_path / str(encrypted)
        folder.mkdir()
        with node_of(folder, encrypted=encrypted) as node:
            with Client(node.target) as client:
                if encrypted:
                    put(client, "ada")
                told = client.status()
            assert bool(told.master_key) is told.encrypted is encrypted
            assert main(["stats", "--node", node.target]) == Status.DONE
            assert line in capsys.readouterr().out.splitlines()[0]
            assert main(["top", "--node", node.target, "--once", "--interval", "0.1"]) == Status.DONE
            assert line in capsys.readouterr().out.splitlines()[-1]
            assert (
                main(["top", "--node", node.target, "--once", "--interval", "0.1", "--json"]) == Status.DONE
            )
            assert json.loads(capsys.readouterr().out)["encryption"]["on"] is encrypted
            main(["doctor", "--node", node.target])
            assert line in capsys.readouterr().out
