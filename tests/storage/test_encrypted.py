"""A store with encrypted records: what its drive contains, who can read it, and what is left without a key."""

from __future__ import annotations

import os
import select
import shutil
import struct
import threading
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from kvstore.durability import Durability
from kvstore.errors import ReadOnly
from kvstore.miss import MissReason
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.fsck import check
from kvstore.storage.manifests import SessionName
from kvstore.storage.sealing import NO_DOMAIN
from nic_offload import aead
from tests.storage.fake_keys import FakeKeyring, FakeKeys
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.rig import FINGERPRINT, TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.errors import StorageError

MARK = b"what the user said, word by word"


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.keyring = FakeKeyring()
    rig.open()
    yield rig
    rig.store.close()


@pytest.fixture
def real_sealed(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data")
    rig.keyring = FakeKeyring()
    rig.open()
    yield rig
    rig.store.close()


def reopened(rig: StoreRig, *, scanned: bool = False) -> None:
    rig.store.close()
    if rig.disk is not None:
        rig.disk = FakeDisk(rig.disk.pages)
    if scanned:
        shutil.rmtree(rig.data / "index-0")
    rig.open()


def domain(number: int) -> bytes:
    return b"domain %9d" % number


def records_of(drive: bytes, ring: FakeKeyring) -> dict[tuple[bytes, bytes], tuple[int, bytes]]:
    """Read all encrypted records of a drive by docs/record-format.md: (tenant, key) -> kind and payload."""
    drive_uuid, found = drive[32:48], {}
    keys = {name.number: (name.id, secret) for name, secret in ring.keys.values()}
    for at in range(0, len(drive), 4096):
        fixed, tag = drive[at : at + 104], drive[at + 104 : at + 120]
        where = drive_uuid + struct.pack("<Q", at)
        if fixed[:8] != b"TKVSEALD":
            continue
        if blake2b(where + fixed, digest_size=16, key=ring.header_secret).digest() != tag:
            continue
        version, kind, length, generation = struct.unpack_from("<HHIQ", fixed, 8)
        number, key_id, salt, payload_tag = struct.unpack_from("<I4xQ16s16s", fixed, 32)
        assert version == 1
        assert not any(fixed[36:40] + fixed[80:])
        if keys.get(number, (0, b""))[0] != key_id:
            continue
        record_key = blake2b(salt, digest_size=32, key=keys[number][1], person=b"tkv record").digest()
        place, nonce = where + fixed[:24] + fixed[32:64], struct.pack("<Q", generation)
        identity = aead.unseal(
            record_key, nonce + b"\2\0\0\0", place + payload_tag, drive[at + 120 : at + 208]
        )
        name_key, tenant, _, crc = struct.unpack("<32s16s16sI4x", identity)
        payload = bytes(
            aead.unseal(
                record_key, nonce + b"\1\0\0\0", place, drive[at + 4096 : at + 4096 + length] + payload_tag
            )
        )
        assert crc32c(payload) == crc
        assert not any(drive[at + 208 : at + 4096])
        found[tenant, name_key] = kind, payload
    return found


@pytest.mark.parametrize("is_made", [False, True])
def test_no_manifest_overtakes_chunks_that_wait_for_their_key(
    sealed: StoreRig, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    """The key may be available by then. A manifest once named a chunk at the superblock, which was then overwritten."""
    rig, count = sealed, 300
    for number in range(count):
        assert rig.put(number, b"x", domain=USER).error is None
    assert rig.append(1, range(10)).error is None
    assert rig.keyring is not None
    rig.keyring.erase(TENANT, USER)
    if is_made:
        ring, ensure = rig.keyring, FakeKeys.ensure

        def made(
            keys: FakeKeys, tenant: bytes, domain: bytes, then: Callable[[StorageError | None], None]
        ) -> None:
            ring.make(tenant, domain)
            ensure(keys, tenant, domain, then)

        monkeypatch.setattr(FakeKeys, "ensure", made)
    assert rig.append(1, range(10, count)).error is None
    stored = rig.store.manifests.get(SessionName(TENANT, USER, name(1)))
    assert stored is not None
    drive = rig.store.drives[0]
    places = {key: place for _, key, place, _ in drive.manifests.all_chunks()}
    generations = [places[one].generation for one in stored.manifest.chunks]
    assert generations
    assert all(0 < one < stored.place.generation for one in generations)
    assert rig.session(1) == list(range(count))
    assert rig.disk is not None
    before = bytes(rig.disk.pages[0])
    assert rig.remove(1).error is None
    assert bytes(rig.disk.pages[0]) == before


def test_a_stranger_with_the_keys_reads_the_stores_records(real_sealed: StoreRig) -> None:
    rig, expected = real_sealed, {}
    for number, size in enumerate([1, 4096, 5000, 50_000, 4095, 12_288]):
        expected[TENANT, key(number)] = 1, os.urandom(size)
        assert rig.put(number, expected[TENANT, key(number)][1], domain=domain(number % 3)).error is None
    assert rig.append(1, range(6), label="a label").error is None
    rig.store.close()
    assert rig.keyring is not None
    found = records_of((rig.data / "drive-0.kv").read_bytes(), rig.keyring)
    assert {name: one for name, one in found.items() if one[0] == 1} == expected
    (session,) = [payload for kind, payload in found.values() if kind == 2]
    assert session.startswith(USER)
    assert session.endswith(b"a label")
    assert (TENANT, USER) in rig.keyring.keys
    rig.open()


def test_no_payload_key_or_label_is_on_the_drive_in_the_clear(real_sealed: StoreRig) -> None:
    rig = real_sealed
    for number in range(20):
        assert rig.put(number, MARK * (1 + 40 * number), expires_ms=0).error is None
    rig.append(1, range(20), label="a label of hers")
    assert rig.get(3)[1] == MARK * 121
    rig.store.close()
    drive = (rig.data / "drive-0.kv").read_bytes()
    for secret in (MARK, b"a label of hers", TENANT, USER, FINGERPRINT):
        assert secret not in drive
    for file in (rig.data / "index-0").iterdir():
        assert MARK not in file.read_bytes()
    rig.open()


@pytest.mark.parametrize("scanned", [False, True])
def test_blocks_are_readable_after_a_restart(sealed: StoreRig, *, scanned: bool) -> None:
    for number in range(12):  # more domains than the vault has places
        assert sealed.put(number, MARK * (number + 1), domain=domain(number)).error is None
    sealed.append(1, range(12))
    for _ in range(2):
        reopened(sealed, scanned=scanned)
        assert [sealed.get(number)[1] for number in range(12)] == [MARK * (n + 1) for n in range(12)]
        assert sealed.session(1) == list(range(12))
    assert sealed.keyring is not None
    assert sealed.disk is not None
    sealed.store.close()
    source, open_keys = FakeDrives([FakeDisk(sealed.disk.pages)]), sealed.keyring.open
    report = check(sealed.data, source=source, boot_id=sealed.boot_id, payloads=True, open_keys=open_keys)
    assert report.damage == []
    sealed.disk = FakeDisk(sealed.disk.pages)
    sealed.open()


def test_a_get_leaves_erased_blocks_to_the_erasure_that_counts_them(sealed: StoreRig) -> None:
    assert sealed.keyring is not None
    for number in (0, 1):
        assert sealed.put(number, MARK, Durability.SYNCED, domain=domain(1)).error is None
    sealed.keyring.erase(TENANT, domain(1))
    assert isinstance(sealed.store.keys, FakeKeys)
    for number in (0, 1):
        sealed.store.keys.vault.drop(number)
    with sealed.store.erasing(TENANT):
        with sealed.store.erasing(TENANT):
            assert sealed.get_miss(0)
        miss = sealed.get(0)[0].miss
        assert miss is not None
        assert miss.reason is MissReason.ERASED
        assert sealed.delete(0).found
    assert sealed.get_miss(1)
    assert not sealed.delete(1).found, "nobody else will"


@pytest.mark.parametrize("how", ["at once", "reopened", "scanned"])
def test_when_a_key_is_destroyed_exactly_its_blocks_are_erased(sealed: StoreRig, how: str) -> None:
    for number in range(4):
        assert sealed.put(number, MARK, Durability.SYNCED, domain=domain(number % 2)).error is None
    sealed.append(1, range(4))
    assert sealed.keyring is not None
    sealed.keyring.erase(TENANT, domain(1))
    sealed.keyring.erase(TENANT, USER)
    store_keys = sealed.store.keys
    assert isinstance(store_keys, FakeKeys)
    store_keys.vault.drop(0)
    store_keys.vault.drop(1)
    store_keys.vault.drop(2)
    store_keys.vault.drop(3)
    if how != "at once":
        reopened(sealed, scanned=how == "scanned")
    done = [sealed.get(number) for number in range(4)]
    assert [got for _, got in done if got] == [MARK, MARK]
    for number in (1, 3):
        miss = done[number][0].miss
        assert miss is not None
        assert miss.reason is (MissReason.UNKNOWN if how == "scanned" else MissReason.ERASED)
        again = sealed.get(number)[0].miss
        assert again is not None
        assert again.reason is miss.reason
    assert sealed.put(1, b"something new", domain=domain(1)).error is None, "under a key of its own"
    assert sealed.get(1)[1] == b"something new"
    if how == "scanned":
        assert sealed.session(1) is None, "its user's manifest can't be read"


def test_a_store_that_starts_to_encrypt_has_both_kinds_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encrypting, "step", lambda _: None)  # what was in the clear stays so
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.put(1, MARK)
    rig.append(1, [1])
    rig.keyring = FakeKeyring()
    reopened(rig)
    rig.put(2, MARK * 2)
    rig.append(1, [2])
    for scanned in (False, True):
        reopened(rig, scanned=scanned)
        assert (rig.get(1)[1], rig.get(2)[1]) == (MARK, MARK * 2)
        assert rig.session(1) == [1, 2]
        assert [
            entry.domain > 0 for entry in rig.store.lookup([(TENANT, key(1)), (TENANT, key(2))]) if entry
        ] == [
            False,
            True,
        ]
    rig.store.close()


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("bit", [8 * 65, 8 * 130, 8 * 4095 + 7])
def test_a_flipped_bit_is_a_miss_and_never_bytes(sealed: StoreRig, page: int, bit: int) -> None:
    payload = os.urandom(2 * 4096)
    sealed.put(1, payload)
    (entry,) = sealed.store.lookup([(TENANT, key(1))])
    assert entry is not None
    disk = sealed.disk
    assert disk is not None
    at = entry.offset // 4096 + page
    changed = bytearray(disk.pages[at])
    changed[bit // 8] ^= 1 << bit % 8
    disk.pages[at] = bytes(changed)
    done, got = sealed.get(1)
    if page == 0 and bit == 8 * 4095 + 7:  # behind what is used of the header's page
        assert got == payload
    else:
        assert got == b""
        assert done.miss is not None
        assert done.miss.reason is MissReason.CORRUPT


def test_a_longer_expiry_is_written_into_an_encrypted_header(sealed: StoreRig) -> None:
    now = sealed.clock.now_ms
    sealed.put(1, MARK, expires_ms=now + 1000)
    assert sealed.put(1, MARK, expires_ms=now + 5000).error is None
    for scanned in (False, True):
        reopened(sealed, scanned=scanned)
        (entry,) = sealed.store.lookup([(TENANT, key(1))])
        assert entry is not None
        assert entry.expires_ms == now + 5000
        assert sealed.get(1)[1] == MARK


def test_a_slot_stays_unencrypted_for_its_reader(sealed: StoreRig) -> None:
    """The slot of a put is also the copy in memory that is sent to others."""
    tag = sealed.start_put(1, MARK)
    slot = sealed._slot_of[tag]
    sealed.settle()
    before = bytes(sealed.slots.memory)
    assert MARK in before
    assert slot


class Reluctant(FakeKeys):
    """Keys that can't be made."""

    error: StorageError | None = ReadOnly("The keyring can't be written.")

    def settle_finished(self) -> None:
        finished, self._finished = self._finished, []
        for _, _, then in finished:
            then(self.error)


def test_a_put_whose_domain_gets_no_key_fails_and_writes_nothing(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    ring = FakeKeyring()
    rig.keyring = ring
    ring.open = lambda *_: Reluctant(ring)  # type: ignore[method-assign]
    rig.open()
    done = rig.put(1, MARK)
    assert isinstance(done.error, ReadOnly)
    assert rig.disk is not None
    assert not any(MARK in page for page in rig.disk.pages.values())
    ring.make(TENANT, NO_DOMAIN)
    assert rig.put(1, MARK).error is None
    rig.store.close()


def test_a_drive_that_was_rolled_back_encrypts_other_bytes_otherwise(sealed: StoreRig) -> None:
    """Its generations are reused: with the same nonces, new puts would reveal the old ones."""
    assert sealed.disk is not None
    sealed.store.close()
    before = dict(sealed.disk.pages)
    sealed.disk = FakeDisk(before)
    sealed.open()

    def written() -> tuple[int, bytes, bytes]:
        (entry,) = sealed.store.lookup([(TENANT, key(1))])
        assert entry is not None
        assert sealed.disk is not None
        header = sealed.disk.pages[entry.offset // 4096]
        return entry.generation, header[48:64], sealed.disk.pages[entry.offset // 4096 + 1]

    first, second = os.urandom(4096), os.urandom(4096)
    sealed.put(1, first)
    generation, salt, ciphertext = written()
    sealed.kill()
    sealed.disk = FakeDisk(before)
    shutil.rmtree(sealed.data / "index-0")
    sealed.open()
    sealed.put(1, second)
    again, other_salt, other = written()
    assert again == generation, "or this test shows nothing"
    assert other_salt != salt
    keystream = bytes(a ^ b for a, b in zip(first, ciphertext, strict=True))
    assert bytes(a ^ b for a, b in zip(other, keystream, strict=True)) != second


def test_a_key_that_is_made_while_the_store_closes_is_noticed_by_each_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = StoreRig(tmp_path / "data", disks=[FakeDisk(), FakeDisk(seed=1)])
    rig.keyring = FakeKeyring()
    rig.open()
    numbers = [next(one for one in range(100) if rig.home(one) == drive) for drive in (0, 1)]
    ensure, wanted = FakeKeys.ensure, list[Callable[[], None]]()
    monkeypatch.setattr(FakeKeys, "ensure", lambda *asked: wanted.append(partial(ensure, *asked)))
    poll = select.poll

    class Poll:
        """Makes the keys as soon as a drive has nothing to do but to wait for them."""

        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, timeout_ms: int | None = None) -> object:
            if not self._poll.poll(0):
                while wanted:
                    wanted.pop()()
            return self._poll.poll(timeout_ms)

    monkeypatch.setattr(select, "poll", Poll)
    tags = [rig.start_put(one, b"x", domain=domain(one)) for one in numbers]
    closing = threading.Thread(target=rig.store.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert [rig.put_done[tag].error for tag in tags] == [None, None]
