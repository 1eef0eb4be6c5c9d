"""Executes a connection's calls to lease slots and to fetch blocks, for both transports (fabric and gRPC).

What always holds: a call is accepted or refused as a whole; the connection belongs to the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.errors import ProtocolError
from kvstore.lookups import Kind
from kvstore.node.connection import check_block, check_count, check_generation
from kvstore.node.fetch import FetchRequest
from kvstore.node.session_traces import SeenGet
from kvstore.storage.renewals import lives_as_long
from kvstore.wire.fabric_call import Leased

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.node.calls import HasMetadata
    from kvstore.node.connection import BlockRequest, Connection
    from kvstore.node.landing import Lease
    from kvstore.node.node import Node
    from kvstore.wire.fabric_call import FetchRow

__all__ = ["already_stored", "fetch", "lease_told", "note_leases", "reserve"]


def reserve(
    node: Node,
    connection: Connection,
    blocks: Sequence[BlockRequest],
    durability: Durability,
    lease_ms: int,
    expires_unix_ms: int,
    told: HasMetadata,
) -> list[Lease | None]:
    """Lease a slot for each block; None where it is stored already."""
    began_ns = node.clock.monotonic_ns()
    leases = node.reserve(connection, blocks, durability, lease_ms, expires_unix_ms)
    note_leases(node, connection, leases, durability, began_ns, told)
    return leases


def note_leases(
    node: Node,
    connection: Connection,
    leases: list[Lease | None],
    durability: Durability,
    began_ns: int,
    told: HasMetadata,
) -> None:
    """Let the session's trace and the spans have what a call has leased."""
    node.traces.leased(node.traces.hear(told, connection.tenant), leases)
    parent = None if node.spans is None else node.spans.parent_of(told)
    if node.spans is not None and parent is not None:
        node.spans.leased(parent, began_ns, leases, durability)


def lease_told(connection: Connection, lease: Lease | None) -> Leased:
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


def fetch(
    node: Node,
    connection: Connection,
    fingerprint_of: Sequence[bytes],
    rows: Sequence[FetchRow],
    told: HasMetadata,
    *,
    called: bool,
    shares: bool = False,
) -> None:
    """Queue blocks to be sent. `fingerprint_of` gives the requested layout of each block.

    `called`: the call has come by gRPC. `shares`: its client would rather read them in the hot memory.
    """
    check_count(len(rows))
    for row, fingerprint in zip(rows, fingerprint_of, strict=True):
        check_block(row.key, fingerprint, row.length)
        connection.acks.target(row.ack_word)
        check_generation(row.ack_generation)
        if row.skip if not row.part else row.skip > row.length - row.part:
            raise ProtocolError(
                f"A block of {row.length} bytes has no {row.part} bytes after the first {row.skip}."
            )
    trace = node.traces.hear(told, connection.tenant)
    seen = None
    if trace is not None:
        seen = SeenGet(trace, len(rows), sum(row.part or row.length for row in rows), node.clock)
    session = None if trace is None else trace.name
    looking = node.lookups.begin(told, connection.tenant, Kind.FETCH, len(rows), session)
    node.fetches.enqueue(
        connection,
        [
            FetchRequest(
                key=row.key,
                fingerprint=fingerprint,
                length=row.length,
                target=row.target,
                target_key=row.target_key,
                ack_word=row.ack_word,
                ack_generation=row.ack_generation,
                skip=row.skip,
                part=row.part,
                shares=shares,
                seen=seen,
            )
            for row, fingerprint in zip(rows, fingerprint_of, strict=True)
        ],
        looking,
        called=called,
    )


def already_stored(
    node: Node,
    connection: Connection,
    blocks: Sequence[BlockRequest],
    durability: Durability,
    expires_unix_ms: int,
) -> tuple[list[bool], set[BlockRequest]]:
    """Determine which blocks are stored, and which will get `key taken` in their flag."""
    if durability is Durability.SYNCED:
        # The index knows what is written, not what is synced; the store sorts it out when the block lands.
        return [False] * len(blocks), set()
    found = node.store.lookup([(connection.tenant, block.key) for block in blocks])
    now_ms = node.clock.wall_ms()
    doubtful = node.store.doubtful([entry.generation for entry in found if entry is not None])
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
    taken = {
        block
        for entry, block in zip(entries, blocks, strict=True)
        if durability is Durability.LANDED
        and entry is not None
        and (entry.fingerprint, entry.length) != (block.fingerprint, block.length)
    }
    node.store.used(
        [entry.generation for entry, there in zip(entries, stored, strict=True) if entry and there]
    )
    return stored, taken
