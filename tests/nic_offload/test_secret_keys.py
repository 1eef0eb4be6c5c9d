"""Memory for keys, and texts encrypted with them."""

from __future__ import annotations

import ctypes
import os

import pytest

from nic_offload.aead import NONCE_BYTES, NotAuthentic, seal, unseal_key
from nic_offload.secret_keys import KEY_BYTES, are_locked, key_of, new_key, wipe
from nic_offload.vault import DOMAIN_BYTES, KeyName, Vault
from tests.node.test_core_dumps import flags_at

OWNER, DOMAIN, NONCE = bytes(16), bytes(DOMAIN_BYTES), bytes(NONCE_BYTES)


def address_of(key: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(key))


def test_keys_are_excluded_from_dumps_and_locked_and_zeros_once_wiped() -> None:
    keys = [key_of(bytearray(os.urandom(KEY_BYTES))) for _ in range(5000)]  # more than a chunk has
    places = [address_of(key) for key in keys]
    assert len(set(places)) == len(keys)
    for place in (places[0], places[-1]):
        assert "dd" in flags_at(place)
        assert ("lo" in flags_at(place)) or not are_locked()
    secret = bytes(keys[0])
    assert ctypes.string_at(places[0], KEY_BYTES) == secret
    for key in keys:
        wipe(key)
    assert not any(any(ctypes.string_at(place, KEY_BYTES)) for place in places)
    again = new_key()
    assert address_of(again) in places
    wipe(again)


def test_a_wiped_key_is_unusable_and_its_place_reused_once() -> None:
    key = key_of(bytearray(os.urandom(KEY_BYTES)))
    wipe(key)
    wipe(key)
    with pytest.raises(ValueError, match="released"):
        bytes(key)
    one, other = new_key(), new_key()
    assert address_of(one) != address_of(other), "though it was wiped twice"
    wipe(one)
    wipe(other)


def test_a_secret_moved_into_it_is_nowhere_else_and_a_bytearray_stays_usable() -> None:
    secret = bytearray(os.urandom(KEY_BYTES))
    was = bytes(secret)
    key = key_of(secret)
    assert (key == was, secret) == (True, bytearray(KEY_BYTES))
    wipe(key)


def test_a_key_is_unsealed_into_it_or_not_at_all() -> None:
    by, secret = os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)
    sealed = seal(by, NONCE, b"of it", secret)
    key = unseal_key(by, NONCE, b"of it", sealed)
    assert key == secret
    wipe(key)
    for bad in (sealed[:-1], sealed + b"x", sealed[:-1] + bytes([sealed[-1] ^ 1]), b""):
        with pytest.raises(NotAuthentic):
            unseal_key(by, NONCE, b"of it", bad)


def test_a_text_opens_only_with_its_key_nonce_and_context() -> None:
    name, text = KeyName(3, 77), b"a label"
    with Vault(4) as vault:
        assert vault.seal_text(name, NONCE, b"of it", text) is None, "its key is not there"
        vault.put(OWNER, DOMAIN, name, os.urandom(KEY_BYTES))
        sealed = vault.seal_text(name, NONCE, b"of it", text)
        assert sealed is not None
        assert text not in sealed
        assert vault.unseal_text(name, NONCE, b"of it", sealed) == text
        assert vault.unseal_text(KeyName(3, 78), NONCE, b"of it", sealed) is None
        for nonce, of, what in (
            (b"n" * 12, b"of it", sealed),
            (NONCE, b"of", sealed),
            (NONCE, b"of it", b""),
        ):
            with pytest.raises(NotAuthentic):
                vault.unseal_text(name, nonce, of, what)
        vault.drop(3)
        assert vault.unseal_text(name, NONCE, b"of it", sealed) is None
