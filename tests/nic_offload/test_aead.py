"""Encryption matches the specification of GCM, and nothing of a changed message is returned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nic_offload import aead

KEY = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
NONCE = bytes.fromhex("cafebabefacedbaddecaf888")
ASSOCIATED = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
PLAIN = bytes.fromhex(
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
)
SEALED = bytes.fromhex(
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
    "76fc6ece0f4e1768cddf8853bb2d551b"
)


def test_test_case_16_of_the_specification() -> None:
    assert aead.available() is None
    assert aead.seal(KEY, NONCE, ASSOCIATED, PLAIN) == SEALED
    assert aead.unseal(KEY, NONCE, ASSOCIATED, SEALED) == PLAIN


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 4096, 1 << 20])
def test_sealed_data_can_be_opened_and_has_its_own_length(length: int) -> None:
    data = os.urandom(length)
    sealed = aead.seal(KEY, NONCE, b"", data)
    assert len(sealed) == length + aead.TAG_BYTES
    assert aead.unseal(KEY, NONCE, b"", sealed) == data


@pytest.mark.parametrize("bit", range(0, 8 * len(SEALED), 7))
def test_a_flipped_bit_anywhere_opens_nothing(bit: int) -> None:
    changed = bytearray(SEALED)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(aead.NotAuthentic):
        aead.unseal(KEY, NONCE, ASSOCIATED, changed)


def test_another_key_nonce_or_context_opens_nothing_nor_does_truncated_data() -> None:
    for key, nonce, associated, sealed in (
        (bytes(32), NONCE, ASSOCIATED, SEALED),
        (KEY, bytes(12), ASSOCIATED, SEALED),
        (KEY, NONCE, ASSOCIATED[:-1], SEALED),
        (KEY, NONCE, ASSOCIATED, SEALED[:-1]),
        (KEY, NONCE, ASSOCIATED, b""),
    ):
        with pytest.raises(aead.NotAuthentic):
            aead.unseal(key, nonce, associated, sealed)


def test_a_wiped_secret_is_zeros() -> None:
    secret = bytearray(KEY)
    aead.wipe(secret)
    assert secret == bytes(32)


_ALONE = """
import hashlib
from nic_offload import aead
data = bytes(range(251)) * 4001
sealed = aead.seal(bytes(range(32)), bytes(12), b"said of it", data)
assert aead.unseal(bytes(range(32)), bytes(12), b"said of it", sealed) == data
print(aead.library() + ": " + hashlib.sha256(sealed).hexdigest())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="hides a file in a mount namespace: run as root")
def test_both_libraries_give_the_same_bytes_and_libcrypto_alone_is_enough() -> None:
    """IPSec-MB encrypts where it is installed and the CPU has VAES; otherwise libcrypto does."""
    hide = "for at in /usr/lib/*/libIPSec_MB.so.1; do [ ! -e $at ] || mount --bind /dev/null $at; done"
    script = [sys.executable, "-c", _ALONE]
    here = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout
    bare = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{hide}; exec "$@"', "sh", *script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    library, _, digest = bare.partition(": ")
    assert library == "OpenSSL's libcrypto.so.3"
    assert here.partition(": ")[2] == digest
    if {"vaes", "avx512f"} <= set(Path("/proc/cpuinfo").read_text(encoding="ascii").split()):
        assert here.startswith("Intel's libIPSec_MB.so.1: ")
