"""The keys of an open store: made, evicted, and never handed out twice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import QuotaExceeded
from kvstore.sealing import store_keys
from kvstore.sealing.masters import new_master_file
from kvstore.sealing.store_keys import StoreKeys, keys_opener

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nic_offload.vault import KeyName

TENANT, DOMAIN = b"tenant".ljust(16, b"."), b"domain".ljust(16, b".")
WAIT_S = 20


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[StoreKeys]:
    new_master_file(tmp_path / "master.key")
    open_keys = keys_opener(tmp_path, f"file:{tmp_path}/master.key")
    assert open_keys is not None
    opened = open_keys(bytes(16), [])
    yield opened
    opened.close()


def made(keys: StoreKeys, domain: bytes = DOMAIN) -> KeyName:
    woken = threading.Event()
    keys.on_finished(woken.set)
    errors: list[object] = []
    keys.ensure(TENANT, domain, errors.append)
    assert woken.wait(WAIT_S)
    keys.settle_finished()
    assert errors == [None]
    name = keys.name_of(TENANT, domain)
    assert name is not None
    return name


@pytest.mark.parametrize("whole_tenant", [False, True])
def test_a_key_read_while_it_is_erased_is_not_used_afterwards(keys: StoreKeys, *, whole_tenant: bool) -> None:
    """Data encrypted with it would be acknowledged, and unreadable after the next start."""
    name, domains = made(keys), None if whole_tenant else [DOMAIN]
    go_on = threading.Event()
    keys._worker.submit(go_on.wait, WAIT_S)
    erasing = keys.erase(TENANT, domains)
    assert len(keys.vault) == 0
    assert keys.name_of(TENANT, DOMAIN) is None
    assert keys.load(name), "it is there still, for those that read"
    assert keys.name_of(TENANT, DOMAIN) is None, "but not for those that write"
    go_on.set()
    assert name.number in {key.number for key in erasing.result(WAIT_S)}
    keys.erased(TENANT, domains)
    assert len(keys.vault) == 0
    assert not keys.load(name)
    assert keys.name_of(TENANT, DOMAIN) is None
    assert made(keys).id != name.id


@pytest.mark.parametrize("whole_tenant", [False, True])
def test_a_key_that_is_only_read_leaves_the_vault_when_it_is_erased(
    keys: StoreKeys, monkeypatch: pytest.MonkeyPatch, *, whole_tenant: bool
) -> None:
    """Its name is no longer known, since many others were put; reads have kept it in the vault."""
    monkeypatch.setattr(store_keys, "VAULT_NAMES_MAX", 1)
    name, domains = made(keys), None if whole_tenant else [DOMAIN]
    made(keys, b"other".ljust(16, b"."))
    assert len(keys.vault) == 2
    keys.erase(TENANT, domains).result(WAIT_S)
    keys.erased(TENANT, domains)
    assert len(keys.vault) == (0 if whole_tenant else 1)
    assert not keys.load(name)


def test_another_domains_key_stays(keys: StoreKeys) -> None:
    other = made(keys, b"other".ljust(16, b"."))
    made(keys)
    keys.erase(TENANT, [DOMAIN]).result(WAIT_S)
    keys.erased(TENANT, [DOMAIN])
    assert keys.name_of(TENANT, b"other".ljust(16, b".")) == other
    assert len(keys.vault) == 1


def test_a_tenant_with_too_many_keys_does_not_keep_another_from_getting_one(
    keys: StoreKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both request one at once."""
    monkeypatch.setattr("kvstore.sealing.slot_table.KEYRING_TENANT_KEYS_MAX", 1)
    made(keys)
    go_on, told, woken = threading.Event(), dict[str, object](), threading.Event()
    keys.on_finished(woken.set)
    keys._worker.submit(go_on.wait, WAIT_S)
    for name, tenant, domain in (
        ("too many", TENANT, b"more".ljust(16, b".")),
        ("known", TENANT, DOMAIN),
        ("another's", b"umbrella".ljust(16, b"."), DOMAIN),
    ):
        keys.ensure(tenant, domain, lambda error, name=name: told.update({name: error}))  # type: ignore[misc]
    go_on.set()
    assert woken.wait(WAIT_S)
    keys.settle_finished()
    assert isinstance(told.pop("too many"), QuotaExceeded)
    assert told["another's"] is None
    assert keys.name_of(b"umbrella".ljust(16, b"."), DOMAIN) is not None
