"""The codec of sessions and chunks against the golden vectors of `docs/record-format.md`."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import (
    PAGE_BYTES,
    SESSION_CHUNK_BLOCKS,
    SESSION_CHUNKS_MAX,
    SESSION_LABEL_BYTES_MAX,
    SESSION_TURNS_MAX,
)
from kvstore.wire.manifest import (
    CHUNK_PAYLOAD_BYTES,
    Manifest,
    Turn,
    chunk_key,
    cut_turns,
    pack_manifest,
    parse_manifest,
    session_key,
    split_keys,
)
from tests.wire.test_record import golden

USER, SESSION, KEY = b"\x44" * 16, b"\x55" * 16, b"\x11" * 32
KEYS = st.binary(min_size=32, max_size=32)


def test_keys_and_payload_match_the_golden_ones() -> None:
    *_, key, payload, chunk, own_chunk = golden()
    assert session_key(USER, SESSION) == key
    turn = Turn(0, 16, 1_700_000_000_000)
    assert pack_manifest(Manifest(USER, SESSION, (), (KEY,), (turn,), b"chat 7")) == payload
    assert chunk_key(KEY * SESSION_CHUNK_BLOCKS) == chunk
    assert chunk_key(KEY * SESSION_CHUNK_BLOCKS, USER) == own_chunk
    ending = Manifest(USER, SESSION, (), (KEY,), (turn,), b"chat 7", 1_700_000_000_000)
    assert pack_manifest(ending) == payload + bytes.fromhex("0068e5cf8b010000")


def test_an_expiry_of_never_is_not_written() -> None:
    payload = pack_manifest(Manifest(USER, SESSION, (), (KEY,), (Turn(0, 1, 1),)))
    assert parse_manifest(payload) is not None
    assert parse_manifest(payload + bytes(8)) is None
    assert parse_manifest(payload + bytes([1]) * 7) is None


@st.composite
def turns_of(draw: st.DrawFn, blocks: int) -> tuple[Turn, ...]:
    """Turns of a session with this many blocks."""
    firsts = draw(st.sets(st.integers(1, blocks - 1))) if blocks > 1 else set()
    return tuple(
        Turn(first, draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**63)))
        for first in (sorted({0, *firsts}) if blocks else ())
    )


@given(
    st.lists(KEYS, max_size=2),
    st.lists(KEYS, max_size=SESSION_CHUNK_BLOCKS - 1),
    st.binary(max_size=SESSION_LABEL_BYTES_MAX),
    st.integers(0, 2**64 - 1),
    st.data(),
)
def test_every_manifest_round_trips(
    chunks: list[bytes], tail: list[bytes], label: bytes, expires_ms: int, data: st.DataObject
) -> None:
    blocks = len(chunks) * SESSION_CHUNK_BLOCKS + len(tail)
    turns = data.draw(turns_of(blocks))
    manifest = Manifest(USER, SESSION, tuple(chunks), tuple(tail), turns, label, expires_ms)
    assert parse_manifest(pack_manifest(manifest)) == manifest
    assert manifest.blocks == blocks


def payload_of(counts: tuple[int, int, int, int], keys: int, turns: list[tuple[int, int, int]]) -> bytes:
    packed = b"".join(struct.pack("<IIQ", *turn) for turn in turns)
    return USER + SESSION + struct.pack("<IIII", *counts) + KEY * keys + packed


@pytest.mark.parametrize(
    ("counts", "keys", "turns"),
    [
        ((1, 0, 1, 0), 0, [(0, 1, 1)]),
        ((0, 1, 1, 0), 2, [(0, 1, 1)]),
        ((SESSION_CHUNKS_MAX + 1, 0, 1, 0), SESSION_CHUNKS_MAX + 1, [(0, 1, 1)]),
        ((0, 126, 1, 0), 126, [(0, 1, 1)]),
        ((2**32 - 1, 2**31, 1, 0), 1, [(0, 1, 1)]),
        ((0, 1, 2**32 - 1, 0), 1, [(0, 1, 1)]),
        ((0, 1, 1, SESSION_LABEL_BYTES_MAX + 1), 1, [(0, 1, 1)]),
        ((0, 1, 1, 1), 1, [(0, 1, 1)]),
        (
            (0, 125, SESSION_TURNS_MAX + 1, 0),
            125,
            [(number, 1, 1) for number in range(SESSION_TURNS_MAX + 1)],
        ),
    ],
)
def test_impossible_counts_are_not_a_manifest(
    counts: tuple[int, int, int, int], keys: int, turns: list[tuple[int, int, int]]
) -> None:
    assert parse_manifest(payload_of(counts, keys, turns)) is None


@pytest.mark.parametrize(
    ("blocks", "firsts"),
    [(0, [0]), (1, []), (2, [1]), (2, [0, 0]), (3, [0, 2, 1]), (2, [0, 2]), (2, [0, 3]), (5, [0, 1, 1])],
)
def test_turns_with_a_gap_or_without_a_block_are_not_a_manifest(blocks: int, firsts: list[int]) -> None:
    turns = [(first, 16, 1) for first in firsts]
    assert parse_manifest(payload_of((0, blocks, len(firsts), 0), blocks, turns)) is None


def test_a_cut_takes_whole_turns_and_tokens_in_proportion() -> None:
    turns = (Turn(0, 64, 1), Turn(4, 40, 2), Turn(7, 5, 3))  # 16 each; 16, 16, 8; 5
    assert cut_turns(turns, 8, 8) == turns
    assert cut_turns(turns, 8, 7) == turns[:2]
    assert cut_turns(turns, 8, 6) == (turns[0], Turn(4, 26, 2))
    assert cut_turns(turns, 8, 4) == turns[:1]
    assert cut_turns(turns, 8, 3) == (Turn(0, 48, 1),)
    assert cut_turns(turns, 8, 0) == ()
    assert cut_turns((), 0, 0) == ()


@given(st.integers(1, 60).flatmap(lambda blocks: st.tuples(st.just(blocks), turns_of(blocks))), st.data())
def test_a_cut_is_a_valid_manifest_and_never_has_more_tokens(
    session: tuple[int, tuple[Turn, ...]], data: st.DataObject
) -> None:
    blocks, turns = session
    left = data.draw(st.integers(0, blocks))
    cut = cut_turns(turns, blocks, left)
    manifest = Manifest(USER, SESSION, (), (KEY,) * left, cut)
    assert parse_manifest(pack_manifest(manifest)) == manifest
    assert all(one.tokens <= all_of_it.tokens for one, all_of_it in zip(cut, turns, strict=False))


@given(st.binary(max_size=200))
def test_any_bytes_have_an_outcome(data: bytes) -> None:
    manifest = parse_manifest(data)
    assert manifest is None or pack_manifest(manifest) == data


def test_a_chunk_is_one_page_at_most_and_splits_into_its_keys() -> None:
    assert CHUNK_PAYLOAD_BYTES <= PAGE_BYTES
    assert split_keys(KEY + USER + SESSION) == (KEY, USER + SESSION)


def test_the_turns_of_a_session_are_parsed_once() -> None:
    """A step of a session of a thousand turns uses its manifest several times."""
    turns = tuple(Turn(number, 16, 7) for number in range(SESSION_CHUNK_BLOCKS - 1))
    payload = pack_manifest(Manifest(b"u" * 16, b"s" * 16, (), (b"k" * 32,) * len(turns), turns))
    first, second = parse_manifest(payload), parse_manifest(bytes(bytearray(payload)))
    assert first is not None
    assert second is not None
    assert first.turns is second.turns
