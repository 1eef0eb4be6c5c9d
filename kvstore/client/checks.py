"""What a client refuses to be asked for, before anything is sent: one typed error for each batch that can't be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.blocks import regions_of
from kvstore.errors import ProtocolError
from kvstore.limits import BATCH_BLOCKS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import Block
    from nic_offload.fabric import Fabric

__all__ = ["check_armed", "check_gets", "check_memory", "check_reserved"]


def check_memory(fabric: Fabric, blocks: Sequence[Block]) -> None:
    """Refuse blocks in memory that is not registered here, or no longer."""
    if any(one.handle is None or one not in fabric.regions for one in regions_of(blocks)):
        raise ProtocolError("A block's memory is not registered with this client, or no longer.")


def check_gets(fabric: Fabric, blocks: Sequence[Block], blocks_max: int) -> None:
    """Refuse a get of these."""
    if not 1 <= len(blocks) <= blocks_max:
        raise ProtocolError(f"A call names 1 to {blocks_max} blocks, not {len(blocks)}.")
    if not all(block.key for block in blocks):
        raise ProtocolError("A block without a key can only be armed, and is named before it fires.")
    check_memory(fabric, blocks)


def _check_whole(blocks: Sequence[Block]) -> None:
    if any(block.whole for block in blocks):
        raise ProtocolError("A part of a block can be got, and not put.")


def check_reserved(fabric: Fabric, blocks: Sequence[Block]) -> None:
    """Refuse to ask for slots for these."""
    check_gets(fabric, blocks, BATCH_BLOCKS_MAX)
    _check_whole(blocks)


def check_armed(fabric: Fabric, blocks: Sequence[Block], blocks_max: int, bytes_max: int) -> None:
    """Refuse to arm puts of these."""
    if not 1 <= len(blocks) <= blocks_max:
        raise ProtocolError(f"A batch of puts has 1 to {blocks_max} blocks, not {len(blocks)}.")
    largest = max(block.length for block in blocks)
    if largest > bytes_max:
        raise ProtocolError(
            f"The client was opened for blocks of up to {bytes_max} bytes, and one has {largest}."
        )
    _check_whole(blocks)
    check_memory(fabric, blocks)
