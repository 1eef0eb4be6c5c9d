"""The codec of sessions and chunks against the golden vectors of `docs/record-format.md`."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import PAGE_BYTES, SESSION_CHUNK_BLOCKS, SESSION_CHUNKS_MAX
from kvstore.wire.manifest import (
    CHUNK_PAYLOAD_BYTES,
    Manifest,
    chunk_key,
    pack_manifest,
    parse_manifest,
    session_key,
    split_keys,
)
from tests.wire.test_record import golden

USER, SESSION, KEY = b"\x44" * 16, b"\x55" * 16, b"\x11" * 32
KEYS = st.binary(min_size=32, max_size=32)


def test_keys_and_payload_are_the_golden_ones() -> None:
    *_, key, payload, chunk = golden()
    assert session_key(USER, SESSION) == key
    assert pack_manifest(Manifest(USER, SESSION, (), (KEY,))) == payload
    assert chunk_key(KEY * SESSION_CHUNK_BLOCKS) == chunk


@given(st.lists(KEYS, max_size=5), st.lists(KEYS, max_size=SESSION_CHUNK_BLOCKS - 1))
def test_every_manifest_comes_back(chunks: list[bytes], tail: list[bytes]) -> None:
    manifest = Manifest(USER, SESSION, tuple(chunks), tuple(tail))
    assert parse_manifest(pack_manifest(manifest)) == manifest
    assert manifest.blocks == len(chunks) * SESSION_CHUNK_BLOCKS + len(tail)


@pytest.mark.parametrize(
    ("chunks", "tail", "keys"),
    [
        (1, 0, 0),
        (0, 1, 2),
        (SESSION_CHUNKS_MAX + 1, 0, SESSION_CHUNKS_MAX + 1),
        (0, 126, 126),
        (2**32 - 1, 2**31, 1),
    ],
)
def test_counts_that_cannot_be_are_no_manifest(chunks: int, tail: int, keys: int) -> None:
    payload = USER + SESSION + struct.pack("<II", chunks, tail) + KEY * keys
    assert parse_manifest(payload) is None


@given(st.binary(max_size=200))
def test_any_bytes_have_an_outcome(data: bytes) -> None:
    manifest = parse_manifest(data)
    assert manifest is None or pack_manifest(manifest) == data


def test_a_chunk_is_one_page_at_most_and_comes_apart_into_its_keys() -> None:
    assert CHUNK_PAYLOAD_BYTES <= PAGE_BYTES
    assert split_keys(KEY + USER + SESSION) == (KEY, USER + SESSION)
