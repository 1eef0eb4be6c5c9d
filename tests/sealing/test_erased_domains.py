"""Erased domains are known by blocks' keys alone, all of them, after restarts, and not while they are in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.names import SHARED, block_key, domain_of, domain_tag, fits_domain, in_domain
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.masters import new_master_file
from kvstore.sealing.slot_table import SlotTable
from kvstore.sealing.store_keys import keys_opener
from nic_offload import wrapped_keys
from tests.sealing.rig import ACME, STORE, ZETA, FakeClock, master

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.sealing.store_keys import StoreKeys

ADA, BOB, EVE = (domain_of(user) for user in ("ada", "bob", "eve"))
NOBODYS = bytes(16)
WAIT_S = 20
MANY = 2000


def key(number: int, domain: bytes = b"") -> bytes:
    return in_domain(block_key(number.to_bytes(4)), domain)


def test_a_key_fits_only_the_domain_that_it_was_made_for() -> None:
    for domain in (ADA, BOB):
        assert fits_domain(key(1, domain), domain)
        assert not fits_domain(key(1, domain), EVE)
        assert not fits_domain(key(1, domain), SHARED)
        assert not fits_domain(key(1), domain)
    assert fits_domain(key(1), SHARED)
    assert key(1, ADA)[-12:] == key(2, ADA)[-12:], "which is how its domain is found among millions"
    assert key(1, ADA)[:20] != key(2, ADA)[:20]


def test_the_c_core_gives_domains_the_same_tags() -> None:
    domains = [ADA, BOB, EVE, NOBODYS, bytes(range(16))]
    tags = np.frombuffer(wrapped_keys.domain_tags(b"".join(domains)), "<u8")
    assert [int(tag).to_bytes(8, "little") for tag in tags] == [domain_tag(one) + b"\0\0" for one in domains]
    assert len(set(tags.tolist())) == len(domains)


def test_a_keyring_remembers_every_erased_domain_until_it_is_used_again(tmp_path: Path) -> None:
    path, clock = keyring_path(tmp_path), FakeClock()
    Keyring.create(path, master(), STORE, clock)
    domains = [domain_of(f"user {number}") for number in range(MANY)]

    def erased(ring: Keyring) -> list[int | None]:
        return [ring.erased_ms(ACME, domain_tag(one)) for one in domains]

    with Keyring.open(path, master(), STORE, clock) as ring:
        assert erased(ring) == [None] * MANY
        for one in ring.ensure([(ACME, one) for one in domains] + [(ZETA, ADA)]):
            one.close()
        assert erased(ring) == [None] * MANY
        clock.now_ms += 5
        ring.erase([(ACME, one) for one in domains[1:]])
        at_ms = clock.now_ms
        assert erased(ring) == [None, *[at_ms] * (MANY - 1)]
        assert ring.erased_ms(ZETA, domain_tag(domains[1])) is None, "another tenant's user of the same name"
    with Keyring.open(path, master(), STORE, clock) as ring:
        assert erased(ring) == [None, *[at_ms] * (MANY - 1)]
        ring.ensure([(ACME, domains[1])])[0].close()
        assert erased(ring) == [None, None, *[at_ms] * (MANY - 2)]
        clock.now_ms += 5
        ring.erase_tenant(ACME)
        assert erased(ring) == [*[clock.now_ms] * 2, *[at_ms] * (MANY - 2)]


def test_two_domains_with_one_tag_are_two_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag has 48 bits, so a name with the tag of another can be searched for."""
    monkeypatch.setattr("kvstore.sealing.slot_table.domain_tag", lambda _: bytes(6))
    monkeypatch.setattr(wrapped_keys, "domain_tags", lambda domains: bytearray(len(domains) // 2))
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE, FakeClock())
    names = [(ACME, ADA), (ACME, BOB)]
    with Keyring.open(path, master(), STORE, FakeClock()) as ring:
        keys = ring.ensure(names)
        assert bytes(keys[0].key) != bytes(keys[1].key)
        assert [one.number for one in ring.ensure(names)] == [one.number for one in keys]
        ring._slots._sort_in()
        assert [one.number for one in ring.ensure(names)] == [one.number for one in keys]
    with Keyring.open(path, master(), STORE, FakeClock()) as ring:
        ring.erase([(ACME, ADA)])
        assert ring.domain(ACME, ADA) is None
        assert ring.domain(ACME, BOB) is not None
        assert ring.erased_ms(ACME, bytes(6)) is None, "one of them is in use"


def test_any_number_of_unknown_keys_costs_one_look_up_per_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = opened(tmp_path)
    made(keys, ADA, BOB)
    keys.erase(ACME, [ADA]).result(WAIT_S)
    looked, read = list[bytes](), list[int]()
    tagged, row = SlotTable.tagged, SlotTable.row

    def counted(table: SlotTable, tenant: bytes, tag: bytes) -> object:
        looked.append(tag)
        return tagged(table, tenant, tag)

    def counted_row(table: SlotTable, number: int) -> bytes:
        read.append(number)
        return row(table, number)

    monkeypatch.setattr(SlotTable, "tagged", counted)
    monkeypatch.setattr(SlotTable, "row", counted_row)
    asked = [key(number, domain) for number in range(300) for domain in (ADA, BOB, EVE)]
    found = keys.erased_ms(ACME, asked)
    assert [one is not None for one in found] == [True, False, False] * 300
    assert len(looked) == 3
    assert len(read) == 2, "of a domain that never had a key nothing is read"
    keys.close()


def test_the_keys_of_a_store_know_it_at_once_and_after_a_restart(tmp_path: Path) -> None:
    keys = opened(tmp_path)
    asked = [key(1, ADA), key(2, BOB), key(3)]
    assert keys.erased_ms(ACME, asked) == [None] * 3
    made(keys, ADA, BOB, NOBODYS)
    keys.erase(ACME, [ADA]).result(WAIT_S)
    (at_ms, *others) = keys.erased_ms(ACME, asked)
    assert at_ms is not None
    assert others == [None, None]
    keys.close()
    keys = opened(tmp_path)
    assert keys.erased_ms(ACME, asked) == [at_ms, None, None]
    made(keys, ADA)
    assert keys.erased_ms(ACME, asked) == [None] * 3
    keys.erase(ACME, None).result(WAIT_S)
    keys.close()
    keys = opened(tmp_path)
    assert None not in keys.erased_ms(ACME, asked), "what its users share is erased with the tenant"
    assert keys.erased_ms(ZETA, asked) == [None] * 3
    keys.close()


def opened(folder: Path) -> StoreKeys:
    if not (folder / "master.key").exists():
        new_master_file(folder / "master.key")
    open_keys = keys_opener(folder, f"file:{folder}/master.key")
    assert open_keys is not None
    return open_keys(STORE, [])


def made(keys: StoreKeys, *domains: bytes) -> None:
    for domain in domains:
        keys.ensure(ACME, domain, lambda _: None)
    keys._worker.submit(lambda: None).result(WAIT_S)
