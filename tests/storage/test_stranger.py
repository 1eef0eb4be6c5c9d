"""A reader written by a stranger who had only `docs/record-format.md`. It imports nothing of the codec."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.rig import Rig


def read_drive(path: Path) -> dict[tuple[bytes, bytes], bytes]:
    """(tenant, key) -> payload of every good block."""
    drive = path.read_bytes()
    superblocks = [page for page in (drive[:4096], drive[4096:8192]) if is_superblock(page)]
    superblock = max(superblocks, key=lambda page: int.from_bytes(page[88:96], "little"))
    drive_uuid, secret = superblock[32:48], superblock[48:80]
    (capacity,) = struct.unpack_from("<Q", superblock, 80)
    best: dict[tuple[bytes, bytes], tuple[int, bytes]] = {}
    position = 8192
    while position < capacity:
        header = drive[position : position + 120]
        length, pages = struct.unpack_from("<I", header, 12)[0], 0
        message = drive_uuid + struct.pack("<Q", position) + header[:104]
        if (
            header[:8] == b"TKVRECRD"
            and header[8:10] == b"\1\0"
            and header[104:120] == hashlib.blake2b(message, digest_size=16, key=secret).digest()
            and 1 <= length <= 64 << 20
        ):
            pages = 1 + -(-length // 4096)
        if pages == 0 or position + pages * 4096 > capacity:
            position += 4096
            continue
        generation, _expires, crc = struct.unpack_from("<QQI", header, 80)
        payload = drive[position + 4096 : position + 4096 + length]
        name = header[48:64], header[16:48]
        if header[10:12] == b"\1\0" and generation > best.get(name, (-1, b""))[0]:
            best[name] = generation, payload if crc32c(payload) == crc else b"BAD"
        position += pages * 4096
    return {name: payload for name, (_, payload) in best.items()}


def is_superblock(page: bytes) -> bool:
    return page[:12] == b"TKVDRIVE\1\0\0\0" and struct.unpack_from("<I", page, 112)[0] == crc32c(page[:112])


def test_a_stranger_reads_what_the_store_wrote(real: Rig) -> None:
    rng = random.Random(1)
    expected = {}
    for number in range(50):
        tenant = rng.choice([b"tenant-of-tests!", b"another-tenant!!"])
        payload = rng.randbytes(rng.choice([1, 4096, 5000, 50_000]))
        real.start_put(number, payload, tenant=tenant)
        expected[tenant, number.to_bytes(32, "little")] = payload
    real.put(100, b"gone by then", expires_ms=real.clock.now_ms + 1)
    real.clock.now_ms += 1
    real.put(100, b"the newer one, of more pages" * 1000)
    expected[b"tenant-of-tests!", (100).to_bytes(32, "little")] = b"the newer one, of more pages" * 1000
    real.store.close()
    assert read_drive(real.data / "drive-0.kv") == expected
