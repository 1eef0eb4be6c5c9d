"""The messages of streams of blocks, made and read without copies, beside the generated classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.limits import BATCH_BLOCKS_MAX
from kvstore.wire import batches_pb2 as pb
from kvstore.wire import kvstore_pb2
from kvstore.wire.parts import encoded_get, encoded_put, got_parts, parse_put

NUMBERS = st.integers(0, 2**32 - 1)
CHUNKS = st.binary(max_size=300)
NAMES = st.none() | st.builds(
    kvstore_pb2.BlockName,
    key=st.binary(max_size=40),
    fingerprint=st.binary(max_size=20),
    length=st.integers(0, 2**64 - 1),
)


@given(st.lists(st.tuples(NUMBERS, CHUNKS)))
def test_the_generated_class_parses_encoded_gets(parts: list[tuple[int, bytes]]) -> None:
    encoded = encoded_get(parts)
    assert [(one.number, one.chunk) for one in pb.GetBatchResponse.FromString(encoded).parts] == parts
    assert [(one.number, bytes(one.chunk)) for one in got_parts(encoded)] == parts


@given(st.text(max_size=20), st.integers(0, 3), st.integers(0, 2**64 - 1), st.lists(st.tuples(NAMES, CHUNKS)))
def test_both_parsers_read_puts_alike(
    tenant: str, durability: int, expires: int, parts: list[tuple[kvstore_pb2.BlockName | None, bytes]]
) -> None:
    head = pb.PutBatchRequest(tenant=tenant, durability=durability, expires_unix_ms=expires)  # type: ignore[arg-type]
    encoded = encoded_put(head, parts)
    for name, chunk in parts:
        head.parts.add(name=name, chunk=chunk)
    assert pb.PutBatchRequest.FromString(encoded) == head
    for read in (parse_put(encoded), parse_put(head.SerializeToString())):
        assert read[:3] == (tenant, durability, expires)
        assert [(name, bytes(chunk)) for name, chunk in read.parts()] == parts
        assert read.named == sum(name is not None for name, _ in parts)


def test_a_miss_is_parsed() -> None:
    miss = kvstore_pb2.GetMiss(reason=kvstore_pb2.MISS_REASON_LAYOUT, detail="why")
    message = pb.GetBatchResponse(parts=[pb.GetPart(number=300, miss=miss)]).SerializeToString()
    (part,) = got_parts(message)
    assert (part.number, part.miss, bytes(part.chunk)) == (300, miss, b"")


@given(st.binary(max_size=200))
def test_any_bytes_have_an_outcome(message: bytes) -> None:
    for read in (lambda one: list(parse_put(one).parts()), lambda one: list(got_parts(one))):
        try:
            read(message)
        except ProtocolError:
            continue


@given(st.lists(st.tuples(NAMES, CHUNKS), min_size=1), st.data())
def test_a_truncation_is_reported_or_leaves_whole_parts(
    parts: list[tuple[kvstore_pb2.BlockName | None, bytes]], data: st.DataObject
) -> None:
    encoded = encoded_put(pb.PutBatchRequest(), parts)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    try:
        read = list(parse_put(encoded[:cut]).parts())
    except ProtocolError:
        return
    assert [(name, bytes(chunk)) for name, chunk in read] == parts[: len(read)]


def test_fields_of_newer_messages_are_skipped() -> None:
    newer = b"\x78\x01" + b"\x7a\x02ab" + b"\x79" + bytes(8) + b"\x7d" + bytes(4)
    assert parse_put(newer + pb.PutBatchRequest(tenant="acme").SerializeToString()).tenant == "acme"
    for broken in (b"\x7b", b"\x0a\x05ab", b"\xff" * 11, b"\x22\x02\x08\x01\x0a\x01\xff", b"\x20\x01"):
        with pytest.raises(ProtocolError):
            list(parse_put(broken).parts())


def test_the_fields_of_a_message_are_bounded() -> None:
    """A message of 8 MiB may have four million: seconds of a node's thread."""
    many = b"\x22\x00" * BATCH_BLOCKS_MAX
    assert len(parse_put(many).unread) == BATCH_BLOCKS_MAX
    for too_many in (b"\x22\x00" * (4 << 20), b"\x28\x00" * (4 << 20)):
        with pytest.raises(ProtocolError, match="more than 1088 fields"):
            parse_put(too_many)
    inside = b"\x28\x00" * 17
    with pytest.raises(ProtocolError, match="more than 16 fields"):
        list(parse_put(b"\x22" + bytes((len(inside),)) + inside).parts())


@pytest.mark.parametrize("part", [b"", b"\x12\x00", b"\x12\x00\x0a\x00", b"\x0a\x00\x12\x00"])
def test_a_name_counts_wherever_it_is_in_the_message(part: bytes) -> None:
    read = parse_put(b"\x22" + bytes((len(part),)) + part)
    assert read.named == sum(name is not None for name, _ in read.parts())


def test_parts_are_parsed_as_they_are_taken() -> None:
    broken = b"\x22\x00" + b"\x22\x02\x12\x05"
    parts = parse_put(broken).parts()
    assert next(parts) == (None, memoryview(b""))
    with pytest.raises(ProtocolError):
        next(parts)
