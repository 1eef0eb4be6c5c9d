"""Erasures while clients put and get, on two drives at once, and beside another node with the same master key."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import pytest

from kvstore.client import Block, Client, Stored
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.errors import BeingErased, DeadlineExceeded, KvError, Overloaded, ReadOnly, StorageError
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, block_key, domain_of, in_domain
from kvstore.node.audit import Audit
from kvstore.node.erasing_service import _Erasure
from kvstore.sealing.masters import new_master_file
from kvstore.sealing.store_keys import keys_opener
from kvstore.storage.items import SessionItem
from kvstore.storage.store import Store
from kvstore.storage.uring import UringDisk
from nic_offload.receiver import Room, packed_rooms
from tests.conftest import small_client
from tests.node.in_process import NodeInProcess, kept_in
from tests.node.test_encrypting import clear_bytes
from tests.node.test_erasing_service import files_with, node_of
from tests.node.test_proof_of_erasure import ADA, BOB, COUNT, EXACT, SIZE, WORDS, WRONG, got, put

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.storage.index import Name
    from kvstore.storage.manifests import SessionName
    from kvstore.storage.sealing import OpenKeys

READERS = 2


class Load:
    """Clients that get two users' blocks, and one that puts more of the first user's, until stopped."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stop = threading.Event()
        self.rounds: list[tuple[float, set[str | MissReason], set[str | MissReason]]] = []
        self.errors: list[Exception] = []
        self.refused: set[str] = set()
        self._threads = [threading.Thread(target=self._read) for _ in range(READERS)]
        self._threads.append(threading.Thread(target=self._write))

    def _read(self) -> None:
        try:
            with Client(self._target) as client:
                while not self._stop.is_set():
                    began = time.monotonic()
                    self.rounds.append((began, got(client, ADA), got(client, BOB)))
        except Exception as error:  # noqa: BLE001 - the test shows it
            self.errors.append(error)

    def _write(self) -> None:
        first = COUNT
        try:
            with Client(self._target) as client:
                while not self._stop.is_set():
                    try:
                        self.refused.update(put(client, ADA, first))
                    except KvError:  # blocks or a session were erased between a put and the turn of it
                        time.sleep(0.01)
                    first += COUNT
        except Exception as error:  # noqa: BLE001 - the test shows it
            self.errors.append(error)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_for(load: Load, rounds: int) -> None:
    until, wanted = time.monotonic() + 60, len(load.rounds) + rounds
    while len(load.rounds) < wanted and time.monotonic() < until:
        time.sleep(0.01)
    assert len(load.rounds) >= wanted, load.errors


@pytest.mark.parametrize("drives", [1, 2])
def test_a_user_erased_under_load_stays_erased_and_others_are_unaffected(tmp_path: Path, drives: int) -> None:
    more = [] if drives == 1 else ["--drive", f"{tmp_path}/second.kv:64MiB"]
    with node_of(tmp_path, encrypted=True) as node:
        node.stop()
        node.arguments = [*node.arguments, *more]
        node.start()
        with Client(node.target) as client:
            for user in (BOB, ADA):
                assert put(client, user) == []
            assert len([one for one in client.status().drives if one.blocks]) == drives
            with Load(node.target) as load:
                wait_for(load, 4)
                erased = client.erase_user(ADA)
                answered = time.monotonic()
                wait_for(load, 8)
            assert load.errors == []
            assert load.refused <= {str(BeingErased())}
            assert {EXACT} not in [hers for began, hers, _ in load.rounds if began > answered]
            assert all(
                hers <= {EXACT, MissReason.ERASED} for began, hers, _ in load.rounds if began < answered
            )
            assert {WRONG} not in [hers for _, hers, _ in load.rounds]
            assert all(of_other == {EXACT} for _, _, of_other in load.rounds)
            said = json.loads(erased.receipt)
            assert said["drives"] == ",".join(map(str, range(drives)))
            assert said["bytes"] == erased.size_bytes >= COUNT * SIZE
            assert said["keys"] == erased.keys == len(said["key_ids"].split(","))
            assert said["blocks"] == erased.blocks >= COUNT
        node.kill()
        node.start()
        with Client(node.target) as client:
            assert EXACT not in got(client, ADA) - {MissReason.ERASED, MissReason.UNKNOWN}
            assert got(client, BOB) == {EXACT}
        for word in WORDS:
            assert files_with(tmp_path, word) == []


def test_two_nodes_with_one_master_key_share_no_key_and_an_erasure_affects_one_node(tmp_path: Path) -> None:
    """The same blocks of the same user: no file of one node opens at the other, or resembles its file."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    with node_of(one, encrypted=True) as first:
        (two / "master.key").write_bytes((one / "master.key").read_bytes())
        (two / "master.key").chmod(0o600)
        with node_of(two, encrypted=True) as second:
            with Client(first.target) as client, Client(second.target) as other:
                assert put(client, ADA) == put(other, ADA) == []
                ours, theirs = (encrypted_pages(folder) for folder in (one, two))
                assert len(ours) >= COUNT
                assert not ours & theirs
                assert client.erase_user(ADA).blocks == COUNT
                assert got(client, ADA) == {MissReason.ERASED}
                assert got(other, ADA) == {EXACT}
            first.stop()
            second.stop()
            (one / "data" / "keyring").write_bytes((two / "data" / "keyring").read_bytes())
            with pytest.raises(KvError, match="keyring is of store"):
                first.start()
            second.start()
            with Client(second.target) as other:
                assert got(other, ADA) == {EXACT}


def encrypted_pages(folder: Path) -> set[bytes]:
    """All pages of a drive that are not zero."""
    drive = (folder / "data" / "drive-0.kv").read_bytes()
    pages = {drive[at : at + 4096] for at in range(0, len(drive), 4096)}
    return pages - {bytes(4096)}


def test_concurrent_erasures_are_acknowledged_only_once_everything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, over = threading.Event(), threading.Event()
    blocks_of = _Erasure.blocks_of

    async def slow(self: _Erasure, domain: bytes | None) -> None:
        if not held.is_set():
            held.set()
            await asyncio.sleep(1)
            over.set()
        await blocks_of(self, domain)

    monkeypatch.setattr(_Erasure, "blocks_of", slow)
    with NodeInProcess(tmp_path) as node, small_client(node.target) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.erase_user, "ada")
        assert held.wait(20)
        client.erase_user("ada")
        assert over.is_set()
        first.result(20)


def made_opener(folder: Path) -> OpenKeys | None:
    """A function that opens the keys of a node in this folder, with a new master key if there is none."""
    path = folder / "master.key"
    if not path.exists():
        new_master_file(path)
    return keys_opener(folder / "data", f"file:{path}")


def test_a_receipt_counts_what_a_client_requests_during_the_erasure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = domain_of(ADA)
    keys = [in_domain(block_key(b"count", bytes([number])), domain) for number in range(COUNT)]
    held, over = threading.Event(), threading.Event()
    blocks_of = _Erasure.blocks_of

    async def slow(self: _Erasure, domain: bytes | None) -> None:
        held.set()
        await asyncio.to_thread(over.wait, 20)
        await blocks_of(self, domain)

    monkeypatch.setattr(_Erasure, "blocks_of", slow)
    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        small_client(node.target) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for key in keys:
            client.put_inline(key, key, domain=domain)
        erasure = pool.submit(client.erase_user, ADA)
        assert held.wait(20)
        missed = [client.get_inline(key, length=len(key)) for key in keys[::2]]
        over.set()
        assert erasure.result(20).blocks == COUNT
        assert {one.reason for one in missed if isinstance(one, Miss)} == {MissReason.ERASED}
        assert len(missed) == COUNT // 2


def test_a_block_that_a_session_names_during_the_erasure_is_removed_before_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody would find it if the node died in between, on a node without keys, which names no domain."""
    keys = [block_key(b"named meanwhile", bytes([number])) for number in range(3)]
    held, over = threading.Event(), threading.Event()
    only_in, stored = _Erasure._only_in, []

    async def slow(self: _Erasure, name: SessionName) -> list[Name]:
        found = await only_in(self, name)
        held.set()
        await asyncio.to_thread(over.wait, 20)
        return found

    monkeypatch.setattr(_Erasure, "_only_in", slow)
    with (
        NodeInProcess(tmp_path / "data") as node,
        small_client(node.target) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def removal(name: SessionName, *rest: Any, **more: Any) -> SessionItem:
            stored.append(node.node.store.lookup([(name.tenant, key) for key in keys]))
            return SessionItem(name, *rest, **more)

        monkeypatch.setattr("kvstore.node.erasing_service.SessionItem", removal)
        for key in keys:
            client.put_inline(key, key)
        session = client.session(ADA, "chat")
        session.append(keys[:2], tokens=1)
        erasure = pool.submit(client.erase_user, ADA)
        assert held.wait(20)
        session.append(keys[2:], tokens=1)
        over.set()
        assert erasure.result(20).blocks == len(keys)
        assert stored == [[None] * len(keys)]


def test_an_erasure_on_a_failed_drive_fails_and_still_nothing_of_it_is_served(tmp_path: Path) -> None:
    """Neither from memory nor from the drive; blocks of others are."""
    keys = {
        user: [in_domain(block_key(b"failed", bytes([number])), domain_of(user)) for number in range(COUNT)]
        for user in (ADA, BOB)
    }

    def got_inline(client: Client, user: str) -> list[bytes | MissReason]:
        found = [client.get_inline(key, length=len(key)) for key in keys[user]]
        return [one.reason if isinstance(one, Miss) else one for one in found]

    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        small_client(node.target) as client,
    ):
        for user in (ADA, BOB):
            for key in keys[user]:
                client.put_inline(key, key, domain=domain_of(user))
        client.session(ADA, "chat").append(keys[ADA], tokens=1)
        for key in keys[ADA][::2]:
            assert client.get_inline(key, length=len(key)) == key, "in memory from now on"
        node.call(lambda node: node.store.drives[0]._writes.stop(ReadOnly("It failed."), 0))
        for _ in range(2):
            with pytest.raises(ReadOnly):
                client.erase_user(ADA)
            assert set(got_inline(client, ADA)) == {MissReason.ERASED}
        assert got_inline(client, BOB) == keys[BOB]
    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        small_client(node.target) as client,
    ):
        said = json.loads(client.erase_user(ADA).receipt)
        assert (said["keys"], said["earlier_keys"]) == (0, 2), "the receipt comes when the drive is back"
        assert got_inline(client, BOB) == keys[BOB]


def test_erasing_an_unknown_user_leaves_unencrypted_blocks(tmp_path: Path) -> None:
    """A user without a key has no block; blocks without a key are other users'."""
    keys = [block_key(b"in the clear", bytes([number])) for number in range(40)]
    with node_of(tmp_path, encrypted=False) as node, Client(node.target) as client:
        client.put_many_inline((key, key * (1 << 15)) for key in keys)
        client.session("bob", "chat").append(keys, tokens=1)
    with node_of(tmp_path, encrypted=True) as node, Client(node.target) as client:
        assert client.erase_user("nobody at all").blocks == 0
        assert clear_bytes(tmp_path / "data") > 0, "it was not too late"
        assert {type(one) for one in client.exists(keys)} == {Stored}


def test_without_its_line_in_the_audit_log_there_is_no_receipt(tmp_path: Path) -> None:
    key = block_key(b"no receipt")
    with (
        NodeProcess(tmp_path / "data", capacity="64MiB", arguments=["--audit", "/dev/full"]) as node,
        Client(node.target) as client,
    ):
        client.put_inline(key, key)
        client.session("ada", "chat").append([key], tokens=1)
        with pytest.raises(StorageError, match="the audit log can't be written"):
            client.erase_user("ada")
        assert isinstance(client.exists([key])[0], Miss)


def mark_of(number: int) -> bytes:
    return b"MARK-%08d" % number


def test_blocks_put_during_an_erasure_are_removed_by_the_next_one(
    tmp_path: Path,
) -> None:
    """The node processes lanes' blocks later: with the key they were written with, not the domain's current one."""
    domain, left = domain_of(ADA), []
    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        Client(node.target) as other,
    ):
        for turn in range(12):
            stop, keys = threading.Event(), list[bytes]()

            def write(turn: int = turn, stop: threading.Event = stop, keys: list[bytes] = keys) -> None:
                with Client(node.target, slots=16, block_bytes_max=8192) as client:
                    region = client.register(bytearray(8192))
                    for number in count():
                        if stop.is_set():
                            return
                        key = in_domain(block_key(b"during", bytes([turn]), number.to_bytes(4)), domain)
                        (result,) = client.put([Block(key, region, 0, 8192, domain=domain)])
                        if result.error is None:
                            keys.append(key)

            writer = threading.Thread(target=write)
            writer.start()
            while len(keys) < 20 and writer.is_alive():
                time.sleep(0.001)
            other.erase_user(ADA)
            stop.set()
            writer.join(20)
            other.erase_user(ADA)
            found = [other.get_inline(key, length=8192) for key in keys]
            left += [one for one in found if not isinstance(one, Miss)]
    assert not left


def test_nothing_is_encrypted_with_a_new_key_while_a_user_is_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have the number of the destroyed key, and its blocks, taken for that key's, would not be overwritten."""
    domain = domain_of(ADA)
    key, later = (in_domain(block_key(name), domain) for name in (b"before", b"meanwhile"))
    held, over = threading.Event(), threading.Event()
    blocks_of = _Erasure.blocks_of

    async def slow(self: _Erasure, domain: bytes | None) -> None:
        held.set()
        await asyncio.to_thread(over.wait, 20)
        await blocks_of(self, domain)

    monkeypatch.setattr(_Erasure, "blocks_of", slow)
    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        small_client(node.target) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.put_inline(key, b"x" * 5000, domain=domain)
        erasure = pool.submit(client.erase_user, ADA)
        assert held.wait(20)
        with pytest.raises(BeingErased, match="is being erased"):
            client.put_inline(later, b"y" * 5000, domain=domain)
        over.set()
        assert erasure.result(20).blocks == 1
        client.put_inline(later, b"y" * 5000, domain=domain)
        assert client.get_inline(later, 5000) == b"y" * 5000


@pytest.mark.parametrize("step", ["sessions", "blocks_of", "wipe_free_memory"])
def test_an_erasure_that_passes_its_deadline_is_acknowledged_only_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It stops before a step; the error says that it is not complete, and how to complete it."""
    never, noted, domain = asyncio.Event(), list[str](), domain_of(ADA)
    keys = [in_domain(block_key(bytes([number])), domain) for number in range(9)]
    note = Audit.note

    def noting(audit: Audit, what: str, **said: Any) -> bool:
        noted.append(what)
        return note(audit, what, **said)

    monkeypatch.setattr(Audit, "note", noting)
    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        small_client(node.target) as client,
    ):
        for key in keys:
            client.put_inline(key, WORDS[0] * 100, domain=domain)
        client.session(ADA, "chat").append(keys, tokens=1)
        with monkeypatch.context() as patch:
            patch.setattr(_Erasure, step, lambda *_: never.wait())
            with (
                small_client(node.target) as another,  # whose own calls wait for a moment then
                pytest.raises(DeadlineExceeded, match=r"not complete.*repeat the call"),
            ):
                another.erase_user(ADA, timeout_s=0.5)
        assert noted == [], "nothing is acknowledged"
        assert json.loads(client.erase_user(ADA).receipt)["earlier_keys"] == 2
        assert noted == ["erase-domain"]
        assert {one.reason for one in client.exists(keys) if isinstance(one, Miss)} == {MissReason.ERASED}
        assert list(client.sessions(ADA)) == []
        assert WORDS[0] not in node.call(lambda inside: bytes(inside.hot.view))
        client.put_inline(keys[0], b"again", domain=domain)
        assert client.get_inline(keys[0], 5) == b"again"


@pytest.mark.parametrize("is_leased", [False, True])
def test_landed_blocks_that_wait_for_a_full_store_are_erased_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_leased: bool
) -> None:
    """The store accepts no put before the erasure has ended. Those put by a grant are acknowledged as landed before."""
    domain = domain_of(ADA)
    key = in_domain(block_key(b"landed"), domain)
    is_full, refused = threading.Event(), threading.Event()
    store_put = Store.put

    def full(store: Store, items: Any, done: Any) -> None:
        if is_full.is_set():
            refused.set()
            raise Overloaded("The drive's queue is full.")
        store_put(store, items, done)

    monkeypatch.setattr(Store, "put", full)
    monkeypatch.setattr(UringDisk, "direct_fd", None)  # no lane: the store gets all
    with (
        NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node,
        small_client(node.target) as client,
        client.register(bytearray(WORDS[0] * 100)) as region,
    ):
        size = len(WORDS[0]) * 100
        client.put_inline(in_domain(block_key(b"before"), domain), b"x", domain=domain)
        is_full.set()
        blocks = [Block(key, region, 0, size, domain=domain)]
        if is_leased:
            armed = client.reserve(blocks, durability=Durability.LANDED).arm(None)
        else:
            armed = client.arm(blocks, None, durability=Durability.LANDED)
        assert refused.wait(20)
        assert is_leased or armed.wait(20)[0].error is None
        client.erase_user(ADA)
        assert not is_leased or isinstance(armed.wait(20)[0].error, BeingErased)
        assert isinstance(client.get_inline(key, size), Miss)
        is_full.clear()
        client.put_inline(block_key(b"later"), b"y", domain=SHARED)
        assert isinstance(client.get_inline(key, size), Miss)


def test_memory_granted_ahead_has_nothing_of_an_erased_user(tmp_path: Path) -> None:
    """Buffers for reads and puts: evicted blocks have left their bytes there."""
    domain, size = domain_of(ADA), 32 << 10
    with NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node:
        keys = [in_domain(block_key(b"mark", number.to_bytes(2)), domain) for number in range(32)]
        mark = mark_of(1) * (size // 13)
        with Client(node.target, slots=64, block_bytes_max=size) as client:
            region = client.register(bytearray(mark.ljust(size, b".")))
            blocks = [Block(key, region, 0, size, domain=domain) for key in keys]
            assert all(result.error is None for result in client.put(blocks))

            def evicted(inside: Any) -> None:
                pages = inside.hot.pages
                inside.catch_up()
                for piece in kept_in(inside):
                    pages.forget(piece)
                cold = inside.fabric_calls.cold
                inside.hot.shelf.take([0])
                while (piece := pages.take_unasked(9)) is not None and len(cold._rooms) < 200:
                    cold._rooms.add(piece)
                    inside.hot.shelf.feed(packed_rooms([Room(inside.hot.address(piece), 9, piece)]))

            node.call(evicted)
            assert mark_of(1) in node.call(lambda inside: bytes(inside.hot.view))
            client.erase_user(ADA)
            assert mark_of(1) not in node.call(lambda inside: bytes(inside.hot.view))


def test_a_user_that_creates_sessions_does_not_keep_the_erasure_from_ending(tmp_path: Path) -> None:
    stop, made = threading.Event(), list[int]()
    with NodeInProcess(tmp_path / "data", open_keys=made_opener(tmp_path)) as node:

        def write() -> None:
            with Client(node.target) as client:
                client.put_inline(block_key(b"shared"), b"x", domain=SHARED)
                for number in count():
                    if stop.is_set():
                        return
                    with suppress(KvError):
                        client.session(ADA, str(number)).append([block_key(b"shared")], tokens=1)
                        made.append(number)

        writer = threading.Thread(target=write)
        writer.start()
        while len(made) < 50 and writer.is_alive():
            time.sleep(0.01)
        try:
            with Client(node.target) as client:
                began = time.monotonic()
                assert client.erase_user(ADA).sessions > 0
                assert time.monotonic() - began < 20
        finally:
            stop.set()
            writer.join(20)
