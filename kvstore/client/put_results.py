"""What the result of a put says about its source: whether the caller may overwrite it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import PutResult

__all__ = ["is_late", "may_read", "reusable"]


def is_late(result: PutResult) -> bool:
    """Whether a put continues, or has ended by its deadline, after which nothing is armed."""
    return isinstance(result.error, DeadlineExceeded)


def may_read(result: PutResult) -> bool:
    """Whether the put may still read its source."""
    return is_late(result) and not result.landed_ns


def reusable(results: Sequence[PutResult]) -> set[int]:
    """The places of blocks that have landed or failed, whose sources the caller may overwrite."""
    return {at for at, result in enumerate(results) if not may_read(result)}
