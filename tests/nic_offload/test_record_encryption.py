"""Encrypted records: what lanes write can be read by the page's description alone, and readers send nothing else."""

from __future__ import annotations

import os
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest
from nic_offload._core import ffi

from nic_offload import aead
from nic_offload.checksum import crc32c
from nic_offload.fabric import EventKind
from nic_offload.lane import Ground, Lane, Lanes
from nic_offload.reader import Reader
from nic_offload.vault import KeyName, RecordCipher, Vault, row_of
from tests.nic_offload import test_reader as reading
from tests.nic_offload.rig import PAGE, Pair
from tests.nic_offload.test_granted import (
    FINGERPRINT,
    LANDED,
    LENGTH_MAX,
    OWNER,
    WRITTEN,
    open_rig,
)
from tests.nic_offload.test_lane import BYTES_MAX, FIXED, FORMAT, LOTS, MIB, TAG
from tests.nic_offload.test_lane import Drive as LaneDrive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.nic_offload.test_granted import GrantRig

SECRET, SALT = b"\x01" * 32, b"\x02" * 16
ADA, BOB = b"ada".ljust(16, b"\0"), b"bob".ljust(16, b"\0")
KEYS = {ADA: (KeyName(7, 1 << 60), b"a" * 32), BOB: (KeyName(8, 5), b"b" * 32)}
SEALED = struct.Struct("<8sHHIQQI4xQ16s16s24x")
IDENTITY = struct.Struct("<32s16s16sI4x")
ROW = row_of(FIXED.format[1:])


def open_record(data: bytes, offset: int, key: bytes) -> tuple[tuple[bytes, bytes, bytes, int], bytes]:
    """Read a record as docs/record-format.md describes it: its identity and its payload."""
    fixed, tag = data[:104], data[104:120]
    message = FORMAT.name + offset.to_bytes(8, "little") + fixed
    assert blake2b(message, key=SECRET, digest_size=16).digest() == tag
    magic, version, kind, length, generation, _, _, _, salt, payload_tag = SEALED.unpack(fixed)
    assert (magic, version, kind) == (b"TKVSEALD", 1, 1)
    record_key = blake2b(salt, key=key, person=b"tkv record", digest_size=32).digest()
    associated = FORMAT.name + offset.to_bytes(8, "little") + fixed[:24] + fixed[32:64]
    nonce = generation.to_bytes(8, "little")
    identity = aead.unseal(record_key, nonce + b"\2\0\0\0", associated + payload_tag, data[120:208])
    assert not any(data[208:PAGE])
    payload = aead.unseal(
        record_key, nonce + b"\1\0\0\0", associated, data[PAGE : PAGE + length] + payload_tag
    )
    assert not any(data[PAGE + length :])
    return IDENTITY.unpack(identity), bytes(payload)


@pytest.fixture
def vault() -> Iterator[Vault]:
    with Vault(8) as vault:
        for domain, (name, secret) in KEYS.items():
            vault.put(OWNER, domain, name, secret)
        yield vault


def cipher_of(vault: Vault) -> RecordCipher:
    return RecordCipher(vault, SECRET, SALT, FORMAT.name)


# --- lanes


class EncryptedLane(LaneDrive):
    def __init__(self, rig: GrantRig, path: Path, vault: Vault, flags: int = os.O_RDWR) -> None:
        super().__init__(rig, path, flags)
        self.lane = Lane(rig.pair.far.fabric, TAG, self._fd, 4, BYTES_MAX, FORMAT, cipher_of(vault))
        rig.receiver.use(Lanes([self.lane], bytes(LOTS)))


@pytest.fixture
def drive(tmp_path: Path, vault: Vault) -> Iterator[EncryptedLane]:
    for rig in open_rig("net"):
        drive = EncryptedLane(rig, tmp_path / "drive", vault)
        yield drive
        drive.close()


@pytest.mark.parametrize("length", [1, 4096, 5000, 262_144, 262_145, 524_288, LENGTH_MAX])
def test_a_lane_encrypts_the_bytes_that_arrived_and_only_their_key_decrypts_them(
    drive: EncryptedLane, length: int
) -> None:
    rig, pages = drive.rig, 1 + -(-length // PAGE)
    rig.feed(4, pages=pages)
    drive.lend(pages=4 * pages)
    _, group = rig.put([1, 2, 3, 4], length, durability=WRITTEN, domains=(ADA, BOB, ADA, BOB))
    assert rig.codes(group, 4) == [WRITTEN] * 4
    rig.wait_came(4)
    ended = {one.came.id: one for one in drive.wait_written(4)}
    on_drive = drive.path.read_bytes()
    for came in rig.came:
        one = ended[came.id]
        data = on_drive[one.offset : one.offset + pages * PAGE]
        assert came.domain == (ADA if came.key[0] % 2 else BOB)
        identity, payload = open_record(data, one.offset, KEYS[came.domain][1])
        assert identity == (came.key, OWNER, FINGERPRINT, came.crc32c)
        assert payload == rig.payload(came)
        assert OWNER not in data
        assert FINGERPRINT not in data
        other = BOB if came.domain == ADA else ADA
        with pytest.raises(aead.NotAuthentic):
            open_record(data, one.offset, KEYS[other][1])
        with pytest.raises(AssertionError):
            open_record(data, one.offset + PAGE, KEYS[came.domain][1])
        if length >= 32:
            assert rig.payload(came)[:32] not in on_drive


def test_an_idle_lane_gets_the_key_again(drive: EncryptedLane) -> None:
    rig, pages = drive.rig, 2
    rig.feed(2, pages=pages)
    drive.lend(pages=2 * pages)
    for number in (1, 2):
        _, group = rig.put([number], PAGE, durability=WRITTEN, domains=(ADA,))
        assert rig.codes(group, 1) == [WRITTEN]
        rig.wait_came(number)
        (one,) = drive.wait_written(number)[-1:]
        data = drive.path.read_bytes()[one.offset : one.offset + pages * PAGE]
        assert open_record(data, one.offset, KEYS[ADA][1])[1] == rig.payload(rig.came[-1])


def test_a_block_whose_key_is_missing_is_left_to_the_application(drive: EncryptedLane, vault: Vault) -> None:
    rig = drive.rig
    rig.feed(3, pages=3)
    drive.lend()
    assert vault.drop(KEYS[BOB][0].number)
    assert not vault.drop(KEYS[BOB][0].number)
    _, group = rig.put([1, 2, 3], domains=(ADA, BOB, b""))
    assert rig.codes(group, 3) == [LANDED] * 3
    rig.wait_came(3)
    assert {came.key[0]: came.under_way for came in rig.came} == {1: 1, 2: 0, 3: 0}


def test_many_large_blocks_take_turns_in_the_memory(drive: EncryptedLane) -> None:
    rig, pages = drive.rig, 1 + LENGTH_MAX // PAGE
    rig.feed(30, pages=pages)
    os.truncate(drive.path, 30 * pages * PAGE)
    drive.lend(pages=30 * pages)
    numbers = list(range(1, 31))
    _, group = rig.put(numbers, LENGTH_MAX, durability=WRITTEN, domains=(ADA,) * 30)
    assert group.wait_landed(20)
    rig.wait_came(30)
    taken = {came.id: came for came in rig.came if came.under_way}
    written = drive.wait_written(len(taken))
    on_drive = drive.path.read_bytes()
    for one in written:
        data = on_drive[one.offset : one.offset + pages * PAGE]
        assert open_record(data, one.offset, KEYS[ADA][1])[1] == rig.payload(taken[one.came.id])
    assert len(taken) >= 4


def test_a_failed_write_is_the_last_of_an_encrypting_lane(tmp_path: Path, vault: Vault) -> None:
    for rig in open_rig("net"):
        drive = EncryptedLane(rig, tmp_path / "drive", vault, os.O_RDONLY)
        rig.feed(4, pages=1 + LENGTH_MAX // PAGE)
        drive.lend(pages=1000)
        _, group = rig.put([1, 2], LENGTH_MAX, durability=WRITTEN, domains=(ADA, ADA))
        assert group.wait_landed(20)
        written = drive.wait_written(1)  # the other one may have come when the lane took no more
        assert all(one.result < 0 for one in written)
        assert not group.wait(1, 0.05), "no word says that it was written"
        assert not drive.lane.lend(Ground(0, 900, 10, 10))
        drive.close()


def test_closing_the_fabric_ends_pending_encryption(tmp_path: Path, vault: Vault) -> None:
    for rig in open_rig("net"):
        drive = EncryptedLane(rig, tmp_path / "drive", vault)
        rig.feed(8, pages=1 + LENGTH_MAX // PAGE)
        os.truncate(drive.path, 16 * MIB)
        drive.lend(pages=2000)
        rig.put(list(range(1, 9)), LENGTH_MAX, domains=(ADA,) * 8)
        rig.pair.far.fabric.close()
        drive.close()


# --- readers


class Sealed(reading.Drive):
    """A drive with encrypted records."""

    def __init__(self, pair: Pair, path: Path, vault: Vault) -> None:
        super().__init__(pair, path)
        self.cipher = cipher_of(vault)
        self.reader = Reader(pair.near.fabric, self._fd, 8, FORMAT, self.cipher)

    def record(
        self, payload: bytes, offset: int = reading.OFFSET, generation: int = reading.GENERATION
    ) -> bytearray:
        size = PAGE + -(-len(payload) // PAGE) * PAGE
        source, target = bytearray(PAGE) + payload, bytearray(size)
        assert self.cipher.encrypt([_row(source, target, offset, generation, KEYS[ADA][0])])
        return target


def _row(source: bytearray, target: bytearray, offset: int, generation: int, name: KeyName) -> bytes:
    payload = bytes(source[PAGE:])
    return ROW.pack(
        _address(source),
        _address(target),
        offset,
        name.id,
        name.number,
        len(target),
        FORMAT.magic,
        FORMAT.version,
        FORMAT.kind,
        len(payload),
        reading.KEY,
        reading.OWNER,
        reading.FINGERPRINT,
        generation,
        0,
        crc32c(payload),
    )


def _address(data: bytearray) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


@pytest.fixture
def sealed(tmp_path: Path, vault: Vault) -> Iterator[Sealed]:
    with Pair("net", 16 * MIB) as pair:
        one = Sealed(pair, tmp_path / "drive", vault)
        yield one
        one.close()


def test_records_of_a_batch_have_their_own_keys_whichever_came_before(vault: Vault) -> None:
    """A later key of the same slot has another id."""
    later = KeyName(KEYS[BOB][0].number, 99), b"c" * 32
    keys = [KEYS[ADA], KEYS[ADA], KEYS[BOB], KEYS[BOB], KEYS[ADA], KEYS[BOB]]
    payloads = [bytes([number]) * PAGE for number in range(len(keys))]
    sources = [bytearray(PAGE) + payload for payload in payloads]
    targets = [bytearray(2 * PAGE) for _ in keys]
    cipher = cipher_of(vault)
    rows = [
        _row(source, target, at * PAGE, 40 + at, name)
        for at, (source, target, (name, _)) in enumerate(zip(sources, targets, keys, strict=True))
    ]
    assert cipher.encrypt(rows)
    for at, (target, (_, secret)) in enumerate(zip(targets, keys, strict=True)):
        assert open_record(bytes(target), at * PAGE, secret)[1] == payloads[at]
    vault.put(OWNER, BOB, *later)
    assert cipher.encrypt([_row(sources[0], targets[0], 0, 50, later[0])])
    assert open_record(bytes(targets[0]), 0, later[1])[1] == payloads[0]


LENGTHS = [1, 4096, 12_345, 262_144, 262_145, 3 * MIB + 5]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_reader_sends_encrypted_records_and_parts_of_them(sealed: Sealed, length: int) -> None:
    payload = os.urandom(length)
    sealed.write(reading.OFFSET, sealed.record(payload))
    sealed.put(sealed.reading(payload=payload))
    assert sealed.wait_end() == (EventKind.SENT, 0)
    far = sealed.pair.far
    sealed.pair.there.fence()
    assert far.word(0).load() == reading.FLAG
    assert far.bytes_at(0, length) == payload
    half = length // 2
    if half:
        sealed.put(sealed.reading(2, payload=payload, skip=half, part=length - half), batch=78)
        assert sealed.wait_end(2, 78) == (EventKind.SENT, 0)
        sealed.pair.there.fence()
        assert far.bytes_at(0, length - half) == payload[half:]


CHANGES: dict[str, Callable[[bytearray], None]] = {
    "a bit of the payload": lambda data: _flip(data, PAGE + 70_000),
    "its last bit": lambda data: _flip(data, PAGE + 299_999),
    "a bit of the tag": lambda data: _flip(data, 65),
    "a bit of the identity": lambda data: _flip(data, 130),
    "a bit of the salt": lambda data: _flip(data, 50),
    "a bit of the header's tag": lambda data: _flip(data, 110),
}


def _flip(data: bytearray, at: int) -> None:
    data[at] ^= 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_bit_is_not_sent(sealed: Sealed, change: Callable[[bytearray], None]) -> None:
    payload = os.urandom(300_000)
    record = sealed.record(payload)
    change(record)
    sealed.write(reading.OFFSET, record)
    sealed.put(sealed.reading(payload=payload))
    assert sealed.wait_end()[0] is EventKind.FAILED
    assert sealed.is_untouched()


def test_a_bit_changed_together_with_the_headers_tag_is_not_sent(sealed: Sealed) -> None:
    """An attacker with the keys of tags, but not of domains, can't change anything either."""
    payload = os.urandom(9000)
    for at in (*range(8, 24), *range(32, 80), *range(120, 208)):
        record = sealed.record(payload)
        _flip(record, at)
        message = FORMAT.name + reading.OFFSET.to_bytes(8, "little") + record[:104]
        record[104:120] = blake2b(message, key=SECRET, digest_size=16).digest()
        sealed.write(reading.OFFSET, record)
        batch = 1000 + at
        sealed.put(sealed.reading(at + 1, payload=payload), batch=batch)
        assert sealed.wait_end(at + 1, batch)[0] is EventKind.FAILED, at
        assert sealed.cipher.decrypt(reading.OFFSET, _address(record), len(payload)) is None, at
    assert sealed.is_untouched()


def test_a_record_of_another_place_generation_or_key_is_not_sent(sealed: Sealed, vault: Vault) -> None:
    payload = os.urandom(9000)
    elsewhere = sealed.record(payload, offset=reading.OFFSET + PAGE)
    older = sealed.record(payload, generation=reading.GENERATION - 1)
    for batch, record in ((100, elsewhere), (101, older)):
        sealed.write(reading.OFFSET, record)
        sealed.put(sealed.reading(batch - 90, payload=payload), batch=batch)
        assert sealed.wait_end(batch - 90, batch)[0] is EventKind.FAILED
    sealed.write(reading.OFFSET, sealed.record(payload))
    name, secret = KEYS[ADA]
    vault.put(OWNER, ADA, name._replace(id=name.id + 1), secret)
    sealed.put(sealed.reading(12, payload=payload), batch=102)
    assert sealed.wait_end(12, 102)[0] is EventKind.FAILED
    vault.put(OWNER, ADA, name, b"x" * 32)
    sealed.put(sealed.reading(13, payload=payload), batch=103)
    assert sealed.wait_end(13, 103)[0] is EventKind.FAILED
    assert sealed.is_untouched()


def test_an_unencrypted_record_is_read_along_with_encrypted_ones(sealed: Sealed) -> None:
    payload = reading.payload_of(1)
    sealed.write(reading.OFFSET, reading.record_of(reading.OFFSET, reading.GENERATION, payload))
    sealed.put(sealed.reading())
    assert sealed.wait_end() == (EventKind.SENT, 0)


# --- the application's way


def test_decrypting_in_place_gives_the_record_or_zeros(sealed: Sealed) -> None:
    payload = os.urandom(9000)
    record = sealed.record(payload)
    opened = sealed.cipher.decrypt(reading.OFFSET, _address(record), len(payload))
    assert opened is not None
    assert opened.key == KEYS[ADA][0]
    said = FIXED.unpack(opened.fixed)
    assert said[2:] == (
        1,
        9000,
        reading.KEY,
        reading.OWNER,
        reading.FINGERPRINT,
        reading.GENERATION,
        0,
        crc32c(payload),
    )
    assert record[PAGE : PAGE + 9000] == payload
    for at, length in ((PAGE, 9000), (80 - 1, 9000), (104, 9000), (PAGE, 8999)):
        record = sealed.record(payload)
        if length == 9000:
            _flip(record, at)
        assert sealed.cipher.decrypt(reading.OFFSET, _address(record), length) is None
        assert payload[128:192] not in record


def test_reusing_a_generation_within_an_opening_reveals_two_payloads_and_another_opening_does_not(
    sealed: Sealed, vault: Vault
) -> None:
    """As with a snapshot of a machine's memory; a restart ends it: docs/sealing.md says so."""
    one, two = os.urandom(4096), os.urandom(4096)

    def differ(left: bytes | bytearray, right: bytes | bytearray) -> bytes:
        return bytes(a ^ b for a, b in zip(left, right, strict=True))

    first = sealed.record(one)[PAGE:]
    assert differ(first, sealed.record(two)[PAGE:]) == differ(one, two)
    assert differ(first, sealed.record(two, generation=reading.GENERATION + 1)[PAGE:]) != differ(one, two)
    before = sealed.cipher
    sealed.cipher = RecordCipher(vault, SECRET, b"\x03" * 16, FORMAT.name)
    assert differ(first, sealed.record(two)[PAGE:]) != differ(one, two)
    sealed.cipher = before  # which the reader uses


def test_without_its_key_a_header_reveals_only_its_clear_fields(sealed: Sealed, vault: Vault) -> None:
    record = sealed.record(b"kv" * 4000)
    vault.drop(KEYS[ADA][0].number)
    found = sealed.cipher.open(reading.OFFSET, _address(record))
    assert found is not None
    opened, decryption = found
    assert decryption is None
    assert opened.key == KEYS[ADA][0]
    _, _, kind, length, key, owner, _, generation, expires_ms, _ = FIXED.unpack(opened.fixed)
    assert (kind, length, generation, expires_ms) == (1, 8000, reading.GENERATION, 0)
    assert not any(key + owner)


# --- the vault


def test_a_full_vault_drops_the_least_recently_used_keys() -> None:
    with Vault(4) as vault:
        for number in range(6):
            vault.put(OWNER, bytes([number]) * 16, KeyName(number, number), bytes(32))
        assert len(vault) == 4
        assert vault.drop(5)
        assert not vault.drop(5)
        assert len(vault) == 3


def test_a_domain_has_one_key_and_a_number_one_domain() -> None:
    with Vault(4) as vault:
        vault.put(OWNER, ADA, KeyName(1, 1), b"1" * 32)
        vault.put(OWNER, ADA, KeyName(2, 2), b"2" * 32)
        assert len(vault) == 1
        vault.put(OWNER, BOB, KeyName(2, 3), b"3" * 32)
        assert len(vault) == 1
        assert not vault.drop(1)
        assert vault.drop(2)


def test_a_vault_of_many_keys_keeps_each() -> None:
    with Vault(1000) as vault:
        for number in range(1000):
            vault.put(OWNER, number.to_bytes(16, "little"), KeyName(number * 977, number), bytes(32))
        assert len(vault) == 1000
        assert all(vault.drop(number * 977) for number in range(1000))
        assert len(vault) == 0
