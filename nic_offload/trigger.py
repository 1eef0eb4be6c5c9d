"""Triggered operations: armed in batches, fired by a counter, completed without the application.

A `TriggeredPut` writes a piece of a registered region to a peer's memory when its counter reaches its threshold; a
`TriggeredGet` reads one from there. Both may be followed by an 8-byte flag put, which the peer sees only after all
the bytes, and by a change of a counter. A `TriggeredNotify` is the flag alone, a `CounterMove` the counter alone. A
chain is an operation whose `trigger` is another one's `completion`.

What always holds, on every backend (`cxi` and `sockets` through libfabric's deferred work, the agent over any
provider with remote writes):

1. An operation never fires before its counter reaches the threshold.
2. It fires at most once, and DONE means that all of it has arrived at the peer.
3. Operations have no order, whatever their thresholds, except in a chain.
4. If an operation fails, what follows it in its chain, its flag included, never happens and fails too.
5. `Fabric.cancel` and `Fabric.flush` are exact: counted operations are never sent. On cxi they flush the whole
   domain. Closing the endpoint ends all of its operations, on every backend.
6. The peer always polls an 8-byte flag.
7. A deadline ends operations that have not been sent. One that can't be recalled is reported as LATE, and its owner
   closes the endpoint.

To arm again, use a higher threshold on the same counter, which only grows.

What it doesn't do: more than 4 GiB - 1 in one operation; atomics.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.counter import Counter
    from nic_offload.fabric import Endpoint, Fabric, Region
    from nic_offload.group import Group
    from nic_offload.pieces import Pieces
    from nic_offload.shelf import Desk

__all__ = [
    "AckWatch",
    "CounterMove",
    "Landing",
    "Operation",
    "TriggeredGet",
    "TriggeredNotify",
    "TriggeredPut",
    "WordPut",
    "arm",
    "put_words",
    "watch_acks",
    "watch_landings",
]


class TriggeredPut(NamedTuple):
    """Write to a peer. Without a `trigger` it fires at once."""

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
    trigger: Counter | None = None
    threshold: int = 0
    completion: Counter | None = None  # moved by one once bytes and flag have arrived
    deadline_ns: int = 0  # CLOCK_MONOTONIC; 0: none
    crc32c: int | None = None  # send only if the bytes still have this checksum
    report_fired: bool = False
    acked: bool = False  # an ack watch reports its success: report only its failure
    sent: bool = False  # it ends in SENT instead of DONE: the source may be reused, and no more is known
    group: Group | None = None  # notes when it fired
    row: int = 0
    quiet: bool = False  # report nothing: operations that wait for `completion` fail with it
    pieces: Pieces | None = None  # the bytes, which are gathered at `source` when it fires
    part: tuple[int, int] = (
        0,
        0,
    )  # of the checksummed bytes, skip the first number and put the second; 0: all
    shared: bool = False  # the peer reads these bytes itself, if it has our memory mapped


class TriggeredGet(NamedTuple):
    """Read from a peer. Without a `trigger` it fires at once."""

    tag: int
    endpoint: Endpoint
    peer: int
    region: Region
    target: int  # an address inside the region
    length: int
    source: int
    source_key: int
    flag_target: int | None = None  # where the peer gets a flag once the bytes are here; None: it gets none
    flag_key: int = 0
    flag_value: int = 0
    trigger: Counter | None = None
    threshold: int = 0
    completion: Counter | None = None
    deadline_ns: int = 0
    crc32c: int | None = None  # fail, with no flag and no count, unless the bytes have this checksum
    report_fired: bool = False
    quiet: bool = False


class TriggeredNotify(NamedTuple):
    """Put an 8-byte word into a peer's memory. Without a `trigger` it fires at once."""

    tag: int
    endpoint: Endpoint
    peer: int
    target: int
    target_key: int
    value: int
    trigger: Counter | None = None
    threshold: int = 0
    completion: Counter | None = None
    deadline_ns: int = 0
    report_fired: bool = False
    quiet: bool = False


class CounterMove(NamedTuple):
    """Add to a counter, or set it, when another reaches a threshold.

    Setting it below its value has no effect, except on a NIC's own counter, where it must not be done.
    """

    tag: int
    counter: Counter
    value: int
    trigger: Counter | None = None
    threshold: int = 0
    sets: bool = False
    deadline_ns: int = 0
    group: Group | None = None  # notes when it fired
    row: int = 0


Operation = TriggeredPut | TriggeredGet | TriggeredNotify | CounterMove


class WordPut(NamedTuple):
    """An immediate 8-byte put that reports nothing."""

    endpoint: Endpoint
    peer: int
    target: int
    target_key: int
    value: int


class Landing(NamedTuple):
    """A slot that waits for its block: see `struct tk_landing` in operations.h."""

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
    quiet: bool = False  # its peer is answered otherwise
    desk: Desk | None = None  # may answer calls that arrive here
    region: Region | None = None  # has the word; needed if the endpoint is sealed


class AckWatch(NamedTuple):
    """A word of our own memory in which a peer acknowledges: see `struct tk_ack_watch` in operations.h."""

    tag: int
    endpoint: Endpoint
    word: int
    generation: int
    deadline_ns: int
    final_code: int
    group: Group | None = None  # its row notes codes up to `good_max`, which are then not reported
    good_max: int = 0
    row: int = 0


# The structures of operations.h, field by field; the sizes are checked, so a change there fails here.
_OPERATION = struct.Struct("=19Q6I")
_LANDING = struct.Struct("=10Q2I2Q")
_ACK = struct.Struct("=6Q3I4x")
assert _OPERATION.size == ffi.sizeof("struct tk_operation")
assert _LANDING.size == ffi.sizeof("struct tk_landing")
assert _ACK.size == ffi.sizeof("struct tk_ack_watch")


def _check(code: int, doing: str) -> None:
    if code:
        raise FabricError.from_code(doing, code)


def _pointer(of: Counter | Group | None) -> int:
    return 0 if of is None else of.pointer


def _transfer_row(
    operation: TriggeredPut | TriggeredGet,
    local: int,
    remote: int,
    remote_key: int,
    flags: int,
    group: Group | None = None,
    row: int = 0,
    pieces: Pieces | None = None,
    part: tuple[int, int] = (0, 0),
) -> bytes:
    flag_target, crc32c = operation.flag_target, operation.crc32c
    if operation.report_fired:
        flags |= lib.TK_REPORT_FIRED
    if operation.quiet:
        flags |= lib.TK_QUIET
    if flag_target is not None:
        flags |= lib.TK_FLAG_PUT
    if crc32c is not None:
        flags |= lib.TK_VERIFY_CRC
    return _OPERATION.pack(
        operation.tag,
        operation.endpoint.pointer,
        operation.peer,
        local,
        remote,
        remote_key,
        flag_target or 0,
        operation.flag_key,
        operation.flag_value,
        _pointer(operation.trigger),
        operation.threshold,
        _pointer(operation.completion),
        1,
        operation.deadline_ns,
        operation.region.pointer,
        0 if group is None else group.pointer,
        *(0, 0),
        0 if pieces is None else pieces.pointer,
        operation.length,
        crc32c or 0,
        flags,
        row,
        *part,
    )


def _notify_row(notify: TriggeredNotify) -> bytes:
    flags = lib.TK_FLAG_PUT
    if notify.report_fired:
        flags |= lib.TK_REPORT_FIRED
    if notify.quiet:
        flags |= lib.TK_QUIET
    return _OPERATION.pack(
        notify.tag,
        notify.endpoint.pointer,
        notify.peer,
        *(0, 0, 0),
        notify.target,
        notify.target_key,
        notify.value,
        _pointer(notify.trigger),
        notify.threshold,
        _pointer(notify.completion),
        1,
        notify.deadline_ns,
        *(0, 0, 0, 0, 0, 0, 0),
        flags,
        *(0, 0, 0),
    )


def _move_row(move: CounterMove) -> bytes:
    return _OPERATION.pack(
        move.tag,
        *(0, 0, 0, 0, 0, 0, 0, 0),
        _pointer(move.trigger),
        move.threshold,
        move.counter.pointer,
        move.value,
        move.deadline_ns,
        0,
        _pointer(move.group),
        *(0, 0, 0, 0, 0),
        lib.TK_SET_COUNTER if move.sets else 0,
        move.row,
        *(0, 0),
    )


def _row(operation: Operation) -> bytes:
    if isinstance(operation, TriggeredPut):
        flags = (lib.TK_ACKED_PUT if operation.acked else 0) | (lib.TK_SENT_PUT if operation.sent else 0)
        flags |= lib.TK_SHARED_PUT if operation.shared else 0
        where = operation.source, operation.target, operation.target_key
        return _transfer_row(
            operation,
            *where,
            flags,
            operation.group,
            operation.row,
            operation.pieces,
            operation.part,
        )
    if isinstance(operation, TriggeredGet):
        return _transfer_row(operation, operation.target, operation.source, operation.source_key, lib.TK_GET)
    if isinstance(operation, TriggeredNotify):
        return _notify_row(operation)
    return _move_row(operation)


def _word_row(word: WordPut) -> bytes:
    flag = (word.target, word.target_key, word.value)
    nothing = (0,) * 12
    flags = lib.TK_QUIET | lib.TK_FLAG_PUT
    return _OPERATION.pack(0, word.endpoint.pointer, word.peer, 0, 0, 0, *flag, *nothing, flags, 0, 0, 0)


def arm(fabric: Fabric, operations: Sequence[Operation]) -> None:
    """Queue the operations, all or none. No further call is needed."""
    rows = ffi.from_buffer("struct tk_operation[]", b"".join(map(_row, operations)))
    _check(lib.tk_arm(fabric.handle, rows, len(operations)), f"Arming {len(operations)} operations")


def put_words(fabric: Fabric, words: Sequence[WordPut]) -> None:
    """Put 8-byte words, such as acknowledgements, quietly: their reader has a deadline of its own."""
    rows = ffi.from_buffer("struct tk_operation[]", b"".join(map(_word_row, words)))
    _check(lib.tk_arm(fabric.handle, rows, len(words)), f"Putting {len(words)} words")


def watch_landings(fabric: Fabric, landings: Sequence[Landing]) -> None:
    """Wait for blocks in slots; each ends in LANDED or WATCH_FAILED."""
    packed = [
        _LANDING.pack(
            landing.tag,
            landing.endpoint.pointer,
            *landing[2:-2],
            0 if landing.desk is None else landing.desk.pointer,
            0 if landing.region is None else landing.region.pointer,
        )
        for landing in landings
    ]
    rows = ffi.from_buffer("struct tk_landing[]", b"".join(packed))
    _check(lib.tk_watch_landings(fabric.handle, rows, len(landings)), f"Watching {len(landings)} slots")


def watch_acks(fabric: Fabric, watches: Sequence[AckWatch]) -> None:
    """Wait for acknowledgements; each gives ACKED events and ends in a final one or WATCH_FAILED.

    If a watch has a group, codes up to `good_max` are noted in its row instead.
    """
    packed = [
        _ACK.pack(
            watch.tag,
            watch.endpoint.pointer,
            watch.word,
            watch.generation,
            watch.deadline_ns,
            0 if watch.group is None else watch.group.pointer,
            watch.final_code,
            watch.good_max,
            watch.row,
        )
        for watch in watches
    ]
    rows = ffi.from_buffer("struct tk_ack_watch[]", b"".join(packed))
    _check(lib.tk_watch_acks(fabric.handle, rows, len(watches)), f"Watching {len(watches)} words")
