"""The codec of the keyring against the vectors of docs/sealing.md."""

from __future__ import annotations

import re

import pytest

from kvstore.sealing import slots
from tests.sealing.test_independent_reader import PAGE

ROOT, SLOTS, HEADER = (
    [bytes.fromhex(part.replace("\n", "")) for part in block.strip().split("\n\n")]
    for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
)
STORE = bytes(range(16))
MADE_MS = 1_763_716_000_000
TENANT = slots.Slot(
    slots.State.LIVE,
    slots.Kind.TENANT,
    bytes(range(0x70, 0x78)),
    bytes(range(0xB0, 0xC0)),
    (1).to_bytes(16, "little"),
    MADE_MS,
    bytes(range(0x60, 0x68)),
)
DOMAIN = slots.Slot(
    slots.State.LIVE,
    slots.Kind.DOMAIN,
    bytes(range(0x78, 0x80)),
    bytes(range(0xB0, 0xC0)),
    bytes(range(0xD0, 0xE0)),
    MADE_MS,
    bytes(range(0x70, 0x78)),
)


@pytest.mark.parametrize(
    ("slot", "row", "number", "key", "by", "nonce"),
    [(TENANT, SLOTS[0], 1, 0x40, 0x20, 0xC0), (DOMAIN, SLOTS[1], 2, 0x80, 0x40, 0xE0)],
)
def test_slots_are_written_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch, slot: slots.Slot, row: bytes, number: int, key: int, by: int, nonce: int
) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda size: bytes(range(nonce, nonce + size)))
    secret, wrapping = bytearray(range(key, key + 32)), bytearray(range(by, by + 32))
    full = slots.wrapped(slot, secret, wrapping, STORE, number)
    assert slots.pack_slot(full) == row
    assert slots.parse_slot(row) == full
    assert slots.unwrapped(full, wrapping, STORE, number) == secret


def test_an_erased_slot_and_the_header_are_written_as_the_page_says() -> None:
    live = slots.parse_slot(SLOTS[1])
    assert live is not None
    assert slots.pack_slot(live.gone(1_763_716_360_000)) == SLOTS[2]
    assert slots.pack_slot(slots.overwritten(1_763_716_360_000)) == SLOTS[3]
    assert slots.pack_slot(None) == SLOTS[4]
    root = slots.Root(bytes(range(0x60, 0x68)), ROOT[0])
    header = slots.Header(STORE, 1, MADE_MS, "key:52d4e8d12c91efb4", root, 32)
    sector = slots.pack_header(header)
    assert sector == (HEADER[0].ljust(304, b"\0") + b" ").ljust(508, b"\0") + bytes.fromhex("abb65cbb")
    assert slots.parse_header([sector, bytes(512)]) == header
    newer = header._replace(sequence=2, root=root._replace(id=b"another1"))
    assert slots.parse_header([sector, slots.pack_header(newer)]) == newer
