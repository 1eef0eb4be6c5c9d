"""Swapped, moved or damaged slots: an erasure destroys all keys that it covers, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Corrupt, StorageError
from nic_offload.checksum import crc32c
from tests.sealing.rig import ACME, ZETA, Memory, at, keys_of, master, new_keyring, opened, user, users

if TYPE_CHECKING:
    from kvstore.sealing.domain_key import DomainKey
    from kvstore.sealing.keyring import Keyring

COUNT = 40


def made() -> tuple[dict[int, DomainKey], bytes]:
    """The keys of many users, and the file that has them."""
    ring, file = new_keyring()
    keys = ring.ensure(users(*range(COUNT)))
    return dict(enumerate(keys)), bytes(file.durable)


def changed(image: bytes, rows: dict[int, bytes]) -> Memory:
    """A file with other bytes in some of its slots."""
    data = bytearray(image)
    for number, row in rows.items():
        data[at(number)] = row
    return Memory(bytes(data))


def swapped(image: bytes, one: int, two: int) -> dict[int, bytes]:
    return {one: image[at(two)], two: image[at(one)]}


def change_under(file: Memory, rows: dict[int, bytes]) -> None:
    """The same, of a keyring that is open."""
    for number, row in rows.items():
        file.now[at(number)] = file.durable[at(number)] = row


def sealed(image: bytes, key: DomainKey) -> bytes:
    """The wrapped key, without its nonce."""
    return image[at(key.number)][76:124]


def refuses(ring: Keyring, key: DomainKey) -> None:
    with pytest.raises(Corrupt):
        ring.by_number(key.number, key.id)


@pytest.mark.parametrize("running", [False, True])
def test_an_erasure_takes_the_slot_that_it_names_of_two_swapped_ones(*, running: bool) -> None:
    keys, image = made()
    ada, bob = keys[3], keys[17]
    rows = swapped(image, ada.number, bob.number)
    file = Memory(image) if running else changed(image, rows)
    ring = opened(file)
    if running:
        change_under(file, rows)
    else:
        assert ring.status().damaged == 2
        refuses(ring, ada)
        refuses(ring, bob)
    (erased,) = ring.erase(users(3))
    assert (erased.number, erased.id) == (ada.number, ada.id), "by the number that its records have"
    assert sealed(image, ada) not in file.durable
    assert sealed(image, bob) in file.durable, "it is for others to erase, or to put back"
    for again in (ring, opened(bytes(file.durable))):
        refuses(again, bob)
        others = users(*(number for number in range(COUNT) if number not in {3, 17}))
        assert None not in keys_of(again, others).values()
    gone = bytes(file.durable[at(bob.number)])
    restored = changed(bytes(file.durable), {bob.number: image[at(bob.number)], ada.number: gone})
    back = opened(restored)
    assert back.by_number(ada.number, ada.id) is None
    found = back.by_number(bob.number, bob.id)
    assert found is not None
    assert found.key == bob.key


def test_a_key_moved_to_another_place_is_not_taken_for_destroyed() -> None:
    keys, image = made()
    ada, bob = keys[3], keys[17]
    free = len(image[8192:]) // 128 - 1
    gone = opened(changed(image, {}))
    gone.erase(users(17))
    for rows, damaged in (
        ({ada.number: bytes(128), free: image[at(ada.number)]}, 2),
        (swapped(bytes(gone._file.durable), ada.number, bob.number), 1),  # type: ignore[attr-defined]
    ):
        file = changed(image, rows)
        ring = opened(file)
        assert ring.status().damaged == damaged
        refuses(ring, ada)
        (erased,) = ring.erase(users(3))
        assert (erased.number, erased.id) == (ada.number, ada.id)
        assert sealed(image, ada) not in file.durable
        assert ring.by_number(ada.number, ada.id) is None


@pytest.mark.parametrize("over", [None, 17])
def test_a_copy_of_a_slot_is_erased_even_if_its_own_is_intact(over: int | None) -> None:
    """It was written to a free slot, or over another's, while the keyring was open."""
    keys, image = made()
    ada = keys[3]
    place = len(image[8192:]) // 128 - 1 if over is None else keys[over].number
    file = Memory(image)
    ring = opened(file)
    change_under(file, {place: image[at(ada.number)]})
    (erased, *more) = ring.erase(users(3))
    assert (erased.number, erased.id) == (ada.number, ada.id)
    assert {one.id for one in more} <= {ada.id}
    assert sealed(image, ada) not in file.durable
    others = users(*(number for number in range(COUNT) if number not in {3, over}))
    assert None not in keys_of(opened(bytes(file.durable)), others).values()


def test_nothing_is_destroyed_before_everything_is_checked() -> None:
    """A slot that can't be read when an erasure begins stops it before its first write."""
    keys, image = made()
    file = Memory(image)
    ring = opened(file)
    real = file.read

    def fail(page: int, count: int) -> bytes:
        if page == 2 + keys[39].number // 32:
            raise StorageError("The drive failed.")
        return real(page, count)

    assert keys[39].number // 32 != keys[3].number // 32
    file.read = fail  # type: ignore[method-assign]
    before = bytes(file.now)
    with pytest.raises(StorageError):
        ring.erase(users(3, 39))
    assert file.now == before
    file.read = real  # type: ignore[method-assign]
    assert keys_of(ring, users(3)) == {(ACME, user(3)): bytes(keys[3].key)}


@pytest.mark.parametrize("part", [0, 20, 40, 80, 126])
def test_damage_under_a_running_node_stops_no_erasure_and_affects_nobody_else(part: int) -> None:
    keys, image = made()
    file = Memory(image)
    ring = opened(file)
    broken = {}
    for number in (keys[3].number, keys[17].number):
        row = bytearray(image[at(number)])
        row[part] ^= 1
        broken[number] = bytes(row)
    change_under(file, broken)
    (other,) = ring.erase(users(5))
    assert other.id == keys[5].id
    assert file.durable[at(keys[17].number)] == broken[keys[17].number]
    (erased,) = ring.erase(users(3))
    assert (erased.number, erased.id) == (keys[3].number, keys[3].id)
    assert ring.by_number(keys[3].number, keys[3].id) is None
    assert file.durable[at(keys[3].number)][64:124] == bytes(60)
    assert file.durable[at(keys[17].number)] == broken[keys[17].number], (
        "whose it was is known: nobody named it"
    )
    refuses(ring, keys[17])


@pytest.mark.parametrize("part", [0, 20, 80])
def test_a_tenant_is_erased_completely_even_if_slots_were_damaged_meanwhile(part: int) -> None:
    """Its own key's slot among them."""
    ring, file = new_keyring()
    mine = ring.ensure(users(*range(COUNT)))
    (other,) = ring.ensure(users(1, tenant=ZETA))
    image = bytes(file.durable)
    own = ring._tenants[ACME][-1].number
    numbers = [own, mine[3].number, mine[30].number, other.number]
    rows = {}
    for number in numbers:
        row = bytearray(image[at(number)])
        row[part] ^= 1
        rows[number] = bytes(row)
    change_under(file, rows)
    answers = ring.erase_tenant(ACME)
    assert not [key for key in mine if sealed(image, key) in file.durable]
    assert image[at(own)][76:124] not in file.durable
    named = {one.number for one in answers}
    assert named >= {key.number for key in mine} | {own}
    assert {one.number for one in answers if one.id is None} >= {mine[3].number, mine[30].number}
    if part != 20:  # else its tenant can't be told
        assert file.durable[at(other.number)] == rows[other.number]
    again = opened(bytes(file.durable))
    assert not [key for key in keys_of(again, users(*range(COUNT))).values() if key]
    assert ZETA in again.tenants


def test_a_damaged_tenant_key_stops_no_put_and_one_erasure_clears_all() -> None:
    ring, file = new_keyring()
    shared = (ACME, bytes(16))
    keys = ring.ensure([shared, *users(1, 2)])
    own = ring._tenants[ACME][-1].number
    for part in (8, 20, 80):
        row = bytearray(file.durable[at(own)])
        row[part] ^= 1
        hurt = changed(bytes(file.durable), {own: bytes(row)})
        ring = opened(hurt)
        for key in keys:
            refuses(ring, key)
        fresh = ring.ensure([shared, *users(1)])
        assert not {key.number for key in fresh} & {key.number for key in keys}
        refuses(ring, keys[0])
        mended = opened(changed(bytes(hurt.durable), {own: bytes(file.durable[at(own)])}))
        back = mended.by_number(keys[2].number, keys[2].id)
        assert back is not None, "with its bytes back, all is as it was"
        assert back.key == keys[2].key
        found = mended.by_number(fresh[1].number, fresh[1].id)
        assert found is not None
        assert found.key == fresh[1].key
        ring.erase_tenant(ACME)
        wrapped = [sealed(bytes(file.durable), key) for key in keys]
        wrapped += [sealed(bytes(hurt.durable), key) for key in fresh]
        assert not [one for one in wrapped if any(one) and one in hurt.durable]
        assert ring.status().damaged == 0
        assert ring.ensure([shared])


def test_an_erasure_names_the_slots_that_it_could_not_read() -> None:
    keys, image = made()
    row = bytearray(image[at(keys[17].number)])
    row[80] ^= 1
    ring = opened(changed(image, {keys[17].number: bytes(row)}))
    mine, unread = ring.erase(users(3))
    assert mine.id == keys[3].id
    assert (unread.number, unread.id) == (keys[17].number, None)
    (never,) = ring.erase(users(17))
    assert (never.number, never.id) == (None, None)


def test_a_rotation_is_refused_while_a_slot_is_damaged_and_continues_afterwards() -> None:
    keys, image = made()
    row = bytearray(image[at(keys[17].number)])
    row[80] ^= 1
    for rows in ({keys[17].number: bytes(row)}, swapped(image, keys[3].number, keys[17].number)):
        ring = opened(changed(image, rows))
        before = bytes(ring._file.now)  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match=r"slots of the keyring are damaged.*accept-keyring"):
            ring.rotate_tenant(ACME)
        with pytest.raises(StorageError, match="slots of the keyring are damaged"):
            ring.rotate_master(master(1))
        assert ring._file.now == before  # type: ignore[attr-defined]
        assert len(ring.give_up_damaged()) == len(rows)
        assert ring.by_number(keys[17].number, keys[17].id) is None
        assert ring.rotate_tenant(ACME) == COUNT - len(rows)
        assert ring.rotating == []


def test_a_rotation_that_meets_damage_moves_the_others_and_keeps_the_old_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.sealing.slot_table.KEYRING_ROTATED_AT_ONCE", 8)
    keys, image = made()
    file = Memory(image)
    ring = opened(file)
    good = image[at(keys[30].number)]
    row = bytearray(good)
    row[80] ^= 1
    turns = 0

    def damage_then() -> bool:
        nonlocal turns
        turns += 1
        if turns == 2:
            change_under(file, {keys[30].number: bytes(row)})
        return True

    with pytest.raises(StorageError, match="slots of the keyring are damaged"):
        ring.rotate_tenant(ACME, damage_then)
    assert ring.rotating == [ACME]
    others = users(*(number for number in range(COUNT) if number != 30))
    assert None not in keys_of(ring, others).values()
    mended = opened(changed(bytes(file.durable), {keys[30].number: good}))
    assert mended.rotate_tenant(ACME) >= 1
    assert mended.rotating == []
    assert keys_of(mended, users(30)) == {(ACME, user(30)): bytes(keys[30].key)}


def test_a_key_damaged_under_a_running_node_refuses_no_put() -> None:
    ring, file = new_keyring()
    (old,) = ring.ensure(users(1))
    row = bytearray(file.durable[at(old.number)])
    row[80] ^= 1
    row[124:128] = crc32c(bytes(row[:124])).to_bytes(4, "little")  # only its tag tells
    change_under(file, {old.number: bytes(row)})
    (fresh,) = ring.ensure(users(1))
    assert fresh.number != old.number
    refuses(ring, old)


def test_slots_of_many_tenants_are_checked_each_with_its_own_tenants_key() -> None:
    ring, file = new_keyring()
    names = [(bytes([number % 7]) * 16, user(number)) for number in range(70)]
    keys = ring.ensure(names)
    assert opened(bytes(file.durable)).status().damaged == 0
    odd = keys[33]
    row = bytearray(file.durable[at(odd.number)])
    row[80] ^= 1  # of the wrapped key
    row[124:] = crc32c(row[:124]).to_bytes(4, "little")
    again = opened(changed(bytes(file.durable), {odd.number: bytes(row)}))
    assert again.status().damaged == 1
    refuses(again, odd)
    assert None not in keys_of(again, [name for name in names if name != names[33]]).values()
