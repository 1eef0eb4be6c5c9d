"""Scatter and gather: scattered pages of an engine's KV cache, as one transfer with one flag.

An engine's blocks are paged: one block of the store is many pieces in the GPU's memory. Pieces that adjoin on both
sides become one extent, and each extent one put (or one get). One flag follows all of them, chained to a counter that
each extent increments. So the peer sees the flag only when every byte has arrived, on every backend.

What always holds: there is one final event, with the transfer's tag. If an extent fails, the flag is never sent; the
event's status is -EPIPE, and its value the errno of the first extent that failed. A transfer waits only for its own
operations.

What it doesn't do: sort. Pieces are merged with the piece before them, in the engine's order; sorting would cost
every transfer and help few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nic_offload.trigger import Operation, TriggeredGet, TriggeredNotify, TriggeredPut, arm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nic_offload.counter import Counter
    from nic_offload.fabric import Endpoint, Fabric, Region

__all__ = ["LENGTH_MAX", "Flag", "Piece", "coalesce", "gather_get", "scatter_put"]

LENGTH_MAX = (4 << 30) - 1  # for one operation, on every backend


class Piece(NamedTuple):
    """Bytes at both ends: an address inside the region, and the address by which the peer names its own."""

    local: int
    remote: int
    length: int


class Flag(NamedTuple):
    """The 8-byte word that tells the peer that everything has arrived."""

    target: int
    key: int
    value: int


def coalesce(pieces: Iterable[Piece], length_max: int = LENGTH_MAX) -> list[Piece]:
    """Join each piece with the one before it where the two touch on both sides, up to a length."""
    extents: list[Piece] = []
    local = remote = length = 0
    for piece in pieces:
        if (
            length
            and piece.local == local + length
            and piece.remote == remote + length
            and length + piece.length <= length_max
        ):
            length += piece.length
            continue
        if length:
            extents.append(Piece(local, remote, length))
        local, remote, length = piece
    if length:
        extents.append(Piece(local, remote, length))
    return extents


def _arm(
    fabric: Fabric,
    tag: int,
    moves: list[Operation],
    moved: Counter,
    endpoint: Endpoint,
    peer: int,
    flag: Flag,
    deadline_ns: int,
) -> None:
    last = TriggeredNotify(
        tag=tag,
        endpoint=endpoint,
        peer=peer,
        target=flag.target,
        target_key=flag.key,
        value=flag.value,
        trigger=moved,
        threshold=len(moves),
        deadline_ns=deadline_ns,
    )
    arm(fabric, [*moves, last])


def scatter_put(
    fabric: Fabric,
    *,
    tag: int,
    endpoint: Endpoint,
    peer: int,
    region: Region,
    pieces: Iterable[Piece],
    target_key: int,
    flag: Flag,
    trigger: Counter | None = None,
    threshold: int = 0,
    deadline_ns: int = 0,
) -> int:
    """Arm a put of all the pieces, followed by the flag; returns how many puts it takes."""
    extents = coalesce(pieces)
    with fabric.open_counter() as moved:
        puts: list[Operation] = [
            TriggeredPut(
                tag=tag,
                endpoint=endpoint,
                peer=peer,
                region=region,
                source=local,
                length=length,
                target=remote,
                target_key=target_key,
                trigger=trigger,
                threshold=threshold,
                completion=moved,
                deadline_ns=deadline_ns,
                quiet=True,
            )
            for local, remote, length in extents
        ]
        _arm(fabric, tag, puts, moved, endpoint, peer, flag, deadline_ns)
    return len(extents)


def gather_get(
    fabric: Fabric,
    *,
    tag: int,
    endpoint: Endpoint,
    peer: int,
    region: Region,
    pieces: Iterable[Piece],
    source_key: int,
    flag: Flag,
    trigger: Counter | None = None,
    threshold: int = 0,
    deadline_ns: int = 0,
) -> int:
    """Arm a get of all the pieces, followed by a flag for the peer; returns how many gets it takes."""
    extents = coalesce(pieces)
    with fabric.open_counter() as moved:
        gets: list[Operation] = [
            TriggeredGet(
                tag=tag,
                endpoint=endpoint,
                peer=peer,
                region=region,
                target=local,
                length=length,
                source=remote,
                source_key=source_key,
                trigger=trigger,
                threshold=threshold,
                completion=moved,
                deadline_ns=deadline_ns,
                quiet=True,
            )
            for local, remote, length in extents
        ]
        _arm(fabric, tag, gets, moved, endpoint, peer, flag, deadline_ns)
    return len(extents)
