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

from typing import TYPE_CHECKING, Any, NamedTuple

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
    length: int
    peer: int
    ack_target: int
    ack_key: int
    ack_value: int
    deadline_ns: int


class AckWatch(NamedTuple):
    """A word of our own memory in which a peer acknowledges: see `struct tk_ack_watch` in core.h."""

    tag: int
    endpoint: Endpoint
    word: int
    generation: int
    final_code: int
    deadline_ns: int


def _fill(row: Any, fields: Landing | AckWatch) -> None:
    values = fields._asdict()
    values["endpoint"] = fields.endpoint.handle
    for name, value in values.items():
        setattr(row, name, value)


def _check(code: int, doing: str) -> None:
    if code:
        raise FabricError.from_code(doing, code)


def arm(fabric: Fabric, puts: Sequence[TriggeredPut]) -> None:
    """Queue the puts, all or none. From here on they need no call from anybody."""
    batch = ffi.new("struct tk_put[]", len(puts))
    for i, put in enumerate(puts):
        row = batch[i]
        row.tag = put.tag
        row.endpoint = put.endpoint.handle
        row.peer = put.peer
        row.region = put.region.handle
        row.source = put.source
        row.length = put.length
        row.target = put.target
        row.target_key = put.target_key
        row.trigger = put.trigger_address
        row.threshold = put.threshold
        row.deadline_ns = put.deadline_ns
        flags = lib.TK_REPORT_FIRED if put.report_fired else 0
        if put.flag_target is not None:
            row.flag_target = put.flag_target
            row.flag_key = put.flag_key
            row.flag_value = put.flag_value
            flags |= lib.TK_FLAG_PUT
        if put.crc32c is not None:
            row.crc32c = put.crc32c
            flags |= lib.TK_VERIFY_CRC
        row.flags = flags
    _check(lib.tk_arm(fabric.handle, batch, len(puts)), f"Arming {len(puts)} puts")


def put_words(fabric: Fabric, words: Sequence[WordPut]) -> None:
    """Put 8-byte words, such as acknowledgements, quietly: their reader has a deadline of his own."""
    batch = ffi.new("struct tk_put[]", len(words))
    for i, word in enumerate(words):
        row = batch[i]
        row.endpoint = word.endpoint.handle
        row.peer = word.peer
        row.flag_target = word.target
        row.flag_key = word.target_key
        row.flag_value = word.value
        row.flags = lib.TK_QUIET | lib.TK_FLAG_PUT
    _check(lib.tk_arm(fabric.handle, batch, len(words)), f"Putting {len(words)} words")


def watch_landings(fabric: Fabric, landings: Sequence[Landing]) -> None:
    """Wait for blocks in slots; each ends in LANDED or WATCH_FAILED."""
    batch = ffi.new("struct tk_landing[]", len(landings))
    for i, landing in enumerate(landings):
        row = batch[i]
        _fill(row, landing)
    _check(lib.tk_watch_landings(fabric.handle, batch, len(landings)), f"Watching {len(landings)} slots")


def watch_acks(fabric: Fabric, watches: Sequence[AckWatch]) -> None:
    """Wait for acknowledgements; each gives ACKED events and ends in a final one or WATCH_FAILED."""
    batch = ffi.new("struct tk_ack_watch[]", len(watches))
    for i, watch in enumerate(watches):
        row = batch[i]
        _fill(row, watch)
    _check(lib.tk_watch_acks(fabric.handle, batch, len(watches)), f"Watching {len(watches)} words")
