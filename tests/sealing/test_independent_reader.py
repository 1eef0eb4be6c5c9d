"""An independent reader, written from `docs/sealing.md` alone, and the page's vectors; it imports no codec."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

from crc32c import crc32c

from nic_offload import aead
from tests.sealing.rig import ACME, STORE, ZETA, keys_of, master, new_keyring, users

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sealing.md").read_text()
Keys = dict[tuple[int, bytes, bytes], bytes]  # of kind, tenant, domain


def read_keyring(image: bytes, master_key: bytes) -> tuple[Keys, dict[tuple[bytes, bytes], int]]:
    """All keys, and when the destroyed ones were destroyed."""
    headers = [image[at : at + 512] for at in (0, 4096)]
    good = [
        one
        for one in headers
        if one[:8] == b"TKVKEYRG" and crc32c(one[:508]) == struct.unpack("<I", one[508:])[0]
    ]
    header = max(good, key=lambda one: struct.unpack_from("<Q", one, 32)[0])
    assert header[8:12] == b"\2\0\0\0"
    count = int.from_bytes(header[304:308], "little")
    store = header[16:32]
    digest = hashlib.blake2b(master_key, digest_size=8, person=b"tkv master").hexdigest()
    assert header[48:112].rstrip(b"\0").decode() == f"key:{digest}"
    root_id, length = struct.unpack_from("<8sI", header, 112)
    blob = header[124 : 124 + length]
    wrapping = {root_id: aead.unseal(master_key, blob[:12], b"tkv root" + store + root_id, blob[12:])}
    keys: Keys = {}
    gone = {}
    versions: dict[bytes, int] = {}
    rows = [image[8192 + at * 128 :][:128] for at in range(count)]
    assert bytes(128) not in rows, "zeros are a slot that was lost"
    for kind_wanted in (1, 2, 3):
        for number, row in enumerate(rows):
            state, kind, key_id, tenant, domain, when, by = struct.unpack_from("<4sI8s16s16sQ8s", row)
            if kind != kind_wanted or crc32c(row[:124]) != struct.unpack_from("<I", row, 124)[0]:
                continue
            if state == b"FREE":
                continue
            if state == b"GONE":
                assert row[56:124] == bytes(68)
                gone[tenant, domain] = when
                continue
            assert state == b"LIVE"
            if kind != 3 and by != root_id:
                continue
            key = aead.unseal(
                wrapping[by], row[64:76], store + struct.pack("<I", number) + row[:64], row[76:124]
            )
            if kind == 2:
                wrapping[key_id] = key
                version = int.from_bytes(domain, "little")
                versions[tenant] = max(version, versions.get(tenant, 0))
                if version == versions[tenant]:
                    keys[2, tenant, bytes(16)] = bytes(key)
            else:
                keys[kind, tenant, domain] = bytes(key)
    return keys, gone


def test_the_page_is_enough_to_read_a_keyring() -> None:
    keyring, file = new_keyring()
    names = [*users(*range(70)), *users(1, 2, tenant=ZETA), (ACME, bytes(16))]
    keyring.ensure(names)
    (erased,) = keyring.erase(users(5))
    keyring.rotate_tenant(ACME)
    keyring.rotate_master(master(1))
    keys, gone = read_keyring(bytes(file.durable), bytes(range(1, 33)))
    found = {name: key for name, key in keys_of(keyring, names).items() if key is not None}
    assert {(tenant, domain): key for (kind, tenant, domain), key in keys.items() if kind == 3} == found
    assert len(found) == len(names) - 1
    assert keys[1, bytes(16), bytes(16)] == keyring.store_key
    assert {tenant for kind, tenant, _ in keys if kind == 2} == {ACME, ZETA}
    assert gone == {users(5)[0]: erased.at_ms}
    assert STORE in file.durable


def test_the_vectors_on_the_page_are_what_we_read_and_write() -> None:
    root, slots, header = (
        [bytes.fromhex(part.replace("\n", "")) for part in block.strip().split("\n\n")]
        for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    )
    head = (header[0].ljust(304, b"\0") + b"\x20").ljust(508, b"\0") + bytes.fromhex("abb65cbb")
    assert head[124:184] == root[0]
    tenant, domain, erased, unread, free = slots
    image = bytearray(head.ljust(4096, b"\0") * 2 + free * 31 + unread)
    image[8192 + 128 : 8192 + 384] = tenant + domain
    keys, gone = read_keyring(bytes(image), bytes(range(32)))
    names = bytes(range(0xB0, 0xC0)), bytes(range(0xD0, 0xE0))
    assert keys == {
        (2, names[0], bytes(16)): bytes(range(0x40, 0x60)),
        (3, *names): bytes(range(0x80, 0xA0)),
    }
    assert gone == {}
    image[8192 + 256 : 8192 + 384] = erased
    keys, gone = read_keyring(bytes(image), bytes(range(32)))
    assert (len(keys), gone) == (1, {names: 1_763_716_360_000})
