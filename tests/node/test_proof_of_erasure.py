"""Everything that a node keeps of a user, anywhere, before and after an erasure."""

from __future__ import annotations

import os
import shutil
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.durability import Durability
from kvstore.miss import MissReason
from kvstore.names import block_key, domain_of, in_domain
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_state import read_status
from kvstore.sealing.masters import open_master
from kvstore.sealing.slots import State
from nic_offload.memory import allocate
from tests.conftest import small_client
from tests.node.memory_image import mappings_of, search
from tests.node.test_erasing_service import files_with, node_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZE, COUNT = 40_000, 24
SAID = b"-- what they said to the model: "
TENANT, ADA, BOB = "a-tenant-of-17", "ada-lovelace-1815", "bob-of-nowhere"
CHAT = "chat-about-the-engine"
WAIT_S = 30
EXACT, WRONG = "exact", "wrong"  # no bool: True is equal to MissReason.UNKNOWN
WORDS = [SAID + name.encode() for name in (ADA, BOB)]
NAMES = [name.encode() for name in (TENANT, ADA, BOB, CHAT)]


def key_of(user: str, number: int) -> bytes:
    return in_domain(block_key(b"model", number.to_bytes(4, "little")), domain_of(user))


def payload(user: str) -> bytes:
    said = SAID + user.encode()
    return (said * (SIZE // len(said) + 1))[:SIZE]


def put(client: Client, user: str, first: int = 0) -> list[str]:
    """Put blocks and append them to a session; returns the refused ones."""
    refused: list[str] = []
    with allocate(SIZE * COUNT) as memory, client.register(memory) as region:
        memory[: SIZE * COUNT] = payload(user) * COUNT
        blocks = [
            Block(key_of(user, first + number), region, SIZE * number, SIZE, domain=domain_of(user))
            for number in range(COUNT)
        ]
        for durability, some in ((Durability.SYNCED, blocks[::2]), (Durability.WRITTEN, blocks[1::2])):
            results = client.put(some, durability=durability)
            refused += [str(one.error) for one in results if one.error is not None]
    keys = [key_of(user, first + number) for number in range(COUNT)]
    if not refused:
        client.session(user, CHAT).append(keys, tokens=COUNT)
    return refused


def got(client: Client, user: str) -> set[str | MissReason]:
    with allocate(SIZE * COUNT) as memory, client.register(memory) as region:
        blocks = [Block(key_of(user, number), region, SIZE * number, SIZE) for number in range(COUNT)]
        found: set[str | MissReason] = set()
        for number, one in enumerate(client.get(blocks)):
            whole = memory[SIZE * number : SIZE * (number + 1)] == payload(user)
            found.add((EXACT if whole else WRONG) if isinstance(one, Hit) else one.reason)
        return found


def keys_of(folder: Path, user: str) -> list[bytes]:
    """The keys of a user that the keyring has now, and the record keys derived from them."""
    path = folder / "copied"
    shutil.copy(folder / "data" / "keyring", path)
    master = open_master(f"file:{folder}/master.key")
    keyring = Keyring.open(path, master, read_status(path).store_uuid)
    master.close()
    keys = []
    for numbers in keyring._slots.live_where():
        for number in numbers:
            slot = keyring._slots.read(number)
            if slot is None or slot.state != State.LIVE or slot.domain != domain_of(user):
                continue
            key = keyring.by_number(number, slot.id)
            assert key is not None
            with key:
                keys.append(bytes(key.key))
    keyring.close()
    path.unlink()
    return keys + [
        blake2b(salt, key=key, digest_size=32, person=b"tkv record").digest()
        for key in keys
        for salt in salts_in((folder / "data" / "drive-0.kv").read_bytes())
    ]


def salts_in(drive: bytes) -> set[bytes]:
    pages = range(0, len(drive), 4096)
    return {drive[at + 48 : at + 64] for at in pages if drive[at : at + 8] == b"TKVSEALD"}


def own_keys(folder: Path) -> list[bytes]:
    """The root key, and the keys of the store and its tenants."""
    path = folder / "copied"
    shutil.copy(folder / "data" / "keyring", path)
    master = open_master(f"file:{folder}/master.key")
    keyring = Keyring.open(path, master, read_status(path).store_uuid)
    master.close()
    keys = [bytes(keyring._root), bytes(keyring.store_key), *map(bytes, keyring._unsealed.values())]
    keyring.close()
    path.unlink()
    return keys


def restore(data: Path, copy: Path) -> None:
    shutil.rmtree(data)
    shutil.copytree(copy, data)


def copied(data: Path, copy: Path) -> Path:
    shutil.copytree(data, copy, ignore=lambda _, names: [name for name in names if name == "control"])
    return copy


@pytest.mark.skipif(os.geteuid() != 0, reason="reads another process's memory: run as root")
def test_nothing_of_a_user_is_left_in_drive_index_logs_history_core_dump_or_swap(tmp_path: Path) -> None:
    """After puts: no plaintext in any file, nor in a core dump. After an erasure: no way to recover it."""
    data, dump = tmp_path / "data", tmp_path / "put.drive"
    with node_of(tmp_path, encrypted=True) as node:
        node.stop()
        node.arguments = [*node.arguments, "--audit", str(tmp_path / "audit.jsonl")]
        node.start()
        with Client(node.target, tenant=TENANT) as client:
            for user in (ADA, BOB):
                assert put(client, user) == []
                assert got(client, user) == {EXACT}

        # After puts: files, and memory as a core dump has it.
        for word in [*WORDS, *NAMES]:
            assert files_with(data, word) == [], word
        for word in [*WORDS, *NAMES[1:]]:  # the log and the audit log name tenants
            assert files_with(tmp_path, word) == [], word
        hers = keys_of(tmp_path, ADA)
        assert len(hers) >= 2
        for word, where in search(node.pid, WORDS).items():
            assert not [one for one in where if one.is_dumped], word
        live = copied(data, tmp_path / "live")
        node.stop()
        before = copied(data, tmp_path / "before")
        node.start()
        with Client(node.target, tenant=TENANT) as client:
            assert got(client, ADA) == {EXACT}
            assert put(client, ADA, first=COUNT) == []  # the last that a lane encrypts
        with Client(node.target, tenant=TENANT) as client:
            hers = [*hers, *keys_of(tmp_path, ADA)]
            assert client.erase_user(ADA).blocks == 2 * COUNT
            assert got(client, ADA) == {MissReason.ERASED}

            # After the erasure: all of the node's memory, what may be swapped of it, and all files.
            assert search(node.pid, [*hers, WORDS[0]]) == {}
            for key, where in search(node.pid, [*keys_of(tmp_path, BOB), *own_keys(tmp_path)]).items():
                assert not [one for one in where if one.is_dumped or not one.is_locked], key.hex()
            assert got(client, BOB) == {EXACT}
        shutil.copy(data / "keyring", dump)
        for word in [*hers, *WORDS, *NAMES]:
            assert files_with(data, word) == [], word
        assert keys_of(tmp_path, ADA) == []

        # An older index and drive, with the keyring as it was backed up after the erasure.
        node.kill()
        for copy in (live, before):
            restore(data, copy)
            shutil.copy(dump, data / "keyring")
            node.start()
            with Client(node.target, tenant=TENANT) as client:
                assert got(client, ADA) == {MissReason.ERASED}
                assert not list(client.sessions(ADA)), "the index of that time has one"
                assert got(client, BOB) == {EXACT}
                assert [one.session for one in client.sessions(BOB)] == [CHAT]
            node.kill()
        restore(data, before)
        shutil.copy(dump, data / "keyring")
        shutil.rmtree(data / "index-0")
        node.start()
        with Client(node.target, tenant=TENANT) as client:
            assert got(client, ADA) == {MissReason.ERASED}, "the index is built from what can be opened"
            assert not list(client.sessions(ADA))
            assert got(client, BOB) == {EXACT}


def put_reserved(client: Client, user: str, count: int) -> None:
    """Put blocks into leased slots, from which the node's Python writes."""
    with allocate(SIZE * count) as memory, client.register(memory) as region:
        memory[: SIZE * count] = payload(user) * count
        keys = [
            in_domain(block_key(b"reserved", bytes([number])), domain_of(user)) for number in range(count)
        ]
        blocks = [Block(key, region, SIZE * at, SIZE, domain=domain_of(user)) for at, key in enumerate(keys)]
        client.reserve(blocks).arm(None).wait(WAIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="reads another process's memory: run as root")
@pytest.mark.parametrize("way", [put, put_reserved])
def test_nothing_of_a_user_stays_in_the_landing_memory_of_connected_clients(
    tmp_path: Path, way: Callable[[Client, str, int], object]
) -> None:
    with node_of(tmp_path, encrypted=True) as node, small_client(node.target, tenant=TENANT) as client:

        def is_there() -> bool:
            return any(not one.is_dumped for one in search(node.pid, WORDS[:1]).get(WORDS[0], []))

        way(client, ADA, 7)
        assert is_there()
        erased = client.erase_user(ADA)
        assert erased.blocks
        assert not is_there()


@pytest.mark.skipif(os.geteuid() != 0, reason="reads another process's memory: run as root")
def test_memory_for_blocks_and_keys_is_in_no_core_dump(tmp_path: Path) -> None:
    """Also what Python allocates for records in flight, and to search a drive for unencrypted records."""
    with node_of(tmp_path, encrypted=True) as node, Client(node.target, tenant=TENANT) as client:
        assert put(client, ADA) == []
        blocks = [one for one in mappings_of(node.pid) if "/memfd:triggerkv" in one.what]
        assert blocks
        assert not [one for one in blocks if one.is_dumped]
        keys = search(node.pid, [*keys_of(tmp_path, ADA)[:1], *own_keys(tmp_path)])
        assert len(keys) >= 3
        assert all(not one.is_dumped and one.is_locked for where in keys.values() for one in where)
