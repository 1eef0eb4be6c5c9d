"""Domains that were erased: told by keys alone, the latest ones, not while they are in use, and in bounded work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.limits import (
    ERASED_DOMAINS_COMPARED_MAX,
    ERASED_DOMAINS_LOADED_MAX,
    ERASED_SEARCHES_MAX,
    ERASED_TENANTS_KNOWN_MAX,
)
from kvstore.names import block_key, domain_of, fits_domain, fitting_domain, in_domain
from kvstore.sealing import erased_domains
from kvstore.sealing.erased_domains import ErasedDomains
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.masters import new_master_file
from kvstore.sealing.store_keys import keys_opener
from tests.sealing.rig import ACME, STORE, ZETA, FakeClock, master

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from kvstore.sealing.store_keys import StoreKeys

ADA, BOB, EVE = (domain_of(user) for user in ("ada", "bob", "eve"))
WAIT_S = 20


def key(number: int, domain: bytes = b"") -> bytes:
    return in_domain(block_key(number.to_bytes(4)), domain)


def test_of_domains_the_one_that_a_key_was_made_for_fits() -> None:
    for domain in (ADA, BOB):
        assert fits_domain(key(1, domain), domain)
        assert fitting_domain(key(1, domain), [EVE, ADA, BOB]) == domain
    assert fitting_domain(key(1, EVE), [ADA, BOB]) is None
    assert fitting_domain(key(1, EVE), []) is None
    assert fitting_domain(key(1), [ADA, BOB]) is None


def test_a_block_of_an_erased_domain_is_erased_until_the_domain_is_in_use_again() -> None:
    known = ErasedDomains([(ACME, ADA, 5), (ACME, BOB, 6), (ZETA, EVE, 7)])
    asked = [key(1, ADA), key(2, BOB), key(3, EVE), key(4)]
    assert known.erased_ms(ACME, asked) == [5, 6, None, None]
    assert known.erased_ms(ZETA, asked) == [None, None, 7, None]
    assert known.erased_ms(b"another".ljust(16), asked) == [None] * 4
    known.in_use(ACME, ADA)
    assert known.erased_ms(ACME, asked) == [None, 6, None, None]
    known.note(ACME, ADA, 9)
    known.in_use(ZETA, ADA)
    assert known.erased_ms(ACME, asked) == [9, 6, None, None]


def test_a_tenants_latest_are_compared_and_no_more() -> None:
    domains = [domain_of(f"user {number}") for number in range(ERASED_DOMAINS_COMPARED_MAX + 2)]
    known = ErasedDomains((ACME, domain, number) for number, domain in enumerate(domains))
    told = [known.erased_ms(ACME, [key(1, domain)])[0] for domain in domains]
    assert told == [None, None, *range(2, len(domains))]
    known.note(ACME, domains[2], 1000)
    known.note(ACME, domains[0], 1001)
    told = [known.erased_ms(ACME, [key(1, domain)])[0] for domain in domains[:5]]
    assert told == [1001, None, 1000, None, 4]


def test_tenants_are_bounded() -> None:
    tenants = [number.to_bytes(16) for number in range(ERASED_TENANTS_KNOWN_MAX + 1)]
    known = ErasedDomains((tenant, ADA, 1) for tenant in tenants)
    assert known.erased_ms(tenants[0], [key(1, ADA)]) == [None]
    assert known.erased_ms(tenants[1], [key(1, ADA)]) == [1]


def test_any_number_of_unknown_keys_costs_a_bounded_number_of_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0

    def counted(one: bytes, domains: Iterable[bytes]) -> bytes | None:
        nonlocal compared
        compared += len(list(domains))
        return fitting_domain(one, domains)

    monkeypatch.setattr(erased_domains, "fitting_domain", counted)
    known = ErasedDomains((ACME, domain_of(str(number)), 1) for number in range(ERASED_DOMAINS_COMPARED_MAX))
    most = ERASED_SEARCHES_MAX * ERASED_DOMAINS_COMPARED_MAX
    assert known.erased_ms(ACME, [key(number, EVE) for number in range(1000)]) == [None] * 1000
    assert 0 < compared <= most
    compared = 0
    assert known.erased_ms(ACME, [key(number) for number in range(1000)]) == [None] * 1000
    assert compared == 0, "a shared key is of no domain"
    own = domain_of("0")
    assert known.erased_ms(ACME, [key(number, own) for number in range(1000)]) == [1] * 1000
    assert compared <= ERASED_DOMAINS_COMPARED_MAX + 1000, (
        "the others are compared with what the first was of"
    )


def test_a_keyring_says_which_domains_have_no_key_any_more_the_latest_last(tmp_path: Path) -> None:
    path, clock = keyring_path(tmp_path), FakeClock()
    Keyring.create(path, master(), STORE, clock)
    with Keyring.open(path, master(), STORE, clock) as ring:
        assert ring.erased(10) == []
        for one in ring.ensure([(ACME, ADA), (ACME, BOB), (ACME, EVE), (ZETA, ADA)]):
            one.close()
        for name in ((ZETA, ADA), (ACME, EVE), (ACME, BOB)):
            ring.erase([name])
        ring.ensure([(ACME, EVE)])[0].close()
        assert [one[:2] for one in ring.erased(10)] == [(ZETA, ADA), (ACME, BOB)]
        assert [one[:2] for one in ring.erased(1)] == [(ACME, BOB)]
        ring.erase_tenant(ACME)
    with Keyring.open(path, master(), STORE, clock) as ring:
        assert {one[:2] for one in ring.erased(10)} == {(ZETA, ADA), (ACME, ADA), (ACME, BOB), (ACME, EVE)}
        assert ring.erased(10)[-1][2] == ring.erased_ms(*ring.erased(10)[-1][:2])


def test_the_keys_of_a_store_know_it_at_once_and_after_a_restart(tmp_path: Path) -> None:
    new_master_file(tmp_path / "master.key")
    open_keys = keys_opener(tmp_path, f"file:{tmp_path}/master.key")
    assert open_keys is not None
    keys = open_keys(STORE, [])
    asked = [key(1, ADA), key(2, BOB), key(3)]
    assert keys.erased_ms(ACME, asked) == [None] * 3
    made(keys, ADA, BOB)
    keys.erase(ACME, [ADA]).result(WAIT_S)
    (at_ms, *others) = keys.erased_ms(ACME, asked)
    assert at_ms is not None
    assert others == [None, None]
    keys.close()
    keys = open_keys(STORE, [])
    assert keys.erased_ms(ACME, asked) == [at_ms, None, None]
    made(keys, ADA)
    assert keys.erased_ms(ACME, asked) == [None] * 3
    keys.erase(ACME, None).result(WAIT_S)
    assert [one is None for one in keys.erased_ms(ACME, asked)] == [False, False, True]
    keys.close()


def test_the_page_has_these_bounds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sealing.md").read_text()
    assert f"all but the {ERASED_DOMAINS_COMPARED_MAX} that were erased last" in page
    assert f"all but the {ERASED_DOMAINS_LOADED_MAX} that were erased last in the store" in page
    assert f"asked for together: {ERASED_SEARCHES_MAX} of them are compared" in page


def made(keys: StoreKeys, *domains: bytes) -> None:
    for domain in domains:
        keys.ensure(ACME, domain, lambda _: None)
    keys._worker.submit(lambda: None).result(WAIT_S)
