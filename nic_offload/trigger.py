"""Triggered puts: armed in batches, fired by a flag word, finished without the application.

A `TriggeredPut` writes a piece of a registered region into a peer's memory when a flag word reaches its
threshold, and chains an 8-byte flag put to it: the target sees the flag only after all the bytes.

What always holds, on every backend (the only one yet is the agent, our own queue in the C core over any
provider with remote writes):
 1. it never fires before its word reaches the threshold, and fires at most once;
 2. no order between puts, whatever their thresholds; the flag put comes after its own bytes, always;
 3. if the bytes fail, the flag put never goes out;
 4. a deadline that passes before the put goes on the wire ends it, exactly; what is on the wire can't be
    called back, and its owner ends the endpoint instead;
 5. `Fabric.cancel` is exact for what has not gone out.

What it doesn't do yet: libfabric's own deferred work (`sockets`, `cxi`), reads, scatter-gather.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Endpoint, Fabric, Region

__all__ = [
    "AckWatch",
    "Landing",
    "TriggeredPut",
    "WordPut",
    "arm",
    "put_words",
    "watch_acks",
    "watch_landings",
]


class TriggeredPut(NamedTuple):
    """One put. Without `trigger_address` it fires at once."""

    tag: int
    endpoint: Endpoint
    peer: int
    region: Region
    source: int  # an address inside the region
    length: int
    target: int
    target_key: int
    flag_target: int | None = None  # None: no flag put
    flag_key: int = 0
    flag_value: int = 0
    trigger_address: int = 0
    threshold: int = 0
    deadline_ns: int = 0  # CLOCK_MONOTONIC; 0: none
    crc32c: int | None = None  # send only if the bytes still have this checksum
    report_fired: bool = False
    acked: bool = False  # an ack watch tells of its success: report only its failure


class WordPut(NamedTuple):
    """An 8-byte put at once, about which nothing is reported."""

    endpoint: Endpoint
    peer: int
    target: int
    target_key: int
    value: int


class Landing(NamedTuple):
    """A slot that waits for its block: see `struct tk_landing` in core.h."""

    tag: int
    endpoint: Endpoint
    word: int
    generation: int
    payload: int
    peer: int
    ack_target: int
    ack_key: int
    ack_value: int
    deadline_ns: int
    length: int


class AckWatch(NamedTuple):
    """A word of our own memory in which a peer acknowledges: see `struct tk_ack_watch` in core.h."""

    tag: int
    endpoint: Endpoint
    word: int
    generation: int
    deadline_ns: int
    final_code: int


# The structures of core.h, field by field; the sizes are checked, so a change there is seen here.
_PUT = struct.Struct("=13Q3I4x")
_LANDING = struct.Struct("=10QI4x")
_ACK = struct.Struct("=5QI4x")
assert _PUT.size == ffi.sizeof("struct tk_put")
assert _LANDING.size == ffi.sizeof("struct tk_landing")
assert _ACK.size == ffi.sizeof("struct tk_ack_watch")


def _check(code: int, doing: str) -> None:
    if code:
        raise FabricError.from_code(doing, code)


def _row(put: TriggeredPut) -> bytes:
    flags = (lib.TK_REPORT_FIRED if put.report_fired else 0) | (lib.TK_ACKED_PUT if put.acked else 0)
    flag_target, crc32c = put.flag_target, put.crc32c
    if flag_target is not None:
        flags |= lib.TK_FLAG_PUT
    if crc32c is not None:
        flags |= lib.TK_VERIFY_CRC
    return _PUT.pack(
        put.tag,
        put.endpoint.pointer,
        put.peer,
        put.source,
        put.target,
        put.target_key,
        flag_target or 0,
        put.flag_key,
        put.flag_value,
        put.trigger_address,
        put.threshold,
        put.deadline_ns,
        put.region.pointer,
        put.length,
        crc32c or 0,
        flags,
    )


def _word_row(word: WordPut) -> bytes:
    flags = lib.TK_QUIET | lib.TK_FLAG_PUT
    flag = (word.target, word.target_key, word.value)
    return _PUT.pack(0, word.endpoint.pointer, word.peer, 0, 0, 0, *flag, 0, 0, 0, 0, 0, 0, flags)


def arm(fabric: Fabric, puts: Sequence[TriggeredPut]) -> None:
    """Queue the puts, all or none. From here on they need no call from anybody."""
    rows = ffi.from_buffer("struct tk_put[]", b"".join(map(_row, puts)))
    _check(lib.tk_arm(fabric.handle, rows, len(puts)), f"Arming {len(puts)} puts")


def put_words(fabric: Fabric, words: Sequence[WordPut]) -> None:
    """Put 8-byte words, such as acknowledgements, quietly: their reader has a deadline of his own."""
    rows = ffi.from_buffer("struct tk_put[]", b"".join(map(_word_row, words)))
    _check(lib.tk_arm(fabric.handle, rows, len(words)), f"Putting {len(words)} words")


def watch_landings(fabric: Fabric, landings: Sequence[Landing]) -> None:
    """Wait for blocks in slots; each ends in LANDED or WATCH_FAILED."""
    packed = [_LANDING.pack(landing.tag, landing.endpoint.pointer, *landing[2:]) for landing in landings]
    rows = ffi.from_buffer("struct tk_landing[]", b"".join(packed))
    _check(lib.tk_watch_landings(fabric.handle, rows, len(landings)), f"Watching {len(landings)} slots")


def watch_acks(fabric: Fabric, watches: Sequence[AckWatch]) -> None:
    """Wait for acknowledgements; each gives ACKED events and ends in a final one or WATCH_FAILED."""
    packed = [_ACK.pack(watch.tag, watch.endpoint.pointer, *watch[2:]) for watch in watches]
    rows = ffi.from_buffer("struct tk_ack_watch[]", b"".join(packed))
    _check(lib.tk_watch_acks(fabric.handle, rows, len(watches)), f"Watching {len(watches)} words")
