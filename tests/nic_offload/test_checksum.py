"""CRC32C, by instruction and by table, against another implementation and the standard's values."""

from __future__ import annotations

import random

import crc32c as other
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nic_offload._core import ffi, lib

from nic_offload.checksum import crc32c, crc32c_at

LANES = 3 * 2048  # what the hardware variant takes at a time


def without_isal(data: bytes, seed: int = 0) -> int:
    return int(lib.tk_crc32c_own(ffi.from_buffer(data), len(data), seed))


def test_the_set_up_has_installed_isal() -> None:
    assert lib.tk_crc32c_is_isal(), "or the tests below compare our own loop with itself"


def by_table(data: bytes, seed: int = 0) -> int:
    return int(lib.tk_crc32c_table(ffi.from_buffer(data), len(data), seed))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_values(data: bytes, value: int) -> None:
    assert (crc32c(data), without_isal(data), by_table(data)) == (value, value, value)


@settings(deadline=None, max_examples=200, database=None)
@given(
    length=st.one_of(
        st.integers(0, 100), st.integers(0, 4 * LANES), st.integers(-8, 8).map(lambda i: LANES + i)
    ),
    offset=st.integers(0, 15),
    seed=st.integers(0, (1 << 32) - 1),
    content=st.integers(0, 1 << 32),
)
def test_it_equals_another_implementation(length: int, offset: int, seed: int, content: int) -> None:
    data = random.Random(content).randbytes(offset + length)
    view = ffi.from_buffer(data)
    address = int(ffi.cast("uintptr_t", view)) + offset
    wanted = other.crc32c(data[offset:], seed)
    assert crc32c_at(address, length, seed) == wanted
    assert by_table(data[offset:], seed) == without_isal(data[offset:], seed) == wanted
    assert crc32c(memoryview(data)[offset:], seed) == wanted


def test_a_long_checksum_in_pieces_equals_the_whole() -> None:
    data = random.Random(1).randbytes((4 << 20) + 5)
    whole = crc32c(data)
    assert whole == other.crc32c(data)
    assert by_table(data) == without_isal(data) == whole
    for cut in (1, 4096, LANES, len(data) - 1):
        assert crc32c(data[cut:], crc32c(data[:cut])) == whole


@pytest.mark.parametrize("length", [256 << 10, 512 << 10, 1 << 20, 4 << 20])
def test_the_last_byte_of_a_round_length_counts(length: int) -> None:
    data = bytearray(random.Random(3).randbytes(length))
    whole = crc32c(data)
    assert whole == other.crc32c(bytes(data)) == by_table(bytes(data))
    data[-1] ^= 1
    assert crc32c(data) != whole
    assert by_table(bytes(data)) != whole


def test_every_bit_counts() -> None:
    data = bytearray(random.Random(2).randbytes(LANES + 9))
    whole = crc32c(data)
    for at in (0, 1, 2047, 2048, 4096, LANES - 1, LANES, LANES + 8):
        data[at] ^= 0x10
        assert crc32c(data) != whole
        data[at] ^= 0x10
    assert crc32c(data) == whole


def test_siphash_gives_its_authors_test_values() -> None:
    """With the key 00 to 0f and the bytes from 00 on, by their number."""
    secret = ffi.new("uint64_t[2]", [0x0706050403020100, 0x0F0E0D0C0B0A0908])
    known = {
        0: 0x726FDB47DD0E0E31,
        1: 0x74F839C593DC67FD,
        7: 0xAB0200F58B01D137,
        8: 0x93F5F5799A932462,
        15: 0xA129CA6149BE45E5,
    }
    for length, value in known.items():
        assert lib.tk_siphash(secret, bytes(range(length)), length) == value
