"""An independent reader, written from `docs/record-format.md` alone. It imports nothing of the codec."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from pathlib import Path


Session = tuple[list[bytes], list[tuple[int, ...]], bytes]  # keys, turns, label


def read_drive(path: Path) -> tuple[dict[tuple[bytes, bytes], bytes], dict[tuple[bytes, ...], Session]]:
    """The payloads of good blocks by (tenant, key), and the sessions by (tenant, user, session)."""
    drive = path.read_bytes()
    superblocks = [page for page in (drive[:4096], drive[4096:8192]) if is_superblock(page)]
    superblock = max(superblocks, key=lambda page: int.from_bytes(page[88:96], "little"))
    drive_uuid, secret = superblock[32:48], superblock[48:80]
    (capacity,) = struct.unpack_from("<Q", superblock, 80)
    roll_generation, roll_copy, roll_crc = struct.unpack_from("<QII", superblock, 112)
    roll_pages = -(-capacity // 4096 // 32768)
    roll = drive[(2 + roll_copy * roll_pages) * 4096 :][: roll_pages * 4096]
    if crc32c(roll) != roll_crc:
        roll_generation = 0
    best: dict[tuple[bytes, bytes], tuple[int, bytes]] = {}
    sessions: dict[tuple[bytes, bytes], tuple[int, bytes]] = {}
    chunks: dict[tuple[bytes, bytes], bytes] = {}
    position = (2 + 2 * roll_pages) * 4096
    while position < capacity:
        header = drive[position : position + 120]
        length, pages = struct.unpack_from("<I", header, 12)[0], 0
        message = drive_uuid + struct.pack("<Q", position) + header[:104]
        if (
            header[:8] == b"TKVRECRD"
            and header[8:10] == b"\3\0"
            and header[104:120] == hashlib.blake2b(message, digest_size=16, key=secret).digest()
            and 1 <= length <= 64 << 20
        ):
            pages = 1 + -(-length // 4096)
        generation, _expires, crc = struct.unpack_from("<QQI", header, 80)
        bit = roll[position // 4096 // 8] >> position // 4096 % 8 & 1
        if pages == 0 or position + pages * 4096 > capacity or (generation < roll_generation and not bit):
            position += 4096
            continue
        payload = drive[position + 4096 : position + 4096 + length]
        record = header[48:64], header[16:48]
        if header[10:12] == b"\1\0" and generation > best.get(record, (-1, b""))[0]:
            best[record] = generation, payload if crc32c(payload) == crc else b"BAD"
        if header[10:12] == b"\2\0" and generation > sessions.get(record, (-1, b""))[0]:
            assert record[1] == hashlib.blake2b(payload[:32], digest_size=32, person=b"tkv session").digest()
            sessions[record] = generation, payload
        if header[10:12] == b"\3\0":
            assert record[1] == hashlib.blake2b(payload, digest_size=32, person=b"tkv chunk").digest()
            chunks[record] = payload
        position += pages * 4096
    named: dict[tuple[bytes, ...], Session] = {}
    for (tenant, _), (_, payload) in sessions.items():
        many, few, turns, label = struct.unpack_from("<IIII", payload, 32)
        keys = [payload[at : at + 32] for at in range(48, 48 + 32 * (many + few), 32)]
        joined = b"".join([*(chunks[tenant, one] for one in keys[:many]), *keys[many:]])
        named[tenant, payload[:16], payload[16:32]] = (
            [joined[at : at + 32] for at in range(0, len(joined), 32)],
            [struct.unpack_from("<IIQ", payload, 48 + 32 * (many + few) + 16 * at) for at in range(turns)],
            payload[len(payload) - label :],
        )
    return {name: payload for name, (_, payload) in best.items()}, named


def is_superblock(page: bytes) -> bool:
    return page[:12] == b"TKVDRIVE\3\0\0\0" and struct.unpack_from("<I", page, 140)[0] == crc32c(page[:140])


@pytest.mark.parametrize("rolled", [False, True])
def test_a_stranger_reads_the_stores_records(real: StoreRig, *, rolled: bool) -> None:
    rng = random.Random(1)
    expected = {}
    for number in range(50):
        tenant = rng.choice([TENANT, b"another-tenant!!"])
        payload = rng.randbytes(rng.choice([1, 4096, 5000, 50_000]))
        real.start_put(number, payload, tenant=tenant)
        expected[tenant, key(number)] = payload
    real.put(100, b"gone by then", expires_ms=real.clock.now_ms + 1)
    real.clock.now_ms += 1
    real.put(100, b"the newer one, of more pages" * 1000)
    expected[TENANT, key(100)] = b"the newer one, of more pages" * 1000
    real.delete(0, tenant=next(tenant for tenant, name in expected if name == key(0)))
    expected = {name: payload for name, payload in expected.items() if name[1] != key(0)}
    for number in range(1000, 1130):
        real.put(number, b"x")
        expected[TENANT, key(number)] = b"x"
    real.append(1, range(1000, 1100), tokens=1600, at_ms=7, label="chat 1")
    real.append(1, range(1100, 1130), tokens=480, at_ms=8)
    real.fork(2, 1, 127, label="an attempt")
    real.append(3, [1000])
    real.remove(3)
    if rolled:  # what a killed process leaves is listed by the next opening
        real.kill()
        real.open()
        real.put(200, b"after")
        expected[TENANT, key(200)] = b"after"
    real.store.close()
    blocks, sessions = read_drive(real.data / "drive-0.kv")
    assert blocks == expected
    keys = [key(number) for number in range(1000, 1130)]
    assert sessions == {
        (TENANT, USER, name(1)): (keys, [(0, 1600, 7), (100, 480, 8)], b"chat 1"),
        (TENANT, USER, name(2)): (keys[:127], [(0, 1600, 7), (100, 432, 8)], b"an attempt"),
    }
