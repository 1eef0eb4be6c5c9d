"""Rotation of master and tenant keys: domain keys stay, old wrapping keys are destroyed, others change meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Corrupt, WrongMasterKey
from kvstore.sealing import slots
from nic_offload import aead
from tests.sealing.rig import ACME, STORE, ZETA, Memory, at, keys_of, master, new_keyring, opened, user, users

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.sealing.keyring import Name
    from kvstore.sealing.master_key import LocalMaster


def test_rotation_of_a_tenant_keeps_domain_keys_and_destroys_its_old_key() -> None:
    keyring, file = new_keyring()
    names = users(*range(100))
    keys = {(key.tenant, key.domain): bytes(key.key) for key in keyring.ensure(names)}
    keyring.erase(users(5))
    keys[ACME, user(5)] = None  # type: ignore[assignment]
    old = keyring._tenants[ACME][0].slot
    assert keyring.rotate_tenant(ACME) == 99
    assert keyring.rotate_tenant(b"nobody".ljust(16)) == 0
    for ring in (keyring, opened(bytes(file.durable))):
        assert keys_of(ring, names) == keys
        assert ring.status().tenants == ((ACME, 2),)
        assert ring.status().rotating == ()
    assert old.sealed[12:] not in file.durable
    assert old.id not in file.durable


def test_rotation_of_the_master_key_replaces_the_root_and_no_domain_key() -> None:
    keyring, file = new_keyring()
    names = [*users(*range(10)), (ZETA, user(1))]
    keys = {(key.tenant, key.domain): bytes(key.key) for key in keyring.ensure(names)}
    store_key, old = bytes(keyring.store_key), bytes(file.durable)
    root = keyring._header.root
    keyring.rotate_master(master(1))
    assert keys_of(keyring, names) == keys
    image = bytes(file.durable)
    with pytest.raises(WrongMasterKey):
        opened(image)
    ring = opened(image, 1)
    assert keys_of(ring, names) == keys
    assert ring.store_key == store_key
    assert root.id not in image
    assert root.wrapped not in image
    # With the old master key and an old copy somebody has the old root key, which opens nothing of the new file.
    spy = opened(old)
    for number in range(len(ring._slots)):
        slot = slots.parse_slot(image[at(number)])
        if slot is not None and slot.kind != slots.Kind.DOMAIN:
            with pytest.raises(Corrupt):
                slots.unwrapped(slot, spy._root, STORE, number)
    ring.rotate_master(master(1))  # the same again: as when a key of Vault has another version
    assert keys_of(ring, names) == keys


def reachable(file: Memory, masters: list[LocalMaster]) -> set[bytes]:
    """All keys that these master keys can open in anything ever written to a file."""
    roots = {
        slots.parse_header([data[:512]]).root for page, data in file.written if page < slots.HEADER_PAGES
    }
    rows = {
        ((page - slots.HEADER_PAGES) * 32 + place, data[place * 128 :][:128])
        for page, data in file.written
        if page >= slots.HEADER_PAGES
        for place in range(32)
    }
    found: dict[bytes, bytes] = {}
    for root_id, blob in roots:
        for one in masters:
            with suppress(WrongMasterKey):
                found[root_id] = bytes(one.unwrap(slots.root_associated(STORE, root_id), blob))
    keys: set[bytes] = set()
    for _ in range(3):  # from root keys to those of tenants, and on to those of domains
        for number, row in rows:
            slot = slots.parse_slot(row)
            if slot is not None and slot.wrapped_by in found:
                key = bytes(slots.unwrapped(slot, found[slot.wrapped_by], STORE, number))
                found[slot.id] = key
                keys.add(key)
    return keys


@pytest.mark.parametrize("rotates", ["tenant, master", "master, tenant", "master", "tenant", ""])
def test_old_sectors_and_copies_need_the_old_master_key_once_both_were_rotated(rotates: str) -> None:
    """docs/sealing.md: first each tenant's key, then the master key; then the old one can be destroyed."""
    keyring, file = new_keyring()
    (one, two) = keyring.ensure(users(1, 2))
    keyring.erase(users(1))
    for what in filter(None, rotates.split(", ")):
        if what == "tenant":
            keyring.rotate_tenant(ACME)
        else:
            keyring.rotate_master(master(1))
    assert {bytes(one.key), bytes(two.key)} < reachable(file, [master(), master(1)])
    by_new = reachable(file, [master(1)])
    assert (bytes(two.key) in by_new) == ("master" in rotates)
    assert (bytes(one.key) in by_new) == (rotates in ("master, tenant", "master"))


@pytest.mark.parametrize(
    "meanwhile", ["rotate the master", "rotate the tenant", "erase the tenant", "erase", "ensure"]
)
def test_a_tenant_is_rotated_while_others_change_the_keyring(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    monkeypatch.setattr("kvstore.sealing.slot_table.KEYRING_ROTATED_AT_ONCE", 7)
    keyring, file = new_keyring()
    names = users(*range(50))
    keys: dict[Name, bytes | None] = {
        (key.tenant, key.domain): bytes(key.key) for key in keyring.ensure(names)
    }
    turns = []
    real = keyring._rewrap_domains

    def after_some(numbers: Sequence[int], old_id: bytes, new_id: bytes) -> int:
        turns.append(len(numbers))
        if len(turns) == 3:
            if meanwhile == "rotate the master":
                keyring.rotate_master(master(1))
            elif meanwhile == "rotate the tenant":
                keyring.rotate_tenant(ACME)
            elif meanwhile == "erase the tenant":
                keyring.erase_tenant(ACME)
                keys.update(dict.fromkeys(names))
            elif meanwhile == "erase":
                keyring.erase(users(1, 49))
                keys.update(dict.fromkeys(users(1, 49)))
            else:
                keys.update({(key.tenant, key.domain): bytes(key.key) for key in keyring.ensure(users(99))})
        return real(numbers, old_id, new_id)

    monkeypatch.setattr(keyring, "_rewrap_domains", after_some)
    keyring.rotate_tenant(ACME)
    last = opened(bytes(file.durable), 1 if meanwhile == "rotate the master" else 0)
    for ring in (keyring, last):
        assert keys_of(ring, [*keys]) == keys
        assert ring.status().rotating == ()
        assert ring.status().tenants == (() if meanwhile == "erase the tenant" else ((ACME, 2),))
    assert keyring.status() == last.status()


def test_an_opening_hands_out_no_domain_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keyring, file = new_keyring()
    keyring.ensure(users(*range(300)))
    seen: list[bytes] = []
    real = aead.unseal_key

    def counted(key: memoryview, nonce: bytes, associated: bytes, sealed: bytes) -> memoryview:
        seen.append(associated)
        return real(key, nonce, associated, sealed)

    monkeypatch.setattr(aead, "unseal_key", counted)
    opened(bytes(file.durable))
    assert len(seen) == 5, "the root key; the store's and the tenant's, which are checked first"
