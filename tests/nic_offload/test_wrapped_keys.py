"""The C core's check of a keyring's slots accepts exactly the complete and authentic ones."""

from __future__ import annotations

import os
import struct

import pytest

from nic_offload import aead, wrapped_keys
from nic_offload.checksum import crc32c

KEYS = os.urandom(32), os.urandom(32)
STORE = os.urandom(16)


def slot(number: int, key: bytes) -> bytes:
    """A slot with random content and a random key."""
    clear, nonce = os.urandom(64), os.urandom(12)
    associated = STORE + struct.pack("<I", number) + clear
    row = clear + nonce + aead.seal(key, nonce, associated, os.urandom(32))
    return row + struct.pack("<I", crc32c(row))


def which(*rows: tuple[int, int]) -> bytes:
    """The rows as the core takes them."""
    return b"".join(struct.pack("=II", *row) for row in rows)


def test_each_slot_is_checked_with_its_own_key_and_number() -> None:
    slots = b"".join(slot(1000 + row, KEYS[row % 2]) for row in range(100))
    asked = which(*((row, 1000 + row) for row in range(100)))
    assert wrapped_keys.are_authentic(KEYS[0], STORE, slots, asked) == bytes([1, 0]) * 50
    assert wrapped_keys.are_authentic(KEYS[1], STORE, slots, asked) == bytes([0, 1]) * 50
    assert wrapped_keys.are_authentic(os.urandom(32), STORE, slots, asked) == bytes(100)
    assert wrapped_keys.are_authentic(KEYS[0], os.urandom(16), slots, asked) == bytes(100)
    elsewhere = which((0, 1001), (2, 1000), (4, 1004), (4, 1004))  # two that were swapped, and one twice
    assert wrapped_keys.are_authentic(KEYS[0], STORE, slots, elsewhere) == bytes([0, 0, 1, 1])
    assert wrapped_keys.are_authentic(KEYS[0], STORE, slots, b"") == b""


def test_a_changed_bit_damages_only_its_slot() -> None:
    good = slot(7, KEYS[0])
    for bit in range(0, 8 * 124, 5):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        slots = good + changed + good
        assert wrapped_keys.are_whole(slots) == bytes([1, 0, 1])
        asked = which((0, 7), (1, 7), (2, 7))
        assert wrapped_keys.are_authentic(KEYS[0], STORE, slots, asked) == bytes([1, 0, 1]), bit


def test_zeros_are_not_a_valid_slot() -> None:
    assert wrapped_keys.are_whole(bytes(256)) == bytes(2)
    assert wrapped_keys.are_whole(b"") == b""


def test_a_slot_that_was_not_passed_is_not_checked() -> None:
    with pytest.raises(AssertionError):
        wrapped_keys.are_authentic(KEYS[0], STORE, slot(0, KEYS[0]), which((1, 0)))
