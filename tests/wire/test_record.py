"""The codec against the golden vectors of `docs/record-format.md`, and against every single flipped bit."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import BLOCK_BYTES_MAX, GENERATION_MAX, HEADER_BYTES, PAGE_BYTES
from kvstore.wire.record import (
    Flaw,
    Header,
    HeaderCodec,
    Kind,
    Superblock,
    foreign_version,
    pack_superblock,
    parse_superblock,
    record_bytes,
    records_begin,
    roll_bytes,
    roll_offset,
)

PAGE_OF_THE_FORMAT = Path(__file__).parents[2] / "docs" / "record-format.md"
SECRET, STORE, DRIVE = bytes(range(32)), b"\xa1" * 16, b"\xb2" * 16
SUPERBLOCK = Superblock(
    STORE, DRIVE, 0, SECRET, 16 << 20, 7, 1_700_000_000_000, 1 << 32, 3, 1, 0x8A9136AA, 9, 2
)
HEADER = Header(Kind.BLOCK, b"\x11" * 32, b"\x22" * 16, b"\x33" * 16, 5, 9, 0xE3069283, 1_800_000_000_000)
CODEC = HeaderCodec(SECRET, DRIVE)
TAGGED_BYTES = 104 + 16  # of a header


def golden() -> tuple[bytes, ...]:
    """The hex blocks of the page: superblock, header at 16384, its tag at 20480, keys of a session and a chunk."""
    section = PAGE_OF_THE_FORMAT.read_text(encoding="utf-8").split("## Golden vectors")[1]
    blocks = re.findall(r"(?:^    [0-9a-f]+\n)+", section, re.MULTILINE)
    return tuple(bytes.fromhex("".join(block.split())) for block in blocks)


def packed(header: Header, offset: int, codec: HeaderCodec = CODEC) -> bytes:
    page = bytearray(b"\xdd" * (HEADER_BYTES + 16))
    address = ctypes.addressof(ctypes.c_char.from_buffer(page)) + 8
    codec.pack([(address, HEADER_BYTES, offset, header)])
    assert page[:8] == page[-8:] == b"\xdd" * 8, "nothing but its own page is touched"
    return bytes(page[8:-8])


def test_the_superblock_matches_the_golden_one() -> None:
    page = pack_superblock(SUPERBLOCK)
    assert page == golden()[0].ljust(PAGE_BYTES, b"\0")
    assert parse_superblock(page) == SUPERBLOCK


def test_the_header_matches_the_golden_one_with_a_tag_of_its_place() -> None:
    _, header, tag, *_ = golden()
    assert packed(HEADER, 16384) == header.ljust(PAGE_BYTES, b"\0")
    assert packed(HEADER, 20480)[104:120] == tag
    assert CODEC.parse(packed(HEADER, 16384), 0, 16384) == HEADER


def test_a_header_is_found_at_its_offset_in_a_larger_buffer() -> None:
    data = bytes(PAGE_BYTES) + packed(HEADER, 20480)
    assert CODEC.parse(data, PAGE_BYTES, 20480) == HEADER
    assert CODEC.parse(data, 0, 16384) is Flaw.MAGIC
    assert CODEC.parse(data[: PAGE_BYTES + 100], PAGE_BYTES, 20480) is Flaw.SHORT


def test_a_header_is_not_accepted_at_another_offset_on_another_drive_or_with_another_secret() -> None:
    page = packed(HEADER, 16384)
    assert CODEC.parse(page, 0, 20480) is Flaw.CHECK
    assert HeaderCodec(SECRET, STORE).parse(page, 0, 16384) is Flaw.CHECK
    assert HeaderCodec(SECRET[::-1], DRIVE).parse(page, 0, 16384) is Flaw.CHECK


def test_no_single_flipped_bit_of_a_header_is_accepted() -> None:
    page = packed(HEADER, 16384)
    for bit in range(TAGGED_BYTES * 8):
        flipped = bytearray(page)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(CODEC.parse(bytes(flipped), 0, 16384), Flaw), f"bit {bit}"


def test_no_single_flipped_bit_of_a_superblock_is_accepted() -> None:
    page = pack_superblock(SUPERBLOCK)
    for bit in range(144 * 8):
        flipped = bytearray(page)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(parse_superblock(bytes(flipped)), Flaw), f"bit {bit}"


def test_the_roll_has_a_bit_for_each_page_and_lies_between_superblocks_and_records() -> None:
    assert roll_bytes(16 << 20) == roll_bytes(128 << 20) == PAGE_BYTES
    assert roll_bytes((128 << 20) + PAGE_BYTES) == 2 * PAGE_BYTES
    assert [roll_offset(16 << 20, copy) for copy in (0, 1)] == [2 * PAGE_BYTES, 3 * PAGE_BYTES]
    assert records_begin(16 << 20) == 4 * PAGE_BYTES


@pytest.mark.parametrize(
    "bad",
    [
        HEADER._replace(length=0),
        HEADER._replace(length=BLOCK_BYTES_MAX + 1),
        HEADER._replace(generation=GENERATION_MAX + 1),
    ],
)
def test_a_field_out_of_range_is_not_accepted_even_with_a_valid_tag(bad: Header) -> None:
    assert CODEC.parse(packed(bad, 8192), 0, 8192) is Flaw.RANGE


def test_another_version_is_distinguished() -> None:
    page = bytearray(pack_superblock(SUPERBLOCK))
    assert foreign_version(bytes(page)) is None
    page[8] = 2
    assert parse_superblock(bytes(page)) is Flaw.VERSION
    assert foreign_version(bytes(page)) == 2


@pytest.mark.parametrize(
    ("length", "pages"), [(1, 2), (4096, 2), (4097, 3), (1 << 20, 257), (BLOCK_BYTES_MAX, 16385)]
)
def test_a_record_is_whole_pages(length: int, pages: int) -> None:
    assert record_bytes(length) == pages * PAGE_BYTES


@given(
    st.builds(
        Header,
        st.just(Kind.BLOCK),
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=16, max_size=16),
        st.integers(0, GENERATION_MAX),
        st.integers(1, BLOCK_BYTES_MAX),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.just(0),
    ),
    st.integers(2, 2**40),
)
def test_every_header_round_trips(header: Header, page: int) -> None:
    assert CODEC.parse(packed(header, page * PAGE_BYTES), 0, page * PAGE_BYTES) == header


@given(st.binary(max_size=300))
def test_any_bytes_have_an_outcome(data: bytes) -> None:
    assert isinstance(CODEC.parse(data, 0, 8192), Flaw)
    assert isinstance(parse_superblock(data), Flaw)
