"""The keyring: the keys that it makes, destroys and refuses, and the contents of its file and its memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
from contextlib import closing
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import (
    Closed,
    Corrupt,
    FolderLocked,
    InvalidArgument,
    NoKeyring,
    NoSpace,
    QuotaExceeded,
    ReadOnly,
    StorageError,
    WrongKeyring,
    WrongMasterKey,
    WrongVersion,
)
from kvstore.names import domain_tag
from kvstore.sealing import slots
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import FolderFile, keyring_path
from kvstore.sealing.keyring_state import read_status
from nic_offload.secret_keys import new_key
from tests.sealing.rig import (
    ACME,
    STORE,
    ZETA,
    FakeClock,
    Memory,
    at,
    keys_of,
    master,
    new_keyring,
    opened,
    user,
    users,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_key_is_the_same_after_reopening_and_others_differ(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE)
    assert path.stat().st_mode & 0o777 == 0o600
    with Keyring.open(path, master(), STORE) as keyring:
        store_key = bytes(keyring.store_key)
        names = [*users(1, 2, 1), (ZETA, user(1)), (ACME, bytes(16))]
        made = keyring.ensure(names)
        assert [(key.tenant, key.domain) for key in made] == names
        assert made[0].key == made[2].key
        assert made[0].key is not made[2].key  # each is its caller's to wipe
        keys = {(key.tenant, key.domain): (key.number, key.id, bytes(key.key)) for key in made}
        assert len({key for _, _, key in keys.values()}) == 4
        assert keyring.domain(ACME, user(3)) is None
    with Keyring.open(path, master(), STORE) as keyring:
        assert keyring.store_key == store_key
        for name, (number, key_id, key) in keys.items():
            again = keyring.domain(*name)
            assert again is not None
            assert (again.number, again.id, bytes(again.key)) == (number, key_id, key)
            by_number = keyring.by_number(number, key_id)
            assert by_number is not None
            assert by_number.key == key
        with pytest.raises(Corrupt, match="never had"):
            keyring.by_number(1 << 31, keys[names[0]][1])


def test_many_domains_are_found_by_name_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.sealing.slot_table.KEYRING_NEW_NAMES_MAX", 500)
    keyring, file = new_keyring()
    names = users(*range(3000))
    keys = {}
    for first in range(0, len(names), 700):
        for key in keyring.ensure(names[first : first + 700]):
            keys[key.tenant, key.domain] = bytes(key.key)
    assert keys_of(keyring, names) == keys
    assert keys_of(opened(bytes(file.durable)), names) == keys


def test_an_erased_key_is_destroyed_and_the_domain_gets_another() -> None:
    keyring, file = new_keyring()
    one, two = keyring.ensure(users(1, 2))
    before = bytes(file.durable)
    (erased, never) = keyring.erase([(ACME, user(1)), (ACME, user(9))])
    assert (erased.number, erased.id, never.number, never.id) == (one.number, one.id, None, None)
    assert keyring.domain(ACME, user(1)) is None
    assert keyring.by_number(one.number, one.id) is None
    assert keyring.erased_ms(ACME, domain_tag(user(1))) == erased.at_ms
    assert keyring.erased_ms(ACME, domain_tag(user(2))) is None
    assert keyring.erase([(ACME, user(1))]) == [erased._replace(is_earlier=True)]  # it says when that was
    assert keys_of(keyring, users(2)) == {(ACME, user(2)): bytes(two.key)}
    assert file.durable[at(one.number)][64:124] == bytes(60)
    sealed = before[at(one.number)][76:124]
    assert sealed not in file.durable  # neither there nor elsewhere
    again = opened(bytes(file.durable))
    assert again.by_number(one.number, one.id) is None
    (fresh,) = again.ensure(users(1))
    assert fresh.number == one.number
    assert (fresh.id, fresh.key) != (one.id, one.key)
    assert again.by_number(one.number, one.id) is None  # records of the old key stay erased
    assert again.erased_ms(ACME, domain_tag(user(1))) is None


def test_a_tenant_is_erased_with_all_its_domains() -> None:
    keyring, file = new_keyring()
    mine, other = keyring.ensure([*users(*range(40)), (ZETA, user(1))])[:40], keyring.domain(ZETA, user(1))
    keyring.erase(users(7))
    own, *answers = keyring.erase_tenant(ACME)
    assert own.domain == bytes(16)
    assert {answer.domain for answer in answers} == {user(number) for number in range(40) if number != 7}
    earlier = [one._replace(is_earlier=True) for one in (own, *answers)]
    assert keyring.erase_tenant(ACME) == earlier, "a receipt of the repetition names them all"
    assert keyring.erase_tenant(b"nobody".ljust(16)) == []
    for ring in (keyring, opened(bytes(file.durable))):
        assert all(ring.by_number(key.number, key.id) is None for key in mine)
        assert ring.erased_ms(ACME, domain_tag(user(3))) == own.at_ms
        assert other is not None
        assert keys_of(ring, [(ZETA, user(1))]) == {(ZETA, user(1)): bytes(other.key)}
        assert [tenant for tenant, _ in ring.status().tenants] == [ZETA]
    (fresh,) = keyring.ensure(users(3))
    assert fresh.key != mine[3].key
    assert keys_of(opened(bytes(file.durable)), users(3)) == {(ACME, user(3)): bytes(fresh.key)}


def test_no_plain_key_is_in_the_file(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE)
    with Keyring.open(path, master(), STORE) as keyring:
        secret = [bytes(key.key) for key in keyring.ensure(users(*range(50)))]
        keyring.rotate_tenant(ACME)
        keyring.rotate_master(master(1))
        secret += [bytes(keyring.store_key), bytes(range(32)), bytes(range(1, 33))]
        secret += [bytes(key) for key in (keyring._root, *keyring._unsealed.values())]
        assert len(secret) == 50 + 3 + 2
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        assert not [key for key in secret if key in data or key[:16] in data or key.hex().encode() in data]
    assert [file.name for file in tmp_path.iterdir()] == ["keyring"]


def test_a_wiped_key_and_a_closed_keyring_have_only_zeros() -> None:
    keyring, _ = new_keyring()
    (key,) = keyring.ensure(users(1))
    keys = [key._key, keyring.store_key, keyring._root, *keyring._unsealed.values()]
    memory = [bytes_at(one) for one in keys]
    assert all(any(one.raw) for one in memory)
    text = repr(key)
    assert bytes(key.key).hex() not in text
    assert str(bytes(key.key)) not in text
    key.close()
    with pytest.raises(Closed):
        _ = key.key
    keyring.close()
    assert not any(any(one.raw) for one in memory)
    for one in keys:
        with pytest.raises(ValueError, match="released"):
            bytes(one)


def bytes_at(key: memoryview) -> ctypes.Array[ctypes.c_char]:
    """Read the memory of a key, also after the key's end."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(key))
    return (ctypes.c_char * len(key)).from_address(address)


def test_unsealed_keys_of_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.sealing.open_keyring.KEYRING_TENANTS_UNSEALED_MAX", 2)
    keyring, _ = new_keyring()
    names = [(bytes([tenant]) * 16, user(1)) for tenant in range(5)]
    keys = {name: bytes(key.key) for name, key in zip(names, keyring.ensure(names), strict=True)}
    kept = list(keyring._unsealed.values())
    assert keys_of(keyring, names) == keys
    assert len(keyring._unsealed) == 2
    for key in kept:
        with pytest.raises(ValueError, match="released"):
            bytes(key)


@pytest.mark.parametrize(
    "changed", ["store", "number", "id", "tenant", "domain", "time", "purpose", "wrapped", "tag"]
)
def test_a_wrapped_key_is_bound_to_its_place_and_all_its_fields(changed: str) -> None:
    slot = slots.Slot(slots.State.LIVE, slots.Kind.DOMAIN, bytes(8), ACME, user(1), 5, bytes(8))
    key, by = bytearray(secrets.token_bytes(32)), bytearray(secrets.token_bytes(32))
    store, number = STORE, 7
    full = slots.wrapped(slot, key, by, store, number)
    assert slots.unwrapped(full, by, store, number) == key
    sealed = bytearray(full.sealed)
    sealed[{"wrapped": 20, "tag": 59}.get(changed, 0)] ^= changed in ("wrapped", "tag")
    other = full._replace(
        kind=slots.Kind.TENANT if changed == "purpose" else full.kind,
        id=b"\1" * 8 if changed == "id" else full.id,
        tenant=ZETA if changed == "tenant" else full.tenant,
        domain=user(2) if changed == "domain" else full.domain,
        when_ms=6 if changed == "time" else full.when_ms,
        sealed=bytes(sealed),
    )
    with pytest.raises(Corrupt):
        slots.unwrapped(
            other, by, ZETA if changed == "store" else store, 8 if changed == "number" else number
        )


def test_no_nonce_and_no_id_is_used_twice() -> None:
    keyring, file = new_keyring()
    seen: set[tuple[bytes, bytes]] = set()  # wrapping key, nonce
    ids: dict[tuple[int, bytes], bytes] = {}
    for turn in range(30):
        for key in keyring.ensure(users(1, 2, 3)):
            assert ids.setdefault((key.number, key.id), bytes(key.key)) == bytes(key.key)
        for number in range(len(keyring._slots)):
            slot = slots.parse_slot(bytes(file.now[at(number)]))
            if slot is not None and slot.state == slots.State.LIVE:
                seen.add((slot.wrapped_by, slot.sealed[:12]))
        before = len(seen)
        keyring.erase(users(1, 2, 3)) if turn % 2 else keyring.rotate_tenant(ACME)
        for number in range(len(keyring._slots)):
            slot = slots.parse_slot(bytes(file.now[at(number)]))
            if slot is not None and slot.state == slots.State.LIVE:
                seen.add((slot.wrapped_by, slot.sealed[:12]))
        assert len(seen) == before + (0 if turn % 2 else 4)
        assert len({nonce for _, nonce in seen}) == len(seen)
    assert len(ids) == 3 * 15
    assert len({key_id for _, key_id in ids}) == len(ids)


def test_old_copies_of_the_file_have_their_old_content_and_nothing_later() -> None:
    keyring, file = new_keyring()
    one, two = keyring.ensure(users(1, 2))
    old = bytes(file.durable)
    keyring.erase(users(1))
    (three,) = keyring.ensure(users(3))
    after = bytes(file.durable)
    # A copy from before the erasure brings the key back: docs/sealing.md says so. One from after it doesn't.
    back = opened(old).by_number(one.number, one.id)
    assert back is not None
    assert back.key == one.key
    assert opened(after).by_number(one.number, one.id) is None
    # A keyring that was rolled back doesn't know what came later, and gives what it makes other ids and keys.
    rolled = opened(old)
    with pytest.raises(Corrupt, match="never had"):
        rolled.by_number(three.number, three.id)
    (other,) = rolled.ensure(users(4))
    assert other.number == three.number
    assert other.id != three.id
    assert other.key != three.key
    # Two copies that go on side by side share only what they had.
    left, right = opened(after).ensure(users(2, 5)), opened(after).ensure(users(2, 5))
    assert left[0].key == right[0].key == two.key
    assert left[1].key != right[1].key
    assert left[1].id != right[1].id


def test_two_stores_with_one_master_key_have_nothing_in_common() -> None:
    first, second = new_keyring(), new_keyring()
    (one,), (two,) = first[0].ensure(users(1)), second[0].ensure(users(1))
    assert one.key != two.key
    assert first[0].store_key != second[0].store_key
    mixed = bytearray(first[1].durable)
    mixed[at(one.number)] = second[1].durable[at(two.number)]  # a slot of the one in the other's file
    ring = opened(bytes(mixed))
    assert ring.status().damaged == 1
    assert ring.domain(ACME, user(1)) is None


def test_another_master_key_another_store_or_no_keyring_is_one_sentence_and_no_damage(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    with pytest.raises(NoKeyring, match="There is no keyring"):
        Keyring.open(path, master(), STORE)
    Keyring.create(path, master(), STORE)
    before = path.read_bytes()
    with pytest.raises(
        WrongMasterKey, match=rf"sealed with master key {master().id}, and the given one is key:"
    ):
        Keyring.open(path, master(1), STORE)
    liar = master(1)
    liar.id = master().id
    with pytest.raises(WrongMasterKey, match="replaced by another of this name"):
        Keyring.open(path, liar, STORE)
    with pytest.raises(WrongKeyring, match=f"is of store {STORE.hex()}, not of {ZETA.hex()}"):
        Keyring.open(path, master(), ZETA)
    with pytest.raises(StorageError, match="already"):
        Keyring.create(path, master(), STORE)
    assert path.read_bytes() == before
    with Keyring.open(path, master(), STORE), pytest.raises(FolderLocked):
        Keyring.open(path, master(), STORE)
    Keyring.open(path, master(), STORE).close()


def test_a_second_name_of_a_keyring_is_not_written_to(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE)
    before = path.read_bytes()
    path.with_name("keyring.part").hardlink_to(path)  # as a process leaves it that dies in `create`
    with pytest.raises(StorageError, match="already"):
        Keyring.create(path, master(), STORE)
    assert path.read_bytes() == before


def test_a_damaged_header_is_repaired_from_its_copy_and_two_are_an_error() -> None:
    _, file = new_keyring()
    whole = bytes(file.durable)
    for copy in (0, 4096):
        image = bytearray(whole)
        image[copy + 200] ^= 1
        damaged = Memory(bytes(image))
        opened(damaged)
        assert damaged.durable == whole
    image = bytearray(whole)
    image[200] ^= 1
    image[4096 + 200] ^= 1
    damaged = Memory(bytes(image))
    with pytest.raises(Corrupt):
        opened(damaged)
    image[8] = image[4104] = 3
    with pytest.raises(WrongVersion, match="format 3"):
        opened(bytes(image))
    with pytest.raises(Corrupt, match="truncated"):
        opened(whole[:8192])
    assert damaged.now == image[:8] + b"\2" + image[9:4104] + b"\2" + image[4105:]


def test_each_flipped_bit_of_a_slot_costs_only_that_key() -> None:
    keyring, file = new_keyring()
    one, two = keyring.ensure(users(1, 2))
    whole = bytes(file.durable)
    for bit in range(0, 1024, 3):
        image = bytearray(whole)
        image[at(one.number)] = flipped(image[at(one.number)], bit)
        ring = opened(bytes(image))
        assert keys_of(ring, users(2)) == {(ACME, user(2)): bytes(two.key)}
        assert ring.status().damaged == 1
        with pytest.raises(Corrupt, match="damaged"):  # nobody has destroyed it
            ring.by_number(one.number, one.id)
        (fresh,) = ring.ensure(users(1))
        assert fresh.number != one.number  # a damaged slot is left alone


def test_an_erasure_overwrites_damaged_slots_since_they_may_have_the_key() -> None:
    keyring, file = new_keyring()
    one, two = keyring.ensure(users(1, 2))
    whole = bytes(file.durable)
    numbers = {one.number, *(slot for slot in range(8) if ACME in whole[at(slot)])} - {two.number}
    assert len(numbers) == 2, "a domain's, and its tenant's"
    for number in numbers:
        for bit in (3, 70, 140, 400, 700, 1000):
            image = bytearray(whole)
            image[at(number)] = flipped(image[at(number)], bit)
            for is_whole_tenant in (False, True):
                changed = Memory(bytes(image))
                ring = opened(changed)
                assert ring.status().damaged == (1 if number == one.number else 3)
                _ = ring.erase_tenant(ACME) if is_whole_tenant else ring.erase(users(1))
                row = bytes(changed.durable[at(number)])
                assert slots.parse_slot(row) == slots.overwritten(int.from_bytes(row[48:56], "little"))
                assert ring.status().damaged == 0


def flipped(row: bytearray, bit: int) -> bytearray:
    """The same bytes with one bit flipped."""
    row[bit // 8] ^= 1 << bit % 8
    return row


def test_a_full_keyring_says_so_and_forgets_the_oldest_erased_names_first() -> None:
    keyring, file = new_keyring(slots_max=64)
    room = 64 - 2  # the store's key and the tenant's
    keyring.ensure(users(*range(room)))
    before = bytes(file.now)
    with pytest.raises(NoSpace, match="has 64 keys"):
        keyring.ensure(users(1000))
    assert file.now == before
    for number in (9, 3, 5):
        keyring.erase(users(number))
    made = keyring.ensure(users(1000, 1001))
    assert keyring.erased_ms(ACME, domain_tag(user(9))) is None
    assert keyring.erased_ms(ACME, domain_tag(user(3))) is None
    assert keyring.erased_ms(ACME, domain_tag(user(5))) is not None
    with pytest.raises(NoSpace):
        keyring.ensure(users(1002, 1003))
    again = keyring.ensure(users(5))
    ring = opened(bytes(file.durable), slots_max=64)
    assert keys_of(ring, users(1000, 1001, 5)) == {
        (key.tenant, key.domain): bytes(key.key) for key in (*made, *again)
    }
    assert len(ring._slots) == 64


def test_the_number_of_a_tenants_keys_is_bounded_and_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.sealing.slot_table.KEYRING_TENANT_KEYS_MAX", 5)
    keyring, file = new_keyring()
    keyring.ensure(users(*range(4)))
    with pytest.raises(QuotaExceeded, match="4 erase domains, and its maximum is 5"):
        keyring.ensure(users(4, 5))
    keyring.ensure(users(0, 4))
    others = [(b"umbrella".ljust(16, b"."), user(number)) for number in range(5)]
    keyring.ensure(others)
    for ring in (keyring, opened(bytes(file.durable))):
        with pytest.raises(QuotaExceeded, match="erase users"):
            ring.ensure(users(5))
        assert len(ring.ensure(users(*range(5)))) == 5, "those that it has"
    keyring.erase(users(1))
    keyring.erase(users(1, 77))
    keyring.ensure(users(5))
    with pytest.raises(QuotaExceeded):
        keyring.ensure(users(6))
    keyring.rotate_tenant(ACME)
    with pytest.raises(QuotaExceeded):
        keyring.ensure(users(6))
    keyring.erase_tenant(ACME)
    keyring.ensure(users(*range(10, 15)))
    with pytest.raises(QuotaExceeded):
        keyring.ensure(users(6))


def test_slots_of_one_batch_are_all_different_even_if_a_domain_takes_its_old_one() -> None:
    keyring, _ = new_keyring(slots_max=32)
    keyring.ensure(users(*range(30)))
    keyring.erase(users(4, 5))
    made = keyring.ensure(users(100, 4))  # the oldest slot is that of 4
    assert len({key.number for key in made}) == 2
    keyring.erase(users(4, 100))
    made = keyring.ensure(users(100, 101))
    assert len({key.number for key in made}) == 2


def test_an_erased_tenants_slot_is_not_given_to_another() -> None:
    keyring, file = new_keyring(slots_max=32)
    keyring.ensure([(ZETA, user(1))])
    keyring.erase_tenant(ZETA)
    keyring.ensure(users(*range(29)))  # with the slot of the domain of ZETA
    with pytest.raises(NoSpace):
        keyring.ensure(users(99))
    keyring.erase(users(0))
    (key,) = keyring.ensure([(ZETA, user(1))])
    ring = opened(bytes(file.durable), slots_max=32)
    assert keys_of(ring, [(ZETA, user(1))]) == {(ZETA, user(1)): bytes(key.key)}
    assert len([one for one in keys_of(ring, users(*range(29))).values() if one]) == 28


@pytest.mark.parametrize("what", ["write", "sync"])
def test_nothing_more_is_written_after_a_failed_write(what: str) -> None:
    keyring, file = new_keyring()
    (one,) = keyring.ensure(users(1))
    file.fails = what
    with pytest.raises(StorageError, match="The drive failed"):
        keyring.ensure(users(2))
    file.fails = ""
    for change in (
        lambda: keyring.ensure(users(3)),
        lambda: keyring.erase(users(1)),
        lambda: keyring.erase_tenant(ACME),
        lambda: keyring.rotate_tenant(ACME),
        lambda: keyring.rotate_master(master(1)),
    ):
        with pytest.raises(ReadOnly):
            change()
    assert keyring.domain(ACME, user(2)) is None
    assert keys_of(keyring, users(1)) == {(ACME, user(1)): bytes(one.key)}
    again = opened(file)
    again.ensure(users(3))
    assert keys_of(again, users(1)) == {(ACME, user(1)): bytes(one.key)}


def test_a_key_is_unavailable_from_the_start_of_its_erasure() -> None:
    keyring, file = new_keyring()
    one, two = keyring.ensure(users(1, 2))
    seen: list[object] = []

    def look() -> None:
        seen.append((keyring.domain(ACME, user(1)), keyring.by_number(one.number, one.id)))

    file.during_write = look
    keyring.erase(users(1))
    assert seen == [(None, None)]
    file.fails = "sync"
    with pytest.raises(StorageError, match="The drive failed"):
        keyring.erase(users(2))
    assert keyring.domain(ACME, user(2)) is None, "though the erasure was not acknowledged"
    assert keyring.by_number(two.number, two.id) is None


def test_pages_are_written_past_the_page_cache(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE)
    with closing(FolderFile(path)) as file:
        assert fcntl.fcntl(file._writing, fcntl.F_GETFL) & os.O_DIRECT


@pytest.mark.parametrize(
    "name", [(ACME[:15], user(1)), (ACME, user(1) + b"."), (ACME[:15], b"." + user(1)), (b"", b"")]
)
def test_names_of_other_lengths_are_refused(name: tuple[bytes, bytes]) -> None:
    keyring, file = new_keyring()
    before = bytes(file.now)
    for ask in (
        lambda: keyring.ensure([name]),
        lambda: keyring.erase([name]),
        lambda: keyring.domain(*name),
    ):
        with pytest.raises(InvalidArgument):
            ask()
    assert file.now == before


def test_one_sync_makes_a_batch_durable_and_known_domains_need_none() -> None:
    keyring, file = new_keyring()
    keyring.ensure(users(0))
    before = len(file.done)
    keyring.ensure(users(*range(1, 20)))
    assert file.done[before:] == ["write", "sync"]
    keyring.ensure(users(*range(20)))
    assert len(file.done) == before + 2
    keyring.erase(users(*range(20)))
    assert file.done[before + 2 :] == ["write", "sync"]


def test_a_master_key_that_does_not_unwrap_what_it_wraps_changes_nothing() -> None:
    keyring, file = new_keyring()
    keyring.ensure(users(1))
    before = bytes(file.now)

    class Forgetful:
        id = "key:forgetful"

        def wrap(self, _: bytes, __: object) -> bytes:
            return b"x" * 60

        def unwrap(self, _: bytes, __: bytes) -> memoryview:
            return new_key()

        def close(self) -> None:
            pass

    with pytest.raises(WrongMasterKey, match="doesn't give back"):
        keyring.rotate_master(Forgetful())
    assert file.now == before
    assert keyring.ensure(users(1, 2))


def test_readers_get_keys_while_others_are_made_rotated_and_erased() -> None:
    keyring, _ = new_keyring()
    names = users(*range(200))
    keys = {(key.tenant, key.domain): bytes(key.key) for key in keyring.ensure(names)}
    wrong: list[object] = []
    stop: list[bool] = []

    def read() -> None:
        try:
            while not stop:
                wrong.extend(name for name, key in keys_of(keyring, names).items() if key != keys[name])
        except Exception as error:  # noqa: BLE001 - it is told below
            wrong.append(error)

    reader = Thread(target=read)
    reader.start()
    try:
        for turn in range(10):
            keyring.ensure(users(*range(1000 * turn + 1000, 1000 * turn + 1050)))
            keyring.rotate_tenant(ACME)
            keyring.erase(users(*range(1000 * turn + 1000, 1000 * turn + 1025)))
            keyring.rotate_master(master())
    finally:
        stop.append(True)
        reader.join(30)
    assert not reader.is_alive()
    assert wrong == []


def test_the_state_is_reported_without_any_key_and_while_it_is_open(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE, FakeClock())
    with Keyring.open(path, master(), STORE, FakeClock()) as keyring:
        keyring.ensure([*users(1, 2), (ZETA, user(1))])
        keyring.erase(users(1))
        said = read_status(path)
        assert said == keyring.status()
        assert (said.live, said.erased, said.damaged, said.tenants) == (5, 1, 0, ((ACME, 1), (ZETA, 1)))
        assert (said.master_id, said.store_uuid) == (master().id, STORE)
        assert said.size_bytes == path.stat().st_size
