"""Executes a connection's calls to lease slots and to fetch blocks, for both transports (fabric and gRPC).

What always holds: a call is accepted or refused as a whole, unless its connection ends meanwhile; the connection
belongs to the caller. A call of many blocks runs in steps, with others' work between them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.errors import ProtocolError
from kvstore.limits import SLOTS_A_STEP
from kvstore.lookups import Kind
from kvstore.node.connection import check_block, check_count, check_generation
from kvstore.node.fetch import FetchRequest
from kvstore.node.session_traces import SeenGet
from kvstore.storage.renewals import lives_as_long
from kvstore.wire.fabric_call import Leased

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvstore.node.calls import HasMetadata
    from kvstore.node.connection import BlockRequest, Connection
    from kvstore.node.landing import Lease
    from kvstore.node.node import Node
    from kvstore.wire.fabric_call import FetchRow

__all__ = ["already_stored", "fetch", "in_steps", "reserve"]


async def in_steps(count: int) -> AsyncIterator[slice]:
    """Go through the blocks of a call in steps, with other calls in between."""
    for first in range(0, max(count, 1), SLOTS_A_STEP):
        if first:
            await asyncio.sleep(0)
        yield slice(first, first + SLOTS_A_STEP)


async def reserve(
    node: Node,
    find: Callable[[], Connection],
    count: int,
    blocks_of: Callable[[slice], list[BlockRequest]],
    durability: Durability,
    lease_ms: int,
    expires_unix_ms: int,
    caller: HasMetadata,
    answer: Callable[[list[Leased]], object],
) -> None:
    """Lease a slot for each block that is not stored yet, and add the leases to the answer. All or none.

    `find` returns the connection, or raises if it has ended meanwhile.
    """
    began_ns, connection = node.clock.monotonic_ns(), find()
    check_count(count)
    leases: list[Lease | None] = []
    try:
        async for step in in_steps(count):
            connection = find()
            some = node.reserve(connection, blocks_of(step), durability, lease_ms, expires_unix_ms)
            leases += some
            answer([_as_leased(connection, lease) for lease in some])
    except BaseException:
        node.abort(connection, [(one.slot, one.generation) for one in leases if one])
        raise
    _note_leases(node, connection, leases, durability, began_ns, caller)


def _note_leases(
    node: Node,
    connection: Connection,
    leases: list[Lease | None],
    durability: Durability,
    began_ns: int,
    caller: HasMetadata,
) -> None:
    """Pass the leases of a call on to the session's trace and the spans."""
    node.traces.leased(node.traces.of_call(caller, connection.tenant), leases)
    parent = None if node.spans is None else node.spans.parent_of(caller)
    if node.spans is not None and parent is not None:
        node.spans.leased(parent, began_ns, leases, durability)


def _as_leased(connection: Connection, lease: Lease | None) -> Leased:
    """The lease as the client sees it."""
    if lease is None:
        return Leased(slot=0, already_stored=True, generation=0, payload=0, flag=0)
    return Leased(
        slot=lease.slot,
        already_stored=False,
        generation=lease.generation,
        payload=connection.remote(connection.layout.payload(lease.slot)),
        flag=connection.remote(connection.layout.flag(lease.slot)),
    )


async def fetch(
    node: Node,
    find: Callable[[], Connection],
    count: int,
    rows_of: Callable[[slice], list[tuple[bytes, FetchRow]]],
    caller: HasMetadata,
    *,
    called: bool,
    shares: bool = False,
) -> None:
    """Queue blocks to be sent. `rows_of` returns the requested layout of each, and the block.

    `called`: the call arrived over gRPC. `shares`: its client prefers to read them in the hot memory.
    """
    connection = find()
    check_count(count)
    rows: list[tuple[bytes, FetchRow]] = []
    async for step in in_steps(count):
        some = rows_of(step)
        for fingerprint, row in some:
            _check_row(connection, fingerprint, row)
        rows += some
    connection = find()
    trace = node.traces.of_call(caller, connection.tenant)
    seen = None
    if trace is not None:
        seen = SeenGet(trace, count, sum(row.part or row.length for _, row in rows), node.clock)
    session = None if trace is None else trace.name
    node.fetches.refuse_more(connection, count)
    looking = node.lookups.begin(caller, connection.tenant, Kind.FETCH, count, session)
    looking.expect()
    left = count
    try:
        async for step in in_steps(count):
            some = rows[step]
            node.fetches.enqueue(
                find(),
                [
                    FetchRequest(
                        row.key,
                        fingerprint,
                        row.length,
                        row.target,
                        row.target_key,
                        row.ack_word,
                        row.ack_generation,
                        row.skip,
                        row.part,
                        shares,
                        seen,
                    )
                    for fingerprint, row in some
                ],
                looking,
                count - left,
                called=called,
            )
            left -= len(some)
    finally:
        if left:
            node.fetches.give_up(looking, left)


def _check_row(connection: Connection, fingerprint: bytes, row: FetchRow) -> None:
    check_block(row.key, fingerprint, row.length)
    connection.acks.target(row.ack_word)
    check_generation(row.ack_generation)
    if row.skip if not row.part else row.skip > row.length - row.part:
        raise ProtocolError(
            f"A block of {row.length} bytes has no {row.part} bytes after the first {row.skip}."
        )


def already_stored(
    node: Node,
    connection: Connection,
    blocks: Sequence[BlockRequest],
    durability: Durability,
    expires_unix_ms: int,
) -> list[bool]:
    """Determine which blocks are stored."""
    if durability is Durability.SYNCED:
        # The index knows which blocks are written, not which are synced; the store decides when the block lands.
        return [False] * len(blocks)
    found = node.store.lookup([(connection.tenant, block.key) for block in blocks])
    now_ms = node.clock.wall_ms()
    doubtful = node.store.doubtful(found)
    entries = [
        entry
        if entry is not None and entry.generation not in doubtful and not 0 < entry.expires_ms <= now_ms
        else None
        for entry in found
    ]
    stored = [
        entry is not None
        and entry.fingerprint == block.fingerprint
        and entry.length == block.length
        and lives_as_long(entry.expires_ms, expires_unix_ms)  # else it is put, and its header written anew
        for entry, block in zip(entries, blocks, strict=True)
    ]
    node.store.used(
        [entry.generation for entry, there in zip(entries, stored, strict=True) if entry and there]
    )
    return stored
