"""Checks of a client's arguments, before anything is sent: an invalid batch raises one typed error."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from kvstore.client.blocks import regions_of, whole_of
from kvstore.errors import InvalidArgument, NotRegistered
from kvstore.limits import BATCH_BLOCKS_MAX, LEASE_TIMEOUT_MS_MAX
from kvstore.names import fits_domain, is_in_domain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import Block
    from nic_offload.fabric import Fabric

__all__ = [
    "check_armed",
    "check_domain",
    "check_gets",
    "check_lease",
    "check_memory",
    "check_number",
    "check_reserved",
]

_key, _length, _domain = attrgetter("key"), attrgetter("length"), attrgetter("domain")


def check_memory(fabric: Fabric, blocks: Sequence[Block]) -> None:
    """Refuse blocks in memory that is not registered here, or no longer."""
    known = fabric.regions
    for one in regions_of(blocks):
        if one.handle is None or one not in known:
            raise NotRegistered("A block's memory is not registered with this client.")


def check_gets(fabric: Fabric, blocks: Sequence[Block], blocks_max: int) -> None:
    """Refuse a get of these."""
    if not 1 <= len(blocks) <= blocks_max:
        raise InvalidArgument(f"A call takes 1 to {blocks_max} blocks, not {len(blocks)}.")
    if not all(map(_key, blocks)):
        raise InvalidArgument("A block without a key can only be armed, and must be named before it fires.")
    check_memory(fabric, blocks)


def _check_whole(blocks: Sequence[Block]) -> None:
    if any(map(whole_of, blocks)):
        raise InvalidArgument("A part of a block can be fetched, but not put.")


def check_domain(key: bytes, domain: bytes) -> None:
    """Refuse to put a block into another erase domain than the one that its key was made for."""
    if fits_domain(key, domain):
        return
    if domain:
        raise InvalidArgument(
            "The block's key was not made for its erase domain: use kvstore.names.in_domain(key, domain)."
        )
    raise InvalidArgument("The block's key belongs to an erase domain; say which one, by its `domain`.")


def _check_domains(blocks: Sequence[Block]) -> None:
    if any(map(_domain, blocks)) or any(map(is_in_domain, map(_key, blocks))):
        for one in blocks:
            if one.key:  # else it is checked when it is named
                check_domain(one.key, one.domain)


def check_reserved(fabric: Fabric, blocks: Sequence[Block]) -> None:
    """Refuse to ask for slots for these."""
    check_gets(fabric, blocks, BATCH_BLOCKS_MAX)
    _check_whole(blocks)
    _check_domains(blocks)


def check_armed(fabric: Fabric, blocks: Sequence[Block], blocks_max: int, bytes_max: int) -> None:
    """Refuse to arm puts of these."""
    if not 1 <= len(blocks) <= blocks_max:
        raise InvalidArgument(f"A batch of puts has 1 to {blocks_max} blocks, not {len(blocks)}.")
    largest = max(map(_length, blocks))
    if largest > bytes_max:
        raise InvalidArgument(
            f"The client was opened for blocks of up to {bytes_max} bytes, and one has {largest}."
        )
    _check_whole(blocks)
    _check_domains(blocks)
    check_memory(fabric, blocks)


def check_number(what: str, number: int, bits: int = 32) -> int:
    """Refuse a number that no message of this width can carry; returns it."""
    if not 0 <= number < 1 << bits:
        raise InvalidArgument(f"{what} must be 0 to {(1 << bits) - 1}, not {number}.")
    return number


def check_lease(lease_ms: int, what_lasts: str) -> None:
    """Refuse a time that no slot is leased for, and no put waits."""
    if not 1 <= lease_ms <= LEASE_TIMEOUT_MS_MAX:
        raise InvalidArgument(f"{what_lasts} 1 to {LEASE_TIMEOUT_MS_MAX} ms, not {lease_ms}.")
