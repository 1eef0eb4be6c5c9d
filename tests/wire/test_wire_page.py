"""docs/wire.md against the code: every field is where the page says."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TypeAlias

from nic_offload._core import ffi

from kvstore.limits import BATCH_BLOCKS_MAX, FABRIC_ANSWER_BYTES, FABRIC_CALL_BYTES, FABRIC_CALL_PLACES
from kvstore.wire import fabric_call as wire
from kvstore.wire.ack import AckCode
from tests.wire.calls import call_bytes

Table: TypeAlias = list[tuple[str, int, int]]  # what it is, where, and how many bytes

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
ROW = re.compile(r"^\| (\d+) \| (\d*) \| (.+) \|$")


def tables() -> list[Table]:
    found: list[Table] = []
    for line in PAGE.splitlines():
        if line.startswith("| at |"):
            found.append([])
        row = ROW.match(line)
        if row is not None:
            found[-1].append((row[3], int(row[1]), int(row[2] or 0)))
    return found


def field(data: bytes, table: Table, what: str) -> bytes:
    ((at, size),) = [(at, size) for name, at, size in table if name.startswith(what)]
    return data[at : at + size]


def number(data: bytes, table: Table, what: str) -> int:
    return int.from_bytes(field(data, table, what), "little")


def test_each_table_has_no_gap() -> None:
    for table in tables():
        sizes = [size for _, _, size in table]
        assert [at for _, at, _ in table] == [sum(sizes[:i]) for i in range(len(table))]


def test_the_header_of_a_put_is_as_the_page_says() -> None:
    head, *_ = tables()
    struct_type = ffi.typeof("struct tk_put_head")
    fields = dict(struct_type.fields)
    said = [(name, ffi.offsetof(struct_type, name), ffi.sizeof(field.type)) for name, field in fields.items()]
    assert [(at, size) for _, at, size in head] == [(at, size) for _, at, size in said]
    assert ffi.sizeof(struct_type) == sum(size for _, _, size in head)
    words = {
        "head_crc32c": "CRC32C of the metadata",
        "metadata_bytes": "bytes of metadata",
        "generation": "the slot's generation",
        "ack_generation": "the generation of its",
        "expires_unix_ms": "when the block expires",
        "ack_word": "the number of its",
        "length": "bytes of payload",
        "crc32c": "their CRC32C",
        "flags": "`1`",
        "durability": "durability",
        "zeros": "0",
        "key": "key",
        "fingerprint": "fingerprint",
        "domain": "the erase domain",
        "fired_ns": "when its flag was seen",
        "tag": "the tag",
    }
    assert list(words) == list(fields)
    for (what, _, _), begin in zip(head, words.values(), strict=True):
        assert what.startswith(begin)


def test_a_call_is_as_the_page_says() -> None:
    _, head, block, _ = tables()
    call = wire.Call(7, wire.CallKind.FETCH, 8, b"f" * 16, (("name", b"value"),), wire.TELLS, 3, 9, 10)
    row = wire.FetchRow(b"k" * 32, 11, 12, 13, 14, 15)
    data = call_bytes(call, 1, wire.rows_of_fetch([row]))
    assert data is not None
    said = {
        "its length": len(data),
        "its generation": 7,
        "`1` fetch": 1,
        "flags": 1,
        "of a reserve: the durability": 3,
        "bytes of metadata": 16,
        "blocks": 1,
        "the number of the acknowledgement word": 8,
        "of a reserve: the duration": 9,
        "of a reserve: when": 10,
    }
    for what, value in said.items():
        assert number(data, head, what) == value, what
    assert field(data, head, "fingerprint") == b"f" * 16
    assert data[64:80] == b"\x04\x05\x00\x01name" + b"value" + bytes(3)
    there = data[80:]
    assert field(there, block, "key") == b"k" * 32
    assert [
        number(there, block, what) for what in ("length", "number of", "generation", "where", "the key")
    ] == [*row[1:6]]
    part = wire.rows_of_parts([row._replace(skip=16, part=17)])
    assert part[:64] == there
    assert "two more 4-byte numbers" in PAGE
    assert struct.unpack("<II", part[64:]) == (16, 17)
    assert len(there) == sum(size for _, _, size in block)


def test_a_reserve_and_its_answer_are_as_the_page_says() -> None:
    _, _, block, answer = tables()
    row = wire.rows_of_reserve([wire.ReserveRow(b"k" * 32, 11, 12)])
    assert len(row) == 40
    assert row == wire.rows_of_fetch([wire.FetchRow(b"k" * 32, 11, 12, 0, 0, 0)])[:40]
    assert "first three fields, 40 bytes" in PAGE
    assert block
    data = wire.leases_bytes(7, [wire.Leased(slot=1, already_stored=True, generation=2, payload=3, flag=4)])
    assert number(data, answer, "its length") == len(data) == 24 + 32
    assert number(data, answer, "the call's generation") == 7
    assert number(data, answer, "`1` leases") == 1
    assert struct.unpack("<IIQQQ", data[24:]) == (1, 1, 2, 3, 4)


def test_the_numbers_in_the_text_are_the_codes() -> None:
    assert f"{FABRIC_CALL_PLACES} places" in PAGE
    assert f"{FABRIC_CALL_BYTES >> 10} KiB each" in PAGE
    assert f"{FABRIC_ANSWER_BYTES >> 10} KiB each" in PAGE
    assert f"1 to {BATCH_BLOCKS_MAX:,}" in PAGE
    assert f"For a get `{AckCode.SERVED:#x}`" in PAGE
    assert (wire.AnswerCode.DONE, wire.AnswerCode.BYTES) == (1, 2)
    assert f"`{AckCode.LEASE_EXPIRED:#x}` to `{AckCode.BEING_ERASED:#x}`" in PAGE
