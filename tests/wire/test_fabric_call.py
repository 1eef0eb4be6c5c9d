"""Calls over the fabric as bytes: packing and unpacking, and damaged messages."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KvError, Overloaded, ProtocolError, QuotaExceeded
from kvstore.limits import BATCH_BLOCKS_MAX, FABRIC_ANSWER_BYTES, FABRIC_CALL_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.wire.fabric_call import (
    LENGTH_END,
    TAG_BYTES,
    Call,
    CallKind,
    FetchRow,
    Leased,
    ReserveRow,
    Rows,
    count_bytes,
    count_of,
    error_bytes,
    leases_bytes,
    leases_of,
    length_said,
    read_call,
    rows_of_fetch,
    rows_of_parts,
    rows_of_reserve,
)
from nic_offload.checksum import crc32c
from tests.wire.calls import call_bytes

CRC_BYTES = 4
WORDS = st.integers(0, (1 << 32) - 1)
LONGS = st.integers(0, (1 << 64) - 1)
KEYS = st.binary(min_size=32, max_size=32)
METADATA = st.lists(
    st.tuples(
        st.from_regex(r"[a-z-]{1,20}", fullmatch=True),
        st.one_of(st.binary(max_size=200), st.from_regex(r"[ -~]{0,50}", fullmatch=True)),
    ),
    max_size=4,
).map(tuple)
CALLS = st.builds(
    Call,
    generation=st.integers(1, (1 << 56) - 1),
    kind=st.just(CallKind.FETCH),
    ack_word=WORDS,
    fingerprint=st.binary(min_size=16, max_size=16),
    metadata=METADATA,
    flags=st.integers(0, 255),
    durability=st.integers(0, 255),
    lease_ms=WORDS,
    expires_unix_ms=LONGS,
)
NOUGHT = st.just(0)
FETCHES = st.lists(
    st.builds(FetchRow, KEYS, WORDS, WORDS, LONGS, LONGS, LONGS, skip=NOUGHT, part=NOUGHT), max_size=20
)
PARTS = st.lists(st.builds(FetchRow, KEYS, WORDS, WORDS, LONGS, LONGS, LONGS, WORDS, WORDS), max_size=20)
CALL = Call(7, CallKind.FETCH, 1, b"f" * 16, (("kvstore-request", "r"), ("steps-bin", b"\x00\xff")))
ROWS = [FetchRow(b"k" * 32, 100, 2, 3, 4, 5)]


def packed(call: Call, rows: list[FetchRow]) -> bytes:
    data = call_bytes(call, len(rows), rows_of_fetch(rows))
    assert data is not None
    return data


@given(CALLS, FETCHES)
def test_a_fetch_is_decoded_as_encoded(call: Call, rows: list[FetchRow]) -> None:
    data = packed(call, rows)
    assert length_said(data[:8]) == len(data)
    assert read_call(data, call.generation) == (call, Rows(fetch=rows))


@given(CALLS, PARTS)
def test_a_fetch_of_parts_is_decoded_as_encoded(call: Call, rows: list[FetchRow]) -> None:
    call = replace(call, kind=CallKind.FETCH_PARTS)
    data = call_bytes(call, len(rows), rows_of_parts(rows))
    assert data is not None
    assert read_call(data, call.generation) == (call, Rows(fetch=rows))
    if rows:
        with pytest.raises(ProtocolError):
            read_call(
                call_bytes(replace(call, kind=CallKind.FETCH), len(rows), rows_of_parts(rows)) or b"", 7
            )


def test_a_reserve_is_decoded_as_encoded() -> None:
    call = Call(9, CallKind.RESERVE, 1, b"f" * 16, (), 0, 3, 30_000, 1 << 40)
    rows = [ReserveRow(bytes([number]) * 32, number, number + 1) for number in range(5)]
    data = call_bytes(call, 5, rows_of_reserve(rows))
    assert data is not None
    assert read_call(data, 9) == (call, Rows(reserve=rows))


def test_the_largest_batch_fits_and_a_larger_one_is_refused() -> None:
    rows = ROWS * BATCH_BLOCKS_MAX
    assert len(packed(CALL, rows)) <= FABRIC_CALL_BYTES
    assert (
        call_bytes(Call(7, CallKind.FETCH, 1, b"f" * 16, (("a", b"x" * 9000),)), 1024, rows_of_fetch(rows))
        is None
    )
    leased = [Leased(number, number % 2 == 1, number, number, number) for number in range(BATCH_BLOCKS_MAX)]
    answer = leases_bytes(7, leased)
    assert len(answer) <= FABRIC_ANSWER_BYTES
    assert leases_of(answer, 7) == leased


@pytest.mark.parametrize("at", [*range(0, 140, 3), -1])
def test_a_corrupt_byte_is_detected(at: int) -> None:
    data = bytearray(packed(CALL, ROWS))
    data[at] ^= 0x10
    with pytest.raises(ProtocolError):
        read_call(bytes(data), 7)


@pytest.mark.parametrize("length", [0, 3, 8, 63, 64, 100])
def test_a_truncated_call_is_invalid(length: int) -> None:
    with pytest.raises(ProtocolError):
        read_call(packed(CALL, ROWS)[:length], 7)


def summed(data: bytes) -> bytes:
    return crc32c(data[4:]).to_bytes(4, "little") + data[4:]


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(8, "<Q", 8), (16, "<B", 3), (20, "<I", 8), (20, "<I", 1 << 31), (24, "<I", 0), (24, "<I", 2)],
    ids=["generation", "kind", "metadata", "much metadata", "no blocks", "more blocks"],
)
def test_an_inconsistent_record_is_refused_even_with_a_valid_checksum(
    offset: int, form: str, value: int
) -> None:
    data = bytearray(packed(CALL, ROWS))
    struct.pack_into(form, data, offset, value)
    with pytest.raises(ProtocolError):
        read_call(summed(bytes(data)), 7)


def test_metadata_beyond_its_end_is_refused() -> None:
    data = bytearray(packed(CALL, ROWS))
    struct.pack_into("<H", data, 65, 60_000)
    with pytest.raises(ProtocolError, match="truncated"):
        read_call(summed(bytes(data)), 7)


def test_an_error_is_decoded_as_encoded() -> None:
    for error in (QuotaExceeded("Nothing may go."), ProtocolError("Ä sentence.")):
        with pytest.raises(type(error), match=str(error)):
            leases_of(error_bytes(7, error), 7)
    with pytest.raises(Overloaded, match=r"Later\.") as caught:
        leases_of(error_bytes(7, Overloaded("Later.", 123)), 7)
    assert caught.value.retry_after_ms == 123
    assert len(error_bytes(7, ProtocolError("x" * 100_000))) == FABRIC_ANSWER_BYTES - TAG_BYTES


def test_an_answer_to_another_call_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not belong to this call"):
        leases_of(leases_bytes(7, [Leased(1, False, 2, 3, 4)]), 8)


@pytest.mark.parametrize("left_out", [1, 8, 31])
def test_an_answer_that_ends_in_the_middle_of_a_lease_is_refused(left_out: int) -> None:
    whole = leases_bytes(7, [Leased(1, False, 2, 3, 4), Leased(2, False, 3, 4, 5)])
    cut = bytearray(whole[:-left_out])
    cut[CRC_BYTES:LENGTH_END] = len(cut).to_bytes(LENGTH_END - CRC_BYTES, "little")
    cut[:CRC_BYTES] = crc32c(bytes(cut[CRC_BYTES:])).to_bytes(CRC_BYTES, "little")
    with pytest.raises(ProtocolError, match="in the middle of a lease"):
        leases_of(bytes(cut), 7)


@given(st.binary(min_size=48, max_size=400))
def test_data_with_a_valid_checksum_is_a_call_or_refused(rest: bytes) -> None:
    data = summed(struct.pack("<IIQ", 0, 16 + len(rest), 7) + rest)
    with suppress(KvError):
        read_call(data, 7)
    with suppress(KvError):
        leases_of(data, 7)
    with suppress(KvError):
        count_of(data, 7)


KEYS_OF_A_PREFIX = [bytes([number]) * 32 for number in range(5)]


def test_a_prefix_is_decoded_as_encoded() -> None:
    call = replace(CALL, kind=CallKind.PREFIX)
    data = call_bytes(call, len(KEYS_OF_A_PREFIX), b"".join(KEYS_OF_A_PREFIX))
    assert data is not None
    assert read_call(data, 7) == (call, Rows(keys=KEYS_OF_A_PREFIX))


@pytest.mark.parametrize("miss", [None, Miss(MissReason.UNKNOWN, "it was deleted"), Miss(MissReason.LAYOUT)])
def test_the_outcome_of_a_prefix_is_decoded_as_encoded(miss: Miss | None) -> None:
    assert count_of(count_bytes(7, 1024, miss), 7) == (1024, miss)
    with pytest.raises(ProtocolError, match="does not belong to this call"):
        count_of(count_bytes(7, 1024, miss), 8)
    with pytest.raises(ProtocolError, match="no leases"):
        leases_of(count_bytes(7, 1024, miss), 7)
    with pytest.raises(ProtocolError, match="number of stored blocks"):
        count_of(leases_bytes(7, [Leased(1, False, 2, 3, 4)]), 7)
    with pytest.raises(QuotaExceeded):
        count_of(error_bytes(7, QuotaExceeded("Nothing may go.")), 7)
    long = count_bytes(7, 1, Miss(MissReason.UNKNOWN, "x" * 100_000))
    assert len(long) == FABRIC_ANSWER_BYTES - TAG_BYTES


def test_a_call_of_too_many_blocks_is_refused() -> None:
    keys = [bytes(32)] * (BATCH_BLOCKS_MAX + 1)
    data = call_bytes(replace(CALL, kind=CallKind.PREFIX), len(keys), b"".join(keys))
    assert data is not None
    with pytest.raises(ProtocolError, match="takes 1024 blocks"):
        read_call(data, 7)
